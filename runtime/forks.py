"""--import: forks that a command needs, so that their kinds of adapters, fusions, encoders, stages
and tasks are known."""

import argparse
import importlib

from runtime.settings import option


def import_modules(names):
    """Imports modules, "examples.lora,examples.sts_b", and returns their names as given."""
    for name in names.split(","):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as e:
            form = "--import takes a module's name, such as examples.lora, not examples/lora.py"
            where = "it is looked for here, and where PYTHONPATH says"
            raise argparse.ArgumentTypeError(f"{e}: {form}; {where}") from e
        except (ValueError, TypeError) as e:  # argparse would say "invalid value" alone
            raise argparse.ArgumentTypeError(f"importing {name}: {e}") from e
    return names


def imports_option(**details):
    """The option --import, of every command that opens an encoder or a run."""
    return option(
        None,
        "a module with kinds of your own, for instance examples.lora; several: with commas",
        flag="--import",
        metavar="MODULE",
        action=import_modules,
        comes_first=True,
        **details,
    )
