"""The house keeps its shape: arrows between rooms run one way, and a folder holds no more than one sees at a glance.

Rooms are the folders and lone files of the packages, and an arrow is an import, wherever it stands: at the top, in
a function, under `if TYPE_CHECKING`. Inside of each folder its rooms import one another one way, too. At the top, left
imports right:

    commands -> demo_model, server -> integrations, client -> huggingface -> explaining, engine -> execution
             -> compilation -> kvcache -> model -> kinds -> requests -> compiled_llm_ops, protocol, config, compat, env

FlashInfer's API, `compiled_llm_flashinfer`, stands beside: it imports the ops alone, and nobody imports it.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import compiled_llm
from support.imports import CHECKOUT, PACKAGES, Import, circles, importing_nodes, imports, imports_of, sources, targets

OPS, FLASHINFER = "compiled_llm_ops", "compiled_llm_flashinfer"
FLOORS = [
    {FLASHINFER},
    {"__main__"},
    {"commands"},
    {"compiled_llm"},  # `import compiled_llm` itself, which the rooms below must not need
    {"demo_model"},
    {"server"},
    {"trl"},  # a short name of what users import
    {"integrations"},
    {"client"},  # an API server of the server is one, too
    {"huggingface"},
    {"explaining", "engine"},
    {"execution"},
    {"compilation"},
    {"kvcache"},
    {"model"},
    {"kinds"},
    {"requests"},  # imports no torch: clients have it, too
    {OPS, "protocol", "config", "compat", "env", "features"},
]
FLOOR_OF = {room: number for number, floor in enumerate(FLOORS) for room in floor}
SIDE_BY_SIDE = [
    {"demo_model"},
    {"server"},
    {"explaining", "engine"},
]  # neither imports the other; at the bottom, config may import compat

MAY_IMPORT = {
    f"{OPS}.kernels": {f"{OPS}.kernels", f"{OPS}.contracts"},
    f"{OPS}.attention.cascade.kernels": {f"{OPS}.kernels", f"{OPS}.contracts", f"{OPS}.attention"},
    f"{OPS}.packed.kernels": {f"{OPS}.kernels", f"{OPS}.contracts", f"{OPS}.packed"},
    f"{OPS}.drafts.kernels": {f"{OPS}.kernels", f"{OPS}.contracts", f"{OPS}.drafts"},
    f"{OPS}.recurrent.kernels": {f"{OPS}.kernels", f"{OPS}.contracts", f"{OPS}.recurrent"},
    f"{OPS}.sampling.kernels": {f"{OPS}.kernels", f"{OPS}.contracts", f"{OPS}.sampling"},
    f"{FLASHINFER}.ops.kernels": {f"{FLASHINFER}.ops.contracts", f"{OPS}.kernels", f"{OPS}.contracts"},
    f"{OPS}.flashinfer": {f"{OPS}.contracts", f"{OPS}.protocol"},
    f"{OPS}.triton": {f"{OPS}.contracts", f"{OPS}.protocol", f"{OPS}.plain_attention", f"{OPS}.kernels"},
    f"{OPS}.reference": {f"{OPS}.contracts", f"{OPS}.protocol", f"{OPS}.plain_attention"},
    f"{OPS}.varlen": {f"{OPS}.contracts", f"{OPS}.protocol", f"{OPS}.kernels"},
}
# They import Triton and FlashInfer, which a CPU need not have.
LAZILY = {
    *(f"{OPS}.kernels", f"{OPS}.attention.cascade.kernels", f"{OPS}.packed.kernels", f"{OPS}.recurrent.kernels"),
    f"{OPS}.sampling.kernels",
    f"{OPS}.drafts.kernels",
    f"{OPS}.flashinfer",
    f"{FLASHINFER}.ops.kernels",
}
BACKENDS = (f"{OPS}.flashinfer", f"{OPS}.triton", f"{OPS}.varlen", f"{OPS}.reference")
DOORS = {folder: {f"{OPS}.backends"} for folder in BACKENDS}  # a backend, and the one module outside that imports it
DOORS[f"{OPS}.triton"].add(f"{OPS}.attention.invariant")  # an op for decode, with the same plain attention

MAX_ROOMS = 20
MODULES_IN_A_FOLDER = 14
TESTS_IN_A_FOLDER = 30
LONG = 600
LONG_FOR_A_REASON: dict[str, str] = {
    "compiled_llm.engine.engine": "one public class, half of whose lines are the docstrings of its methods",
}
"""Files of over 600 lines. A class is not cut in two to stay below: the reason says why the file is one thing."""

STILL: dict[str, list[str]] = {}
"""What does not keep to the rules yet, by room. Delete what no longer occurs; add nothing."""


def room_of(module: str) -> str:
    """`execution` for `compiled_llm.execution.generate_loop`; other packages are a room each."""
    parts = module.split(".")
    return parts[1] if parts[0] == "compiled_llm" and len(parts) > 1 else parts[0]


def folder_of(module: str) -> str:
    """`compiled_llm_ops.kernels` for `compiled_llm_ops.kernels.linear.norm`; those of a part lie deeper."""
    before, kernels, _ = module.partition(".kernels")
    if kernels:
        return before + kernels
    return ".".join(module.split(".")[: 3 if room_of(module) == FLASHINFER else 2])


def runs_back(arrow: Import) -> bool:
    """Whether an arrow between two rooms runs up, or across to a room that stands beside."""
    here, there = room_of(arrow.importer), room_of(arrow.imported)
    if here == there:
        return False
    if here == OPS or (here == FLASHINFER and there != OPS) or {here, there} in SIDE_BY_SIDE:
        return True
    return FLOOR_OF[here] > FLOOR_OF[there]


def breaks_a_rule_of_the_ops(arrow: Import) -> bool:
    here, there = folder_of(arrow.importer), folder_of(arrow.imported)
    if here == there or room_of(arrow.imported) not in (OPS, FLASHINFER):
        return False
    if there in DOORS and arrow.importer not in DOORS[there]:
        return True
    if here in MAY_IMPORT:
        return there not in MAY_IMPORT[here]
    return room_of(arrow.importer) in (OPS, FLASHINFER) and there in LAZILY and not arrow.lazily


def folders_above(module: str) -> list[str]:
    """`a` and `a.b` for `a.b.c`."""
    parts = module.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def back_arrows() -> set[Import]:
    return {arrow for arrow in imports() if runs_back(arrow) or breaks_a_rule_of_the_ops(arrow)}


def crowded(root: Path, most: int) -> set[str]:
    """Folders with more modules than one looks through; an `__init__.py` is none."""
    folders = Counter(path.parent for path in root.rglob("*.py") if path.name != "__init__.py")
    return {
        f"{folder.relative_to(CHECKOUT)} has over {most} modules" for folder, count in folders.items() if count > most
    }


def circles_of_rooms(folder: str, arrows: set[Import]) -> list[set[str]]:
    """Circles among what stands in a folder, its files and its folders; an `__init__` hands names on."""

    def room_in(module: str) -> str | None:
        inside = module.removeprefix(f"{folder}.")
        return inside.split(".")[0] if inside != module else None

    pairs = {(room_in(arrow.importer), room_in(arrow.imported)) for arrow in arrows}
    between = {Import(here, there) for here, there in pairs if here and there and here != there}
    return circles(between)


@cache
def violations() -> dict[str, str]:
    """What breaks a rule now, each with the room that it is found in."""
    back = back_arrows()
    found = {str(arrow): room_of(arrow.importer) for arrow in back}
    # A circle through an arrow that runs back ends with the arrow.
    for circle in circles({arrow for arrow in imports() if str(arrow) not in found}):
        found |= {f"{module} is in a circle": room_of(module) for module in circle}
    for folder in {name for module in sources() for name in folders_above(module)}:
        for circle in circles_of_rooms(folder, imports() - back):
            found[f"{folder} has a circle of rooms: {', '.join(sorted(circle))}"] = room_of(folder)
    for package in PACKAGES:
        found |= dict.fromkeys(crowded(package, MODULES_IN_A_FOLDER), package.name)
    found |= dict.fromkeys(crowded(CHECKOUT / "tests", TESTS_IN_A_FOLDER), "tests")
    for module, path in sources().items():
        if lines_of(path) > LONG and module not in LONG_FOR_A_REASON:
            said = f"{module} has over {LONG} lines: give the reason in LONG_FOR_A_REASON, or divide it"
            found[said] = room_of(module)
    return found


def test_arrows_run_one_way_and_folders_stay_small() -> None:
    still = {line for lines in STILL.values() for line in lines}
    new = violations().keys() - still
    assert not new, "these break the rules that tests/test_arrows.py begins with:\n" + "\n".join(sorted(new))


def test_what_no_longer_occurs_is_taken_off_the_list() -> None:
    mended = {line for lines in STILL.values() for line in lines} - violations().keys()
    assert not mended, "well done: delete these lines of STILL in tests/test_arrows.py:\n" + "\n".join(sorted(mended))


def test_no_class_name_stands_for_two_things() -> None:
    classes = Counter(
        name for path in sources().values() for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)
    )
    assert len(classes) > 100
    assert not [name for name, count in classes.items() if count > 1]


def test_every_room_has_a_floor() -> None:
    assert {room_of(module) for module in sources()} <= FLOOR_OF.keys()


def test_the_public_names_are_imported_for_types_from_where_they_are_found() -> None:
    for_types = {arrow.imported for arrow in imports() if arrow.importer == "compiled_llm" and arrow.lazily}
    assert for_types == set(compiled_llm._HOMES.values())


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_there_are_few_rooms_at_the_top(package: Path) -> None:
    rooms = {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert len(rooms - {"__init__", "__main__"}) <= MAX_ROOMS


def test_no_test_imports_a_test() -> None:
    tests = {path.stem for path in (CHECKOUT / "tests").rglob("test_*.py")}
    for path in (CHECKOUT / "tests").rglob("*.py"):
        source = path.read_text()
        if not re.search(r"(?:from|import|import_module\()\s*[\"']?test_", source):
            continue  # to parse all takes 3 s
        nodes = importing_nodes(ast.parse(source))
        assert not [name for node, _ in nodes for name in targets(node, "", tests) if name in tests], path


# ---- the reader of imports


@pytest.mark.parametrize(
    ("source", "imported", "lazily"),
    [
        ("import p.a", "p.a", False),
        ("import p.a as a", "p.a", False),
        ("from p import a", "p.a", False),
        ("from p import other", "p", False),
        ("from p.a import name", "p.a", False),
        ("from . import a", "p.a", False),
        ("from .a import name", "p.a", False),
        ("if TYPE_CHECKING:\n    from p.a import name", "p.a", True),
        ("if typing.TYPE_CHECKING:\n    import p.a", "p.a", True),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    import p.a", "p.a", False),
        ("try:\n    import p.a\nexcept ImportError:\n    pass", "p.a", False),
        ("class C:\n    from p.a import name", "p.a", False),
        ("def f():\n    from p.a import name", "p.a", True),
        ("async def f():\n    import p.a", "p.a", True),
        ("def f():\n    return importlib.import_module('p.a').x", "p.a", True),
        ("import_module('p.a')", "p.a", False),
    ],
)
def test_an_import_is_found_wherever_it_stands(source: str, imported: str, lazily: bool) -> None:
    found = list(imports_of(source, "p.here", False, {"p", "p.a", "p.here"}))
    assert found == [Import("p.here", imported, lazily)]


def test_a_circle_is_found_through_others() -> None:
    assert circles({Import(*pair) for pair in ("ab", "bc", "ca", "cd", "de", "ed")}) == [{"a", "b", "c"}, {"d", "e"}]
    assert circles({Import(*pair) for pair in ("ab", "bc", "ac")}) == []


@pytest.mark.parametrize(
    ("importer", "imported", "back"),
    [
        ("compiled_llm.execution.generate_loop", "compiled_llm.kvcache.pool", False),
        ("compiled_llm.kvcache.pool", "compiled_llm.execution.generate_loop", True),
        ("compiled_llm.execution.generate_loop", "compiled_llm", True),
        ("compiled_llm.engine.steps.loop", "compiled_llm.execution.generate_loop", False),
        ("compiled_llm.engine.steps.loop", "compiled_llm.explaining.report", True),
        ("compiled_llm.explaining.report", "compiled_llm.engine.steps.loop", True),
        ("compiled_llm.engine.steps.loop", "compiled_llm.huggingface.wrap", True),
        ("compiled_llm.model.facts", "compiled_llm_ops.contracts", False),
        ("compiled_llm_ops.contracts", "compiled_llm.config", True),
        ("compiled_llm_ops.contracts", "compiled_llm_flashinfer.ops.contracts", True),
        ("compiled_llm.config", "compiled_llm_ops", False),
        ("compiled_llm.config", "compiled_llm_flashinfer", True),
        ("compiled_llm_flashinfer.decode", "compiled_llm_ops.contracts", False),
        ("compiled_llm_flashinfer.decode", "compiled_llm.config", True),
        ("compiled_llm.config", "compiled_llm.model.facts", True),
    ],
)
def test_arrows_back_are_told_from_arrows_down(importer: str, imported: str, back: bool) -> None:
    assert runs_back(Import(importer, imported)) == back
