"""Versions: the page, what pip is told, and what the matrix has shown."""

from __future__ import annotations

import json
import re
from importlib.metadata import metadata, requires
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from support.docs.pages import DOCS, rendered

# The first release after the newest that passed, by how many of its numbers count.
NEXT = {"torch": 2, "transformers": 1, "flashinfer-python": 2}


@pytest.fixture(scope="module")
def matrix() -> dict[str, Any]:
    results: dict[str, Any] = json.loads((DOCS / "matrix.json").read_text())
    return results


def shown(matrix: dict[str, Any], package: str) -> list[Version]:
    """The versions that passed, oldest first."""
    versions = {result["versions"].get(package) for result in matrix.values() if result["result"] == "passed"}
    return sorted(Version(Version(version).public) for version in versions if version)


def range_of(package: str) -> SpecifierSet:
    named = (Requirement(text) for text in requires("compiled-llm") or [])
    return next(requirement.specifier for requirement in named if requirement.name == package)


def test_matrix_has_one_row_a_result_and_each_says_what_came_of_it(matrix: dict[str, Any]) -> None:
    page = rendered("compatibility.md")
    rows = re.findall(r"^\| `([\w-]+)` \|(?: [^|]*\|){5} (.+) \| <time>[\d-]{10}</time> \|$", page, re.MULTILINE)
    assert [name for name, _ in rows] == list(matrix)
    for name, text in rows:
        result = matrix[name]
        if result["result"] == "passed":
            assert result["passed"] > 0
            assert text.startswith(f"{result['passed']} passed"), name
        else:
            assert re.match(r"\*\*failed\*\*: `.+`|(failed|not run): .+", text), name


ENDS = {
    "torch": {"torch211", "torch215"},
    "transformers": {"transformers-oldest", "transformers-newest"},
    "flashinfer-python": {"flashinfer06", "flashinfer07"},
    "python": {"py310", "py312", "py313"},
}
"""The environments that show both ends of a range."""


def require_results(package: str, matrix: dict[str, Any]) -> None:
    if missing := sorted(ENDS[package] - set(matrix)):
        pytest.skip(f"the matrix has not been run for {', '.join(missing)}")


@pytest.mark.parametrize("package", NEXT)
def test_ranges_end_where_the_matrix_has_ended(package: str, matrix: dict[str, Any]) -> None:
    require_results(package, matrix)
    versions, allowed = shown(matrix, package), range_of(package)
    assert all(version in allowed for version in versions)
    (lowest,) = (Version(bound.version) for bound in allowed if bound.operator == ">=")
    assert versions[0].release[: len(lowest.release)] == lowest.release
    numbers = list(versions[-1].release[: NEXT[package]])
    following = ".".join(map(str, [*numbers[:-1], numbers[-1] + 1]))
    assert following not in allowed


def test_pythons_that_are_named_have_been_shown(matrix: dict[str, Any]) -> None:
    require_results("python", matrix)
    minors = {version.release[:2] for version in shown(matrix, "python")}
    named = metadata("compiled-llm").get_all("Classifier") or []
    classified = re.findall(r"^Programming Language :: Python :: (\d+)\.(\d+)$", "\n".join(named), re.MULTILINE)
    assert {(int(major), int(minor)) for major, minor in classified} == minors
    oldest = ".".join(map(str, min(minors)))
    assert metadata("compiled-llm")["Requires-Python"] == f">={oldest}"


def test_page_names_the_ranges_that_pip_is_told() -> None:
    page = (DOCS / "reference" / "compatibility.md").read_text()
    ranges = {"Python": SpecifierSet(metadata("compiled-llm")["Requires-Python"])}
    titles = {"PyTorch": "torch", "transformers": "transformers", "FlashInfer (extra `cuda`)": "flashinfer-python"}
    titles.update({"xgrammar (extras `structured`, `server`)": "xgrammar", "FastAPI (extra `server`)": "fastapi"})
    others = ("httptools", "jinja2", "msgspec", "prometheus-client", "pydantic", "uvicorn")
    titles.update({f"{name} (extra `server`)": name for name in others})
    if "ray" in (metadata("compiled-llm").get_all("Provides-Extra") or []):
        titles["Ray (extra `ray`)"] = "ray"
    ranges.update({title: range_of(package) for title, package in titles.items()})
    for title, allowed in ranges.items():
        row = re.search(rf"^\| {re.escape(title)} \| `(.+)` \|$", page, re.MULTILINE)
        assert row is not None, title
        assert SpecifierSet(row[1]) == allowed, title
