"""No page is longer than one reads: by theme it is parted before that."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.docs.pages import CHECKOUT, DOCS, hooks, included, short


def markdown_of(page: Path) -> str:
    """A page with what mkdocs puts into it, but for descriptions of the API."""
    text = page.read_text()
    for file, section in re.findall(r"^<!-- include: ([\w.]+)(?:, (.+))? -->$", text, re.MULTILINE):
        text += str(included().part(file, section or None))
    return str(hooks().on_page_markdown(text))


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=short)
def test_a_page_has_no_more_words_than_are_read(page: Path) -> None:
    assert len(markdown_of(page).split()) < 1.1 * hooks().MOST_WORDS  # signs of tables and code count here


MOST_OF_A_PARAGRAPH = 120
"""Words: what is longer has two themes."""


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs and items of a page, without tables, headings and code."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in prose.splitlines() if not line.startswith(("|", "#", "<"))]
    return re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(lines))


@pytest.mark.parametrize("page", sorted((DOCS / "design").glob("*.md")), ids=short)
def test_a_page_about_the_design_has_no_long_paragraph(page: Path) -> None:
    long = [text[:60] for text in paragraphs(page.read_text()) if len(text.split()) > MOST_OF_A_PARAGRAPH]
    assert not long, "part them by theme"


def test_a_strict_build_ends_at_a_page_that_is_too_long(caplog: pytest.LogCaptureFixture) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="how-to/long.md"))
    with caplog.at_level(logging.WARNING, "mkdocs.hooks"):
        hooks().on_page_content("<p class='x'>a word</p>" * (hooks().MOST_WORDS // 2), page)
        assert caplog.messages == []
        hooks().on_page_content("<p>a word</p>" * (hooks().MOST_WORDS // 2) + "more", page)
    assert caplog.messages == ["how-to/long.md has 4001 words, more than 4000: part it by theme"]


def test_all_pages_of_the_api_are_built_strictly() -> None:
    assert "mkdocs build --strict" in (CHECKOUT / "tox.ini").read_text()
