"""Tasks made of docstrings, so that no data are needed: single skills, targets that need them, and
tasks that no target needs. An example is a sentence and a name. Two faults are independent, each in
half of the examples: the name is another docstring's, or the sentence's words are shuffled.

    match, order    is this fault there?
    both            which of them are there? One of four labels
    asked           is the fault there that the second text names? (`order: cumsum`)

These two targets are of NumPy's docstrings, all others of Python's library and PyTorch's."""

import ast
import importlib.util
import json
import random
import re
from pathlib import Path

from experiments.report import write_text

# {skill: (label without its fault, with it)}
SKILLS = {"match": ("right", "wrong"), "order": ("intact", "shuffled")}
TARGETS = ["both", "asked"]
# {task: whether the answer is yes, of a sentence and a name without faults}
OTHERS = {
    "long": lambda sentence, name: len(sentence.split()) > 7,
    "the": lambda sentence, name: "the" in sentence.lower().split(),
    "of": lambda sentence, name: "of" in sentence.split(),
    "two_words": lambda sentence, name: " " in name,
    "vowel": lambda sentence, name: name[0] in "aeiou",
    "plural": lambda sentence, name: name.endswith("s"),
}
SIZES = {"source": (2400, 400), "target": (960, 400)}  # (rows for training, for development)
TEST_SIZE = 800  # rows of a target by which nothing is chosen, of longer sentences
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


def build_tasks(out, rng):
    """Writes all tasks: OUT/TASK/train.jsonl and validation.jsonl, and of the targets test.jsonl,
    of other docstrings, with 11 or 12 words."""
    named, written = {"source": {}, "target": {}, "test": {}}, {}
    for origin in FILES:
        for name, texts in docstrings(origin):
            # short ones are quicker; __init__ and its like say nothing
            words = len(texts[0].split()) if texts and not name.startswith("__") else 99
            role = "target" if origin == "numpy" else "source"
            role = "test" if role == "target" and 10 < words <= 12 else role
            if words <= (12 if role == "test" else 10):
                named[role][texts[0].rstrip(".")] = words_of(name)
    for task in (*SKILLS, *TARGETS, *OTHERS):
        role = "target" if task in TARGETS else "source"
        texts, sizes = list(named[role].items()), SIZES[role]
        rng.shuffle(texts)
        held_out = len(texts) // 4  # the development set is of other docstrings
        pools = texts[held_out:], texts[:held_out]
        for split, pool, n in zip(("train", "validation"), pools, sizes, strict=True):
            rows = other_rows(task, pool, n, rng) if task in OTHERS else rows_of(task, pool, n, rng)
            rng.shuffle(rows)
            written[out / task / f"{split}.jsonl"] = rows
    for task in TARGETS:  # with random numbers of their own
        pool, own_rng = list(named["test"].items()), random.Random(0)
        written[out / task / "test.jsonl"] = rows_of(task, pool, TEST_SIZE, own_rng)
    for path, rows in written.items():
        write_text(path, "\n".join(map(json.dumps, rows)) + "\n")


def rows_of(task, pool, n, rng):
    """n rows of a skill or a target, with every combination of faults equally often, and in `asked`
    of faults and questions. pool: [(sentence, its name)]"""
    rows = []
    for i in range(n):
        faults = {skill for k, skill in enumerate(SKILLS) if i // 2**k % 2}
        (text, name), (_, other) = rng.sample(pool, 2)
        while other == name:
            _, other = rng.choice(pool)
        if "order" in faults:
            words = text.split()
            while " ".join(words) == text:
                rng.shuffle(words)
            text = " ".join(words)
        name = other if "match" in faults else name
        asked = {"both": [*SKILLS], "asked": [[*SKILLS][i // 4 % 2]]}.get(task, [task])
        label = ", ".join(SKILLS[skill][skill in faults] for skill in asked)
        if task == "asked":
            name, label = f"{asked[0]}: {name}", "yes" if asked[0] in faults else "no"
        rows.append({"text_a": text, "text_b": name, "label": label})
    return rows


def other_rows(task, pool, n, rng):
    """n rows of one of OTHERS, each answer in half of them."""
    pools = [[pair for pair in pool if OTHERS[task](*pair) == answer] for answer in (False, True)]
    rows = []
    for i in range(n):
        text, name = rng.choice(pools[i % 2])
        rows.append({"text_a": text, "text_b": name, "label": ("no", "yes")[i % 2]})
    return rows
