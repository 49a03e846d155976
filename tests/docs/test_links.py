"""Links lead somewhere, every page is in the navigation, and nothing is fetched to read one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.docs.pages import CHECKOUT, DOCS, PAGES, included, short


def anchors_of(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+?) *$", without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def links_of(page: Path) -> Iterator[tuple[Path, str]]:
    """Each link with the folder that it starts from; pages that are put together from others count as links."""
    text = without_code(page.read_text())
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"\w+:", link):
            yield page.parent, link
    for path in re.findall(r'^(?:--8<-- "|<!-- include: )([^",\s]+)', text, re.MULTILINE):
        yield CHECKOUT, path


@pytest.mark.parametrize("page", sorted({*PAGES, *(CHECKOUT / name for name in included().PLACES)}), ids=short)
def test_links_lead_somewhere(page: Path) -> None:
    for folder, link in links_of(page):
        path, _, anchor = link.partition("#")
        target = (folder / path).resolve() if path else page
        assert target.exists(), f"{short(page)}: {link}"
        if target.suffix == ".md" and (target == page or target.is_relative_to(DOCS)):
            assert not anchor or anchor in anchors_of(target), f"{short(page)}: {link}"


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page() -> None:
    navigation = (CHECKOUT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    listed = re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)
    assert sorted(listed) == sorted(
        ["examples/index.md", *(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))]
    )


def test_nothing_is_fetched_from_elsewhere_to_read_a_page() -> None:
    assert re.search(r"^  font: false", (CHECKOUT / "mkdocs.yml").read_text(), re.MULTILINE)
    for file in (*DOCS.rglob("*.css"), *DOCS.rglob("*.svg"), *PAGES):
        assert not re.search(r"(src=|url\(|@import|!\[[^]]*\]\()\s*[\"']?(https?:)?//", file.read_text()), short(file)
