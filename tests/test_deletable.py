"""A feature is a part: without its files and its one line of registration, all else runs.

Each is taken out of a copy of package and ops, over which twenty smoke tests run in a process of its own. Features that
are none yet are listed with what they lack, and fail here if they lack nothing any more (`support/features.py`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from support.features import FEATURES, Feature, Parted, is_part, naming, python, taken_out
from support.imports import CHECKOUT, imports, imports_of, name_of, sources, targets

TESTS = CHECKOUT / "tests"
CONTROL = "test_drawing.py"
"""Tests that know of no feature: they pass in every copy, or the others fail since nothing runs there."""

REGISTRIES = {
    "compiled_llm.features": "features, each with its line",
    "compiled_llm.engine.drafts.config": "methods of drafting, each with its module",
    "compiled_llm": "its public names, which are imported at first use",
    "compiled_llm.commands.doctor.checks": "imports `wrap` to say why that fails, and goes on with no other module",
    "compiled_llm_ops.backends": "the group of entry points, by which others register back ends, has its name",
}
"""Modules that may look for ours by name, or import them in a `try`, with the reason."""


def each_feature() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", FEATURES)


def importers(feature: Feature, parted: Parted) -> list[str]:
    """Return the modules of a copy that import what went, wherever the import stands: those that have its name."""
    gone = {name_of(Path(file), Path()) for file in parted.modules}
    words = {Path(file).stem for file in feature.files}  # from outside, what lies in a folder is imported by its name
    paths = {name_of(path, parted.folder): path for path in sorted(parted.folder.rglob("*.py"))}
    return [
        str(found)
        for name, path in paths.items()
        if any(word in (source := path.read_text()) for word in words)
        for found in imports_of(source, name, path.name == "__init__.py", {*paths, *gone})
        if found.imported in gone
    ]


def why_none(feature: Feature, parted: Parted) -> str:
    """Return why a feature is no part; nothing if it is one."""
    if found := importers(feature, parted):
        return "the rest imports what went:\n" + "\n".join(found)
    if not is_part(feature):
        return "it is more than a folder, or three files, in a package"
    smoke = python(parted, "-m", "support.smoke_tests", str(parted.folder), feature.asks)
    return smoke.stdout + smoke.stderr if smoke.returncode else ""


def own_tests_that_pass(feature: Feature, parted: Parted) -> list[str]:
    """Return those and the control's."""
    options = ("-q", "-rpA", "-p", "no:cacheprovider", "--continue-on-collection-errors")
    run = python(parted, "-m", "pytest", *options, CONTROL, *feature.tests)
    return [line for line in run.stdout.splitlines() if line.startswith("PASSED ")]


@pytest.mark.slow
@pytest.mark.drawn(most=1)
@each_feature()
def test_all_else_runs_without_a_feature(name: str, seed: int, whole: bool, tmp_path: Path) -> None:
    """With --whole, none of its own tests passes: that takes as long again."""
    feature = FEATURES[name]
    parted = taken_out(feature, tmp_path)
    left = naming(feature, tmp_path)
    print(f"seed {seed}: without {name}, {len(left)} lines still name it:", *left, sep="\n")
    failure = why_none(feature, parted)
    if feature.lacks:
        assert failure, f"{name} is a part now: take `lacks` from its row"
        print(f"it is none yet: {failure.splitlines()[-1]}")
        return
    assert not failure, failure
    if not whole:
        return
    passed = own_tests_that_pass(feature, parted)
    assert passed, "nothing runs in the copy"
    assert not [line for line in passed if f"{CONTROL}::" not in line], "they pass without it: they belong elsewhere"


@each_feature()
def test_a_feature_s_files_and_tests_are_there(name: str) -> None:
    feature = FEATURES[name]
    assert [file for file in feature.files if not (CHECKOUT / file).exists()] == []
    assert [file for file in feature.tests if not (TESTS / file).exists()] == []
    if not feature.lacks:
        assert is_part(feature), "a folder, or at most three files, in each package"


# ---- the table is honest: what went is all of it


def without(feature: Feature) -> dict[str, set[str]]:
    """Return what each module that is left imports of those that are left."""
    files = sources()
    places = {name: str(path.relative_to(CHECKOUT)) for name, path in files.items()}
    gone = {
        name
        for name, place in places.items()
        if any(place == file or place.startswith(f"{file}/") for file in feature.files)
    }
    left: dict[str, set[str]] = {name: set() for name in files if name not in gone}
    for found in imports():
        if found.importer in left and found.imported in left:
            left[found.importer].add(found.imported)
    return left


