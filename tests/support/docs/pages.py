"""The pages of the documentation, and the Python on them."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from support.huggingface.cache_name import CACHE
from support.imports import CHECKOUT, module_at

DOCS = CHECKOUT / "docs"
PAGES = [CHECKOUT / "README.md", *sorted(DOCS.rglob("*.md"))]
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""What pages load where they name a model."""

_BLOCK = re.compile(r"(?:^<!-- skip: (?P<skip>.+?) -->\n+)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_BEGINNING = re.compile(r"^> `model` is a wrapped model and `tokenizer` its tokenizer: \[yours\]\(.+\), or `(.+)`\.$")
_CACHE = re.compile(r"\bcache=|(?<=result\.)cache\b")  # under the name that it has since transformers 5.24
_PRINTS = re.compile(r"^ *print\(.*\)  # -> (.+)$", re.MULTILINE)


class Block(NamedTuple):
    """A piece of Python on a page."""

    line: int
    code: str
    skip: str | None

    @property
    def prints(self) -> list[str]:
        return _PRINTS.findall(self.code)


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(text.count("\n", 0, match.start("code")), match["code"], match["skip"]) for match in _BLOCK.finditer(text)
    ]


def beginning_of(page: Path) -> str:
    """What the line at the top says to paste, below the title and one paragraph; nothing if there is none."""
    top = page.read_text().split("\n\n")[:3]
    match = _BEGINNING.match(top[-1])
    return match[1] if match else ""


def short(page: Path) -> str:
    return str(page.relative_to(CHECKOUT))


def run(block: Block, page: Path, namespace: dict[str, Any]) -> list[str]:
    """Run a block, with the page's own line numbers in tracebacks; return what it printed."""
    printed = io.StringIO()
    code = _CACHE.sub(lambda found: found[0].replace("cache", CACHE), block.code)
    with contextlib.redirect_stdout(printed):
        exec(compile("\n" * block.line + code, str(page), "exec"), namespace)
    return printed.getvalue().splitlines()


def hooks() -> ModuleType:
    """The tables that mkdocs puts into pages."""
    return module_at(DOCS / "hooks.py")


def included() -> ModuleType:
    """The pages of the repository that mkdocs puts into those of the site."""
    return module_at(DOCS / "included.py")


def figures() -> ModuleType:
    """The published runs that mkdocs puts into pages."""
    return module_at(DOCS / "figures.py")


def notebooks() -> ModuleType:
    """The notebooks that mkdocs puts into pages."""
    return module_at(DOCS / "notebooks.py")


def rendered(page: str) -> str:
    """A page of the reference, as mkdocs sees it."""
    markdown: str = hooks().on_page_markdown((DOCS / "reference" / page).read_text())
    assert "<!-- table:" not in markdown
    return markdown
