"""Options of a command, declared once: a frozen dataclass is its command line and its record.

    @dataclass(frozen=True)
    class Options:
        run: Path = argument("the directory of a finished run")
        epochs: int | None = option(None, "at most", valid=COUNT)
        device: str = same_option(Settings, "device")  # as that of another command

    options = parse(Options, argv, "python -m experiments.demo", __doc__)
    recorded_values(options)        # what config.json says of them

Nothing here knows an option by its name.
"""

import argparse
import dataclasses
import json
import math
import os
import types
import typing

# (what a value must be, in words; the test)
COUNT = "at least 1, and under 10^9", lambda value: 1 <= value < 10**9
POSITIVE = "a positive number", lambda value: 0 < value < math.inf
FRACTION = "between 0 and 1", lambda value: 0 < value < 1
SEED = "in 0 .. 2^32 - 1", lambda value: 0 <= value < 2**32


def option(default=None, help="", **details):
    """
    A field of a dataclass of options, --NAME on the command line. Its annotation says how its words
    are read: bool (a flag), tuple (any number of words), dict (words NAME=VALUE, a value is JSON or
    a string), or else one word.

    details: choices; metavar; valid, a pair as above; action, which makes something of each word;
    group, the heading in --help over it and those that follow; required; recorded=False, for what a
    run does not record; env, a variable of the environment that sets the default; may_change=True,
    for what may differ between a run and the command that resumes it (see `changeable`); excludes,
    options that cannot be given beside it; needs, one that must be; distinct=True, for values that
    must differ (whatever their case); flag, another name, or None for a field that is no
    option; comes_first=True, for one whose action decides what the others may be; and whatever the
    dataclass itself wants to know of its fields. choices may be a function that returns them.
    """
    metadata = {"help": help, **details}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def unrecorded(default=None, help="", **details):
    """An option that a run does not record as such, since it says how to run."""
    return option(default, help, recorded=False, **details)


def argument(help, default=None, **details):
    """A field that is given by its position. With a default other than None it may be missing."""
    return option(default, help, positional=True, **details)


def same_option(options, name, **changes):
    """A field that is the option `name` of another dataclass, with some details changed."""
    field = next(field for field in dataclasses.fields(options) if field.name == name)
    default = changes.pop("default", default_of(field))
    return option(default, **{**field.metadata, **changes})


def default_of(field):
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def field_names(options):
    return [field.name for field in dataclasses.fields(options)]


class Parser(argparse.ArgumentParser):
    """One that raises its errors as ValueError, so that they are one line like all others."""

    def error(self, message):
        raise ValueError(message)


def parse(options, argv, prog, description, epilog=""):
    """argv (None: the command line's) -> an instance of the dataclass. Raises ValueError for what
    cannot be parsed or is out of range."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog=prog, description=description, epilog=epilog, formatter_class=as_written)
    groups, hints = {None: parser}, typing.get_type_hints(options)
    known = [field for field in dataclasses.fields(options) if field.metadata.get("flag", True)]
    first = Parser(add_help=False, allow_abbrev=False)
    for field in known:
        if field.metadata.get("comes_first"):
            add_option(first, field, hints[field.name])
    first.parse_known_args(argv)
    heading = None
    for field in known:
        heading = field.metadata.get("group", heading)
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        add_option(groups[heading], field, hints[field.name])
    values = vars(parser.parse_intermixed_args(argv))
    for field in known:
        if isinstance(default_of(field), dict):
            given, values[field.name] = values[field.name], dict(values[field.name])
            if len(values[field.name]) < len(given):
                raise ValueError(f"one name is given twice: {', '.join(name for name, _ in given)}")
        elif isinstance(values[field.name], list):
            values[field.name] = tuple(values[field.name])
    result = options(**values)
    check_values(result)
    return result


def dashed(name):
    return name.replace("_", "-")


def add_option(parser, field, hint):
    """Adds one field to argparse's parser. Its help names the default if its text does not."""
    details, default = field.metadata, default_of(field)
    one = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
    kind = one[0] if isinstance(hint, types.UnionType) else hint  # int | None -> int
    several = typing.get_origin(kind) or kind
    given, text = {"default": default}, [details["help"]]
    plain = isinstance(default, (int, float, str)) and default is not False and default != ""
    if plain and "default" not in details["help"]:
        text.append(f"default {default}")
    if env := details.get("env"):
        text.append(f"the variable {env} in the environment sets it")
        given["default"] = os.environ.get(env) or default
    given["help"] = "; ".join(filter(None, text)).replace("%", "%%")
    if several is bool:
        given["action"] = "store_true"
    elif several is dict:
        of_texts = typing.get_args(kind) == (str, str)
        given |= {"nargs": "+", "type": pair_of_texts if of_texts else pair}
    elif several is tuple:
        given |= {"nargs": "+", "type": next(iter(typing.get_args(kind)), str)}
    else:
        given["type"] = kind
    if "action" in details:
        given["type"] = details["action"]
    if "metavar" in details:
        given["metavar"] = details["metavar"]
    if choices := details.get("choices"):
        given["choices"] = choices() if callable(choices) else choices
    if details.get("positional"):
        if several is tuple:
            given["nargs"] = "*" if default is not None else "+"
        elif default is not None:
            given["nargs"] = "?"
        parser.add_argument(field.name, **given)
    else:
        flag = details.get("flag", f"--{dashed(field.name)}")
        parser.add_argument(flag, dest=field.name, required=details.get("required", False), **given)


def pair_of_texts(word):
    """ "text_a=review" -> ("text_a", "review")"""
    name, _, value = word.partition("=")
    if not name or not value:
        raise argparse.ArgumentTypeError(f"takes NAME=VALUE, not {word!r:.50}")
    return name, value


def pair(word):
    """ "ln_after=true" -> ("ln_after", True)"""
    name, value = pair_of_texts(word)
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


def is_given(settings, name):
    """Whether an option has another value than its default."""
    field = next((one for one in dataclasses.fields(settings) if one.name == name), None)
    return field is not None and getattr(settings, name) != default_of(field)


def check_values(settings):
    """Raises ValueError for a value outside the range of its option, for options that exclude each
    other, and for one without the option that it needs."""
    for field in dataclasses.fields(settings):
        flag = f"--{dashed(field.name)}"
        if is_given(settings, field.name):
            for other in field.metadata.get("excludes", ()):
                if is_given(settings, other):
                    raise ValueError(f"{flag} and --{dashed(other)} exclude each other: choose one")
            other = field.metadata.get("needs")
            if other is not None and not is_given(settings, other):
                raise ValueError(f"{flag} goes with --{dashed(other)}")
        if field.metadata.get("distinct"):
            given = getattr(settings, field.name)
            values = given.values() if isinstance(given, dict) else [str(v).lower() for v in given]
            if twice := [value for value in values if list(values).count(value) > 1]:
                raise ValueError(f"{field.metadata.get('flag', flag)} has {twice[0]} twice")
        words, test = field.metadata.get("valid", (None, None))
        value = getattr(settings, field.name)
        for one in value if isinstance(value, tuple) else [value]:
            if test is not None and one is not None and not test(one):
                raise ValueError(f"{flag} must be {words}, not {one}")


def recorded_values(settings):
    """{name: value} of the recorded fields, as JSON would give them back."""
    values = {
        field.name: getattr(settings, field.name)
        for field in dataclasses.fields(settings)
        if field.metadata.get("recorded", True)
    }
    return json.loads(json.dumps(values, default=str))


def changeable(options):
    """The names of the fields that may differ between a run and the command that resumes it."""
    return {field.name for field in dataclasses.fields(options) if field.metadata.get("may_change")}