def left_alone(feature: Feature) -> set[str]:
    """Return the modules that nobody imports once a feature is out, and did before, be it each other."""
    importing, complete = without(feature), without(Feature("", (), ()))
    imported = {target for targets in complete.values() for target in targets}
    found: set[str] = set()
    while True:
        used = {target for name, targets in importing.items() if name not in found for target in targets}
        if (more := (importing.keys() & imported) - used) == found:
            return found
        found = more


@pytest.mark.parametrize("name", [name for name, feature in FEATURES.items() if not feature.lacks])
def test_nothing_stays_that_served_a_feature_alone(name: str) -> None:
    """A module that nobody but its tests imports once a part is out is a file of that part."""
    assert sorted(left_alone(FEATURES[name])) == [], "add them to the files of its row"


def test_a_module_that_served_a_feature_alone_is_found() -> None:
    decisions = FEATURES["decisions"]
    short = decisions._replace(files=tuple(file for file in decisions.files if "compat" not in file))
    assert left_alone(short) == {"compiled_llm.compat.decisions"}


# ---- the table is honest: nobody asks whether a feature is there, but the registries


def asked_for(source: str, name: str, is_package: bool, modules: set[str]) -> Iterator[str]:
    """Find imports of modules of ours in a `try`, and strings that are their names."""
    package = name if is_package else name.rpartition(".")[0]
    nodes = [*ast.walk(ast.parse(source))]
    of_loggers = {
        id(node.args[0]) for node in nodes if isinstance(node, ast.Call) and "getLogger" in ast.dump(node.func)
    }
    for node in nodes:
        match node:
            case ast.Constant() if id(node) in of_loggers:
                pass
            case ast.Constant(value=str(text)) if text in modules and "." in text:
                yield f"{name}:{node.lineno} has the name of {text}"
            case ast.Try(body=body, handlers=[_, *_]):
                yield from (f"{name}:{line} imports in a try" for line in imported_at(body, package, modules))
            case ast.With(items=[ast.withitem(context_expr=ast.Call(func=ast.Name(id="suppress")))], body=body):
                yield from (f"{name}:{line} imports in a suppress" for line in imported_at(body, package, modules))


def imported_at(body: list[ast.stmt], package: str, modules: set[str]) -> Iterator[int]:
    for node in (inner for statement in body for inner in ast.walk(statement)):
        if isinstance(node, ast.Import | ast.ImportFrom) and modules & {*targets(node, package, modules)}:
            yield node.lineno


def may_ask(source: str) -> bool:
    """Whether a source has an import beside a `try`, or a text that begins with the name of a package of ours."""
    lazy = re.search(r"^ +(?:from|import) ", source, re.MULTILINE) and re.search(r"\btry:|\bsuppress\(", source)
    return bool(lazy or re.search(r"[\"']compiled_llm\w*\.", source))


@cache
def asking() -> dict[str, list[str]]:
    """Return what is found in each module. To parse them all takes 2 s."""
    files = sources()
    texts = {name: path.read_text() for name, path in files.items()}
    return {
        name: [*asked_for(text, name, files[name].name == "__init__.py", {*files})] if may_ask(text) else []
        for name, text in texts.items()
    }


def test_no_module_of_ours_is_imported_in_a_try_or_looked_for_by_name() -> None:
    found = [said for name, all_said in asking().items() if name not in REGISTRIES for said in all_said]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", REGISTRIES)
def test_a_registry_has_modules_of_ours(name: str) -> None:
    assert asking()[name], "take it off REGISTRIES"


@pytest.mark.parametrize(
    ("source", "asks"),
    [
        ("try:\n    import p.a\nexcept ImportError:\n    pass", True),
        ("with suppress(ImportError):\n    from p.a import name", True),
        ("def f():\n    try:\n        from p import a\n    except Exception:\n        a = None", True),
        ("import_module('p.a')", True),
        ("find_spec('p.a')", True),
        ("sys.modules.get('p.a')", True),
        ("A = {'a': 'p.a'}", True),
        ("try:\n    import torch\nexcept ImportError:\n    pass", False),
        ("try:\n    from p.a import name\n    name()\nfinally:\n    pass", False),
        ("import p.a", False),
        ("# It is p.a\nlog = logging.getLogger('p.a')", False),
    ],
)
def test_who_asks_is_found(source: str, asks: bool) -> None:
    assert bool([*asked_for(source, "p.here", False, {"p", "p.a", "p.here"})]) is asks
