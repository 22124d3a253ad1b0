"""Tasks that need one skill each, and a target that needs all of them, from the docstrings of
Python's library, PyTorch and NumPy.

An example is a sentence and a name. Each skill sees one fault:

    match   is the name that of the sentence, or of another docstring?
    order   are the sentence's words in their order, or shuffled?

Each fault is there in half of the examples, independently of the other. A skill's own task (of
Python's library and PyTorch) asks for one of them, and the other says nothing of its label. The
target (of NumPy), which is called `both`, has four classes.
"""

import ast
import contextlib
import importlib.util
import json
import re
import sysconfig
from pathlib import Path

SKILLS = {  # {skill: (label without its fault, with it)}
    "match": ("right", "wrong"),
    "order": ("intact", "shuffled"),
}
SIZES = {"source": (2400, 400), "target": (960, 400)}  # (rows for training, for development)
FILES = {  # enough of each library, so that reading takes seconds
    "std": "*.py asyncio/*.py email/*.py http/*.py json/*.py logging/*.py multiprocessing/*.py "
    "tkinter/*.py unittest/*.py",
    "numpy": "**/*.py",
    "torch": "nn/**/*.py optim/**/*.py distributions/**/*.py autograd/**/*.py utils/data/**/*.py "
    "distributed/*.py",
}


def docstrings(library):
    """(name, [sentences]) of the docstrings in a library's source files; nothing is imported
    or run."""
    if library == "std":
        root = Path(sysconfig.get_path("stdlib"))
    else:
        root = Path(importlib.util.find_spec(library).submodule_search_locations[0])
    files = {path for pattern in FILES[library].split() for path in root.glob(pattern)}
    for path in sorted(path for path in files if "tests" not in path.parts):
        with contextlib.suppress(SyntaxError, ValueError):  # what is no Python, or not UTF-8
            for node in definitions(ast.parse(path.read_text(encoding="utf-8"))):
                if text := ast.get_docstring(node):
                    yield node.name, sentences(text)


def words_of(name):
    """zseries_to_cseries -> zseries to cseries, BatchNorm -> batch norm"""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_+", " ", name).strip().lower()


def definitions(tree):
    """Every class and function, level by level."""
    return (node for node in ast.walk(tree) if isinstance(node, (ast.ClassDef, ast.FunctionDef)))


def sentences(text):
    """The English sentences in a docstring's prose: sections, code, and markup are left out."""
    result = []
    for paragraph in re.split(r"\n\s*\n", text):
        if re.search(r">>>|::|---|===|^\s*[:@.]|^\s{4}|\w+ : |[{}|]", paragraph, re.MULTILINE):
            continue
        paragraph = re.sub(r":\w+:|[`*]", "", " ".join(paragraph.split()))
        for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", paragraph):
            words = [word.strip(".,;:()'\"") for word in sentence.split()]
            if 5 <= len(words) <= 20 and sum(map(str.isalpha, words)) > 0.8 * len(words):
                result.append(sentence)
    return result


def build_tasks(out, rng, skills):
    """Writes the task of each skill, and the target, as jsonl files: OUT/TASK/train.jsonl and
    validation.jsonl."""
    named = {"source": {}, "target": {}}
    for origin in FILES:
        for name, texts in docstrings(origin):
            # short ones are quicker; __init__ and its like say nothing
            if texts and len(texts[0].split()) <= 14 and not name.startswith("__"):
                pool = named["target" if origin == "numpy" else "source"]
                pool[texts[0].rstrip(".")] = words_of(name)
    for task in (*skills, "both"):
        role, asked = ("source", [task]) if task in skills else ("target", skills)
        texts, sizes = list(named[role].items()), SIZES[role]
        rng.shuffle(texts)
        held_out = len(texts) // 4  # the development set is of other docstrings
        for split, pool, n in (
            ("train", texts[held_out:], sizes[0]),
            ("validation", texts[:held_out], sizes[1]),
        ):
            lines = [json.dumps(row) for row in rows_of(asked, skills, pool, n, rng)]
            path = out / task / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def rows_of(asked, skills, pool, n, rng):
    """n rows, with every combination of faults equally often.

    asked: the skills that the label asks for; skills: those whose faults occur; pool: [(sentence,
    its name)]
    """
    rows = []
    for i in range(n):
        faults = {skill for k, skill in enumerate(skills) if i // 2**k % 2}
        (text, name), (_, other) = rng.sample(pool, 2)
        while other == name:
            _, other = rng.choice(pool)
        if "order" in faults:
            text = shuffled(text, rng)
        rows.append(
            {
                "text_a": text,
                "text_b": other if "match" in faults else name,
                "label": ", ".join(SKILLS[skill][skill in faults] for skill in asked),
            }
        )
    rng.shuffle(rows)
    return rows


def shuffled(text, rng):
    words = text.split()
    while " ".join(words) == text:
        rng.shuffle(words)
    return " ".join(words)
