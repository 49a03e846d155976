"""What mkdocs calls while it builds: pages of the repository in the site, so that no text stands twice.

A page asks for a file, or for one of its sections, by a comment of its own line: ``<!-- include: BENCHMARKS.md -->``,
``<!-- include: README.md, Install -->``. What stands in front of a file's sections goes by the file's title.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).parents[1]
PLACES = {
    "README.md": "index.md",
    "BENCHMARKS.md": "benchmarks.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/README.md": "examples/index.md",
}
"""Where pages of the repository stand in the site."""

_INCLUDE = re.compile(r"^<!-- include: ([\w.]+)(?:, (.+))? -->$", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()(\.\./)?(?:docs/)?([\w./-]+\.\w+)(?=[)#])")
_SCRIPT = re.compile(r"(?<=\]\()\.\./(?=(?:\.\./)*examples/\w+\.py\))")  # the site has scripts beside its pages
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
_PARAGRAPH = re.compile(r"^(?!`[^`]+`$)[\w`*\[].+$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Put the published runs into the site, where the tables link them, and the examples; mkdocs calls this once."""
    from mkdocs.structure.files import File, InclusionLevel

    for run in sorted((CHECKOUT / "results").iterdir()):
        place = f"results/{run.name}"
        files.append(File.generated(config, place, abs_src_path=str(run), inclusion=InclusionLevel.NOT_IN_NAV))
    for script in sorted((CHECKOUT / "examples").glob("*.*")):
        place = PLACES.get(f"examples/{script.name}", f"examples/{script.name}")
        files.append(File.generated(config, place, abs_src_path=str(script)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put files where the page asks for them, and describe it by its own words; mkdocs calls this for each."""
    markdown = _INCLUDE.sub(lambda match: part(match[1], match[2]), markdown)
    if page.file.src_uri.startswith(("examples/", "results/")):
        markdown = relinked(markdown)
    markdown = _SCRIPT.sub("", markdown)
    text = _FENCED.sub("", markdown)
    page.meta.setdefault("description", html.escape(first_sentence(text)))
    if title := _TITLE.search(text):
        page.meta.setdefault("title", html.escape(plain(title[1])))
    return markdown


def part(file: str, heading: str | None) -> str:
    """Return a file of the repository, or one of its sections, with links that lead to where things lie in the site.

    Raises:
        ValueError: the file has no such section.
    """
    text = relinked((CHECKOUT / file).read_text())
    if heading is None:
        return text
    for section in re.split(r"^(?=## )", text, flags=re.MULTILINE):
        if section.partition("\n")[0].lstrip("# ") == heading:
            return section
    raise ValueError(f"{file} has no section {heading!r}")


def relinked(text: str) -> str:
    """Return Markdown of the repository with the links of the site."""

    def place(link: re.Match[str]) -> str:
        up, path = link.groups(default="")
        return up + PLACES.get(path, path)

    return _LINK.sub(place, text)


def first_sentence(markdown: str) -> str:
    """Return how a page without code begins, in plain text."""
    paragraph = _PARAGRAPH.search(markdown)
    return re.split(r"(?<=\.) ", plain(paragraph[0]))[0] if paragraph else ""


def plain(markdown: str) -> str:
    """Return a line without links, code and emphasis."""
    return re.sub(r"\[(.+?)\]\(.+?\)|[`*]", r"\1", markdown)
