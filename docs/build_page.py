"""docs/index.html: the executed walkthrough with the lines that it reads beside it, and weights to
click on, in one file that loads nothing.

    make page    # from docs/walkthrough.ipynb and docs/weights.json

nbconvert fills the template in docs/template from the notebook, mistune (with nbconvert's renderer)
makes HTML of its Markdown, math-core MathML of its equations, Pygments marks up the code.

The equations' font is a part of STIX Two Math (SIL Open Font License, template/math-OFL.txt), as
fontTools' `subset --flavor=woff2 --unicodes=...` cuts it out: Latin and Greek letters, and the
operators of the equations. A sign that it lacks is drawn from the reader's own fonts."""

import ast
import base64
import json
import re
from html import escape
from pathlib import Path

import nbformat
from math_core import LatexToMathML
from nbconvert.exporters import TemplateExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from runtime.command import run_command

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
FIVE = {
    "bert.py": "Θ, the encoder",
    "adapter.py": "Φ, the adapters",
    "fusion.py": "Ψ, their fusion",
    "data.py": "D, the tasks",
    "train.py": "the two argmins",
}
LEARNED = {  # by the demo's adapters (experiments/skills.py)
    "match": "does the name belong to the sentence?",
    "order": "are the words in order?",
    "long": "are there more than seven words?",
    "the": "is one of them *the*?",
    "of": "is one of them *of*?",
    "two_words": "has the name two words?",
    "vowel": "does it begin with a vowel?",
    "plural": "does it end with an s?",
}
FILES = {"style": "style.css", "script": "weights.js"}
MAKE = "make walkthrough NOTEBOOK=docs/walkthrough.ipynb"


class Page(IPythonRenderer):
    """Makes HTML of Markdown and code, and keeps what it has read: in which section which lines."""

    def __init__(self):
        super().__init__(escape=False, embed_images=True, path=str(DOCS))
        self.render = MarkdownWithMath(renderer=self).render
        self.math = LatexToMathML().convert_with_local_state
        self.section, self.contents = "", []  # [(level, id, HTML)]
        self.texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in FIVE}
        self.shown = {}  # {(file, line): the id of the section that shows it}
        self.definitions = {}  # {name: [(file, line)]}
        for file in FIVE:
            for name, first, _ in definitions(self.texts[file]):
                self.definitions.setdefault(name.split(".")[-1], []).append((file, first))

    def markdown(self, text):
        """HTML of Markdown, where no line begins with the punctuation behind a formula"""
        formula = r"(<math(?:(?!</math>).)*</math>[.,;:)”]+)"
        return re.sub(formula, r'<span class="unbroken">\1</span>', self.render(text))

    # These override the renderer's own.

    def inline_math(self, body):
        return self.math(body, displaystyle=False)

    def block_math(self, body):
        return f'<span class="equation">{self.math(body, displaystyle=True)}</span>'

    def heading(self, text, level, **_):
        plain = re.sub("<.*?>", "", text)
        number = re.match(r"\d[\d.]*", plain)
        self.section = number[0] if number else re.sub(r"\W+", "-", plain.lower()).strip("-")
        if level > 1:
            self.contents.append((level, self.section, text))
        link = f'<a class="self" href="#{self.section}" aria-label="link to this section">#</a>'
        return f'<h{level} id="{self.section}">{text}{link if level > 1 else ""}</h{level}>\n'

    def image(self, text, url, title=None):
        picture = super().image(text, url, title)  # inside a paragraph, where no <figure> may be
        return f'<span class="figure">{picture}<span class="caption">{escape(text)}</span></span>'

    def codespan(self, text):
        """A file of the five, or what is defined there once, becomes a link to it."""
        code = f"<code>{escape(text)}</code>"
        if text in self.texts:
            return f'<a href="#{text}">{code}</a>'
        places = self.definitions.get(text.removesuffix("()"), [])
        if len(places) != 1:
            return code
        file, line = places[0]
        return f'<a class="line" href="#{file}-{line}">{code}</a>'

    def block_code(self, code, info=None):
        return f'<pre class="code"><code>{self.lines(code, language=info or "text")}</code></pre>'

    # These are filters of the template.

    def output(self, text):
        """What a cell has displayed: lines of a file, by `show` of page.py, or other Markdown"""
        shown = re.fullmatch(r"`([\w./]+)`, line (\d+):\n\n```python\n(.*)```", text, re.DOTALL)
        if not shown:
            return self.markdown(text)
        file, number, code = shown[1], int(shown[2]), shown[3]
        if file not in self.texts:
            self.texts[file] = (ROOT / file).read_text(encoding="utf-8")
        lines = code.splitlines()
        there = self.texts[file].splitlines()[number - 1 :][: len(lines)]
        if [line.strip() for line in there] != [line.strip() for line in lines]:
            raise ValueError(f"{file}, line {number}, is not what the notebook shows: {MAKE}")
        self.shown.setdefault((file, number), self.section)
        spans = [n for n, start, end in definitions(self.texts[file]) if start <= number <= end]
        name = f" <code>{spans[-1]}</code>" if spans else ""  # the innermost
        link = f'<a class="line" href="#{file}-{number}">{file}, line {number}</a>{name}'
        code = f'<pre class="code"><code>{self.lines(code, file, number)}</code></pre>'
        return f'<figure class="listing"><figcaption>{link}</figcaption>{code}</figure>'

    def file(self, name):
        code = self.lines(self.texts[name], name, 1, has_targets=True)
        return f'<pre class="code"><code>{code}</code></pre>'

    def lines(self, code, file=None, first=1, has_targets=False, language="python"):
        """HTML of lines of code; of a file's with numbers that link to its lines, or with the
        targets of these links, and of links back to the sections that show them."""
        lexer = get_lexer_by_name(language, stripnl=False)
        marked = highlight(code.rstrip("\n") + "\n", lexer, HtmlFormatter(nowrap=True))
        marked = re.sub(r'<span class="(?:n|p|w|o)">([^<]*)</span>', r"\1", marked)  # all plain
        result = []
        for number, line in enumerate(marked.splitlines(), first):
            plain = re.sub("<.*?>", "", line)
            indent, here, back = min(len(plain) - len(plain.lstrip()), 12), f"{file}-{number}", ""
            if has_targets and (section := self.shown.get((file, number))):
                back = f'<a class="back" href="#{section}" data-text="§ {section}"></a>'
            to = f'<a class="n" href="#{here}" data-n="{number}" tabindex="-1"></a>' if file else ""
            target = f' id="{here}"' if has_targets else ""
            result.append(f'<span class="l"{target} style="--i:{indent}">{to}{line}{back}\n</span>')
        return "".join(result)


