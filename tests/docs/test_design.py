"""The pages of docs/design are true: a real call follows "the way of a token", and rooms say what the page says."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

import compiled_llm
import compiled_llm_flashinfer
import compiled_llm_ops
from support.docs.pages import CHECKOUT
from support.imports import sources
from support.tiny_models import tiny_qwen3

FOLDER = CHECKOUT / "docs" / "design"
DESIGN = (FOLDER / "index.md").read_text()
PACKAGES = [Path(str(package.__file__)).parent for package in (compiled_llm, compiled_llm_flashinfer, compiled_llm_ops)]


class Stop(NamedTuple):
    """An entry of "the way of a token"."""

    number: int
    file: str
    function: str
    on_cuda: bool


WAY = [
    Stop(int(number), file, function, bool(on_cuda))
    for number, file, function, on_cuda in re.findall(
        r"^(\d+)\. `([\w/]+\.py)`, `(\w+)`( on CUDA)?: .{20,}$", DESIGN, re.MULTILINE
    )
]


def source_of(file: str) -> Path:
    """The installed file behind a path of the repository."""
    folder, _, rest = file.removeprefix("ops/").partition("/")
    (package,) = (package for package in PACKAGES if package.name == folder)
    return package / rest


def test_the_way_is_numbered_and_every_entry_is_read() -> None:
    section = DESIGN.partition("## The way of a token")[2].partition("\n## ")[0]
    assert [stop.number for stop in WAY] == list(range(1, len(re.findall(r"^\d", section, re.MULTILINE)) + 1))
    assert len(WAY) > 15


@pytest.mark.parametrize("stop", WAY, ids=lambda stop: f"{stop.number}-{stop.function}")
def test_each_stop_of_the_way_is_a_function_in_its_file(stop: Stop) -> None:
    tree = ast.parse(source_of(stop.file).read_text())
    assert stop.function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_a_call_of_generate_follows_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """In mode eager on the CPU, where nothing is compiled and Python sees every function."""
    model = compiled_llm.wrap(tiny_qwen3(eos_token_id=None, num_hidden_layers=1), mode="eager", progress=False)
    prompt = torch.tensor([[1, 2, 3]])
    model.generate(prompt, max_new_tokens=2, do_sample=False)  # the first call prepares with null rows
    files = {str(source_of(stop.file)): stop.file for stop in WAY}
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename in files:
            calls.append((files[frame.f_code.co_filename], frame.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        model.generate(prompt, max_new_tokens=2, do_sample=False)
    finally:
        sys.setprofile(before)

    rest = iter(calls)
    for stop in WAY:
        if not stop.on_cuda:
            assert (stop.file, stop.function) in rest, f"stop {stop.number} is not reached after those before it"


def test_names_on_the_pages_are_in_the_code() -> None:
    """Functions, classes, options; or methods of HuggingFace's models."""
    code = {word for path in sources().values() for word in re.findall(r"\w+", path.read_text())}
    pages = "\n".join(page.read_text() for page in sorted(FOLDER.glob("*.md")))
    names = {name for quoted in re.findall(r"`([\w.]+)`", pages) for name in quoted.split(".")} - {""}
    assert len(names) > 50
    known = {name for name in names if name in code or hasattr(PreTrainedModel, name)}
    assert sorted(names - known) == []


def test_the_first_page_leads_to_all_others() -> None:
    others = {page.name for page in FOLDER.glob("*.md")} - {"index.md"}
    assert set(re.findall(r"^- \[[^]]+\]\(([\w-]+\.md)\): ", DESIGN, re.MULTILINE)) == others


# ---- rooms

ROOMS = dict(re.findall(r"^\| `((?:\w+/)+)` \| (.+) \|$", DESIGN, re.MULTILINE))


def first_line(package: Path) -> str:
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    return " ".join(docstring.partition("\n\n")[0].split()).replace("``", "`")


def test_each_room_says_what_the_page_says() -> None:
    for room, said in ROOMS.items():
        assert first_line(source_of(f"{room}__init__.py").parent) == said, room


def test_the_page_names_every_room() -> None:
    rooms = {f"compiled_llm/{path.parent.name}/" for path in PACKAGES[0].glob("*/__init__.py")}
    assert set(ROOMS) == {*rooms, "ops/compiled_llm_flashinfer/", "ops/compiled_llm_ops/"}
