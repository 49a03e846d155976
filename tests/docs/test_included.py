"""Pages of the repository stand in the site as they are, with links that lead to the same things there."""

from __future__ import annotations

import html
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.docs.pages import CHECKOUT, DOCS, included


def shown(page: str) -> tuple[str, dict[str, str]]:
    """A page as mkdocs sees it, and what is said of it."""
    of_mkdocs = SimpleNamespace(meta={}, file=SimpleNamespace(src_uri=page))
    text = re.sub(r"\A---\n.*?^---\n", "", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    return included().on_page_markdown(text, page=of_mkdocs), of_mkdocs.meta


def test_the_home_page_begins_as_the_readme_and_says_how_to_install_it() -> None:
    home, meta = shown("index.md")
    readme = (CHECKOUT / "README.md").read_text()
    assert included().relinked(readme.partition("\n## ")[0]) in home
    assert "\n## Install\n" in home
    assert "\n## Limits\n" not in home
    assert html.unescape(meta["description"]) in readme.replace("`", "")


@pytest.mark.parametrize("file", sorted(included().PLACES))
def test_links_of_the_repository_lead_to_pages_of_the_site(file: str) -> None:
    text = included().relinked((CHECKOUT / file).read_text())
    for path in re.findall(r"\]\(([\w./-]+\.\w+)", text):
        place = os.path.normpath(Path(included().PLACES[file]).parent / path)
        assert (DOCS / place).exists() or place.startswith(("examples/", "results/", "LICENSE")), path


def test_what_is_left_of_a_link_stays() -> None:
    text = "[a](docs/how-to/memory.md#how-much) [b](../BENCHMARKS.md) [c](https://x.org/docs/a.md) [d](results/a.json)"
    wanted = "[a](how-to/memory.md#how-much) [b](../benchmarks.md) [c](https://x.org/docs/a.md) [d](results/a.json)"
    assert included().relinked(text) == wanted


def test_pages_lead_to_the_scripts_of_examples() -> None:
    markdown, _ = shown("how-to/decisions.md")
    assert "](../examples/decisions.py)" in markdown
    assert "](../../examples/decisions.py)" in (DOCS / "how-to/decisions.md").read_text()


def test_a_section_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="no section 'Installation'"):
        included().part("README.md", "Installation")


def test_every_page_that_is_included_has_its_place() -> None:
    for page in DOCS.rglob("*.md"):
        for file in re.findall(r"^<!-- include: (\S+?),? ", page.read_text(), re.MULTILINE):
            assert included().PLACES[file] == str(page.relative_to(DOCS))


@pytest.mark.parametrize(
    "page", ["index.md", "benchmarks.md", "paths.md", "security.md", "how-to/memory.md", "reference/options.md"]
)
def test_a_page_is_described_by_its_first_sentence(page: str) -> None:
    assert re.fullmatch(r"[\w\[].{40,}[.:]", shown(page)[1]["description"])


def test_a_page_has_the_title_that_it_begins_with_and_not_that_of_the_navigation() -> None:
    assert shown("how-to/chat.md")[1]["title"] == "Chat templates: one turn, and several with a cache"
    assert shown("how-to/from-static-cache.md")[1]["title"].count("&quot;") == 2, "it stands in HTML"