def definitions(text):
    """[(Class.function, first line, last line)] of a file's classes and functions, in order"""

    def within(node, names):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                found.append((".".join([*names, child.name]), child.lineno, child.end_lineno))
                within(child, [*names, child.name])

    found = []
    within(ast.parse(text), [])
    return found


def cut(cells):
    """The cells, with a cell of Markdown for each of its sections. What the page adds comes at the
    end of section 3.2 and of section 6."""
    result, added = [], {"3.2": "step", "6": "weights"}
    due = None
    for cell in cells:
        is_text = cell.cell_type == "markdown"
        parts = re.split(r"^(?=#{2,4} )", cell.source, flags=re.MULTILINE) if is_text else [None]
        for part in parts:
            if heading := part and re.match(r"#+ ([\d.]*)", part):
                if due:
                    result.append({**cell, "source": "", "metadata": {"page": due}})
                due = added.pop(heading[1], None)
            if part != "":
                result.append({**cell, "source": cell.source if part is None else part})
    if added or due:
        raise ValueError(f"the walkthrough lacks a section {' and '.join(added)}, or one behind it")
    return result


def build(notebook=DOCS / "walkthrough.ipynb", weights=DOCS / "weights.json"):
    """The text of the page"""
    if not notebook.is_file():
        raise FileNotFoundError(f"{notebook} is not there: {MAKE}")
    nb = nbformat.read(notebook, as_version=4)
    if not any(cell.get("outputs") for cell in nb.cells):
        raise ValueError(f"{notebook} was not executed: {MAKE}")
    if not weights.is_file():
        raise FileNotFoundError(f"{weights} is not there: python -m docs.weights makes it")
    page = Page()
    nb.cells = [nbformat.from_dict({**cell, "id": f"{i}"}) for i, cell in enumerate(cut(nb.cells))]
    where = {"template_name": "template", "extra_template_basedirs": [str(DOCS)]}
    exporter = TemplateExporter(template_file="index.html.j2", **where)
    filters = {"markdown": page.markdown, "shown": page.output, "lines": page.lines}
    for name, function in {**filters, "file": page.file}.items():
        exporter.register_filter(name, function)
    template = DOCS / "template"
    given = {"page": page, "five": FIVE, "weights": json.loads(weights.read_text("utf-8"))}
    given |= {"learned": LEARNED, "names": (DOCS / "page.py").read_text("utf-8")}
    given |= {n: (template / f).read_text("utf-8") for n, f in FILES.items()}
    given["font"] = base64.b64encode((template / "math.woff2").read_bytes()).decode()
    exporter.environment.globals.update(given)  # what comes as nbconvert's resources is copied
    text, _ = exporter.from_notebook_node(nb)
    return text


def main(argv):
    (DOCS / "index.html").write_text(build(), encoding="utf-8")


if __name__ == "__main__":
    run_command("build_page.py", main)
