"""The demo's tasks (experiments/demo.py): single skills, each of which sees one fault of an
example, and a target, `both`, which needs all. Half of the examples have a fault, independently."""

import ast
import importlib.util
import json
import re
from pathlib import Path

from experiments.report import write_text

# {skill: (label without its fault, with it)}
SKILLS = {"match": ("right", "wrong"), "order": ("intact", "shuffled")}
SIZES = {"source": (2400, 400), "target": (960, 400)}  # (rows for training, for development)
FILES = {  # enough of each library, so that reading takes seconds
    "std": "*.py asyncio/*.py email/*.py http/*.py json/*.py logging/*.py multiprocessing/*.py "
    "tkinter/*.py unittest/*.py",
    "numpy": "**/*.py",
    "torch": "nn/**/*.py optim/**/*.py distributions/**/*.py autograd/**/*.py utils/data/**/*.py "
    "distributed/*.py",
}


def docstrings(library):
    """(name, [sentences]) of the docstrings in a library's files; nothing is imported or run."""
    module = "ast" if library == "std" else library  # any file of Python's library
    root = Path(importlib.util.find_spec(module).origin).parent
    files = {path for pattern in FILES[library].split() for path in root.glob(pattern)}
    for path in sorted(path for path in files if "tests" not in path.parts):
        # every class and function, level by level
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_definition = isinstance(node, (ast.ClassDef, ast.FunctionDef))
            if is_definition and (text := ast.get_docstring(node)):
                yield node.name, sentences(text)


def words_of(name):
    """zseries_to_cseries -> zseries to cseries, BatchNorm -> batch norm"""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_+", " ", name).strip().lower()


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
    """Writes the task of each skill, and the target: OUT/TASK/train.jsonl and validation.jsonl."""
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
        pools = texts[held_out:], texts[:held_out]
        for split, pool, n in zip(("train", "validation"), pools, sizes, strict=True):
            lines = [json.dumps(row) for row in rows_of(asked, skills, pool, n, rng)]
            write_text(out / task / f"{split}.jsonl", "\n".join(lines) + "\n")


def rows_of(asked, skills, pool, n, rng):
    """n rows, with every combination of faults equally often. asked: the skills that the label asks
    for; skills: those whose faults occur; pool: [(sentence, its name)]"""
    rows = []
    for i in range(n):
        faults = {skill for k, skill in enumerate(skills) if i // 2**k % 2}
        (text, name), (_, other) = rng.sample(pool, 2)
        while other == name:
            _, other = rng.choice(pool)
        if "order" in faults:
            words = text.split()
            while " ".join(words) == text:
                rng.shuffle(words)
            text = " ".join(words)
        label = ", ".join(SKILLS[skill][skill in faults] for skill in asked)
        name = other if "match" in faults else name
        rows.append({"text_a": text, "text_b": name, "label": label})
    rng.shuffle(rows)
    return rows
