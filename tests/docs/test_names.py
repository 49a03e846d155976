"""Files and modules that a page names exist: a move of code takes its documentation along."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.docs.pages import CHECKOUT, short

PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "results/*.md", "compiled_llm/**/*.md", "ops/**/*.md")
    for page in CHECKOUT.glob(pattern)
)

_PATH = re.compile(r"(?<![\w/.~-])(?:\.ci|compiled_llm|deploy|docs|ops|results|tests|tools)/[\w./-]*\w/?")
_MODULE = re.compile(r"(?<![\w/.-])compiled_llm(?:_flashinfer|_ops)?(?:\.\w+)+")
LOGGERS = {f"compiled_llm.{name}" for name in ("generate", "graphs", "pages", "progress", "uploads")}


def paths_in(page: Path) -> set[str]:
    """Paths from the root of the repository; a link's path from the page is another test's."""
    text = re.sub(r"\]\([^)]*\)", "]", page.read_text())
    return set(_PATH.findall(text))


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_a_file_that_a_page_names_exists(page: Path) -> None:
    missing = {path for path in paths_in(page) if not (CHECKOUT / path).exists()}
    assert not missing, f"{short(page)} names {sorted(missing)}"


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_a_module_that_a_page_names_exists(page: Path) -> None:
    there = re.sub(r"^[+].*$", "", page.read_text(), flags=re.MULTILINE)  # a diff has lines that are not there yet
    for name in set(_MODULE.findall(there)) - LOGGERS:
        assert exists(name), f"{short(page)} names {name}"


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or something that a module defines or exports."""
    module, _, attribute = name.rpartition(".")
    return file_of(name) is not None or attribute in set(names_in(module))


def file_of(module: str) -> Path | None:
    folder = Path(str(importlib.import_module(module.partition(".")[0]).__file__)).parent.parent
    path = folder.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


def names_in(module: str) -> Iterator[str]:
    file = file_of(module)
    for node in ast.walk(ast.parse(file.read_text() if file else "")):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            yield from ast.literal_eval(node.value)


def test_enough_names_are_read() -> None:
    """If the patterns matched nothing, the tests above would hold for any page."""
    assert len(set().union(*map(paths_in, PAGES))) > 40
    assert sum(len(_MODULE.findall(page.read_text())) for page in PAGES) > 40
    assert not exists("compiled_llm.no_such_module")
    assert not exists("compiled_llm_ops.sampling.sampling.no_such_function")
