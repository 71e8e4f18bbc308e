"""Adapts the guides, which are written for readers of the checkout and for tests, to HTML.

Links to files outside of docs/ become text. The info strings of code blocks, which say how
tests/docs/test_code_blocks.py runs them, become titles if they name a file. Blocks in comments, which are only for the
tests, are omitted. The tables of params and of settings in the reference are generated from the rows that define them,
those of examples from the code blocks of the guides. Two pages are notebooks, with their outputs. Paragraphs that end
with `<!-- checkout -->`, which say where to find that without the site, are omitted.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

_HIDDEN = re.compile(r"^<!--\n```.*?^-->\n+", re.MULTILINE | re.DOTALL)
_CHECKOUT = re.compile(r"^(?:[^\n]+\n)*[^\n]+ <!-- checkout -->\n+", re.MULTILINE)
_INFO = re.compile(r"^```(\w+) ([^\n]+)$", re.MULTILINE)
_PARAMS = re.compile(r"^<!-- params: ([\w.]+)\.(\w+) -->$", re.MULTILINE)
_SETTINGS = re.compile(r"^<!-- settings -->$", re.MULTILINE)
_NOTEBOOK = re.compile(r"^<!-- notebook: ([\w.]+) -->$", re.MULTILINE)
_EXAMPLES = re.compile(r"^<!-- examples: ([\w. ]+) -->$", re.MULTILINE)
_BLOCK = re.compile(r"^#+ (?P<heading>[^\n]+)|^```(?P<info>\w+[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Called by MkDocs for each page.

    Raises:
        FileNotFoundError: a linked file does not exist.
    """
    folder = Path(page.file.abs_src_path).parent
    docs = Path(config["docs_dir"]).resolve()

    def as_text(match: re.Match[str]) -> str:
        target = (folder / match[2]).resolve()
        if target.is_relative_to(docs):
            return match[0]
        if not target.exists():
            raise FileNotFoundError(f"{page.file.src_path} links to {match[2]}, which does not exist")
        return match[1]

    def titled(match: re.Match[str]) -> str:
        file = re.search(r'file="([^"]+)"', match[2])
        return f'```{match[1]} title="{file[1]}"' if file else f"```{match[1]}"

    def used_in(match: re.Match[str]) -> str:
        return _classes(match[1].split(), examples(docs), docs.parent / "tests" / "house" / "public_api.txt")

    def notebook(match: re.Match[str]) -> str:
        return _notebook(docs.parent / "notebooks" / match[1])

    markdown = _CHECKOUT.sub("", _HIDDEN.sub("", markdown))
    markdown = _SETTINGS.sub(_settings, _PARAMS.sub(_table, markdown))
    markdown = _NOTEBOOK.sub(notebook, _EXAMPLES.sub(used_in, markdown))
    return _INFO.sub(titled, _LINK.sub(as_text, markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Called by MkDocs for each page: the roles of docstrings, such as ``:class:``, are for `help()`."""
    html = re.sub(r":(?:attr|class|data|exc|func|meth|mod):(?=<code>)", "", html)
    return re.sub(r"<code>~[\w.]*?(\w+)</code>", r"<code>\1</code>", html).replace("<p>::</p>\n", "")


@functools.cache
def examples(docs: Path) -> dict[str, tuple[str, str]]:
    """Where the pages use the names of this package in code that the tests run.

    Returns:
        Dotted name, as imported -> the page that uses it most often, a guide rather than the reference, and the heading
        above its first use there.
    """
    first: dict[tuple[str, str], str] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for file in [*docs.glob("*.md"), *docs.glob("api/*.md")]:
        page, heading, imported = str(file.relative_to(docs)), "", dict[str, str]()
        for match in _BLOCK.finditer(_HIDDEN.sub("", file.read_text())):
            heading = match["heading"] or heading
            if match["code"] is None or not match["info"].startswith("python") or 'run="no: ' in match["info"]:
                continue
            program = ast.parse(match["code"])
            imported |= _imported(program)  # a block may continue the one before it
            for name in _used(program, imported):
                counts[name, page] += 1
                first.setdefault((name, page), heading)
    best = sorted(counts, key=lambda at: (at[1].startswith("api/"), -counts[at], at))
    return {name: (page, first[name, page]) for name, page in reversed(best)}  # the last one of a name stays


def _imported(program: ast.Module) -> dict[str, str]:
    """The local names of imports -> their dotted names."""
    found = {}
    for node in ast.walk(program):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                found[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _used(program: ast.Module, imported: dict[str, str]) -> list[str]:
    """The dotted names below ``hvd_cluster`` that the program reads, ``a.b`` for ``a.b.c`` as well."""
    found = []
    for node in ast.walk(program):
        if isinstance(node, (ast.Name, ast.Attribute)):
            root, dot, rest = ast.unparse(node).partition(".")
            if imported.get(root, "").startswith("hvd_cluster") and re.fullmatch(r"[\w.]*", rest):
                found.append(imported[root] + dot + rest)
    return found


def _classes(modules: list[str], places: dict[str, tuple[str, str]], public_api: Path) -> str:
    """The classes of modules that a guide shows, with links, in Markdown."""
    from markdown.extensions.toc import slugify

    lines = ["| class | is used in |", "|---|---|"]
    for module in modules:
        listed = public_api.read_text().partition(f"\n[{module}]\n")[2].partition("\n\n")[0]
        for name in re.findall(r"^class (\w+)", listed, re.MULTILINE):
            # A class of several modules, such as ProcessSet, may be shown with one of them only.
            page, heading = places.get(f"{module}.{name}") or next(
                (place for path, place in places.items() if path.endswith(f".{name}")), ("api/", "")
            )
            if not page.startswith("api/"):
                lines.append(f"| `{name}` | [{heading.replace('`', '')}](../{page}#{slugify(heading, '-')}) |")
    return "\n".join(lines)


def _table(match: re.Match[str]) -> str:
    """The rows of a table of params, in Markdown."""
    lines = ["| param | default | meaning | other spellings |", "|---|---|---|---|"]
    for row in getattr(importlib.import_module(match[1]), match[2]):
        names = [row.alias] if row.alias else []
        names += [f"set{name}" for name in row.setters or row.accessors]
        names += [f"get{name}" for name in row.accessors]
        spellings = ", ".join(f"`{name}`" for name in names)
        lines.append(f"| `{row.name}` | `{row.default!r}` | {row.doc.replace('<', '&lt;')} | {spellings} |")
    return "\n".join(lines)


def _settings(_: re.Match[str]) -> str:
    """The variables that a user sets, in Markdown: the comment over each field says what it is."""
    from hvd_cluster.settings import Settings
    from hvd_cluster.topology import is_job_variable

    lines = ["| variable | default | meaning |", "|---|---|---|"]
    fields = Settings.__dataclass_fields__
    for comment, name in re.findall(r"((?: +#: .*\n)+) +(\w+): ", inspect.getsource(Settings)):
        variable, default = fields[name].metadata["env"], fields[name].default
        if not is_job_variable(variable):
            star = "*" if fields[name].metadata["is_common"] else ""
            shown = "" if default in (None, "") else f"`{default}`" if isinstance(default, str) else f"`{default:.10g}`"
            meaning = " ".join(re.findall("#: (.*)", comment)).replace("None", "unset")
            lines.append(f"| `{variable}`{star} | {shown} | {meaning} |")
    return "\n".join(lines)


def _notebook(path: Path) -> str:
    """The cells of a notebook below its title, with their outputs, in Markdown."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(
            re.sub(r"^# .*\n+", "", source) if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
        )
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            html, plain = "".join(data.get("text/html", "")), "".join(data.get("text/plain", output.get("text", "")))
            if "application/vnd.jupyter.widget-view+json" in data:
                continue
            if "image/png" in data:
                parts.append(f"![Plot](data:image/png;base64,{data['image/png'].strip()})")
            elif "font-family" in html:  # a card; a DataFrame is shown as text
                parts.append(html)
            elif plain:
                parts.append(f"```text\n{plain}\n```")
    return "\n\n".join(parts)
