"""A dump holds every layer between a line of Python and its kernels."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import compiled_llm
from compiled_llm.compilation import programs
from compiled_llm.compilation.program_list import DECODE_MANY, PREFILL
from compiled_llm.explaining import dump
from compiled_llm.explaining.report import Report
from compiled_llm.explaining.tracing import Sandbox
from support import planted_faults as planted
from support.compilation.left_uncompiled import leave_uncompiled
from support.compilation.unbuilt_kernels import leave_kernels_unbuilt
from support.parity import greedy, mixed_prompts
from support.planted_faults import plant

depyf = pytest.importorskip("depyf")
pytestmark = pytest.mark.usefixtures("one_thread")

STAGES = ["1_bytecode.py", "2_guards.txt", "3_graph.py", "4_aten_graph.py", "5_inductor.py"]
PROGRAMS = ["prefill", "decode-batch-1", "decode-larger-batches"]
COMPILED = PROGRAMS[1]
"""The program that Inductor compiles without --whole, too."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dump") / "new" / "folder"


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest, root: Path, one_thread: None) -> Report:
    """Of a model whose layer has a line of ours; ``wrap`` would compile it in regions, as it does models of many.

    Inductor writes its files before it builds what is in them, which takes most of the time and is left to --whole.
    So are its files of all programs but one.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "_LAYERS_IN_REGION_ON_CPU", 1)
        if not request.config.getoption("whole"):
            leave_kernels_unbuilt(patch)
            leave_uncompiled(patch, PREFILL, DECODE_MANY)
        return compiled_llm.explain(plant(planted.ItemLeftATensor), dump=root)


def test_every_stage_of_every_program_is_there(root, report, whole):
    assert report.clean
    assert report.data["notes"] == []
    for program in PROGRAMS:
        stages = STAGES if whole or program == COMPILED else STAGES[:3]
        assert sorted(path.name for path in (root / program).iterdir() if path.is_file()) == stages
        texts = [(root / program / stage).read_text() for stage in stages]
        signs = ["__compiled_fn_", "GuardManager", "amax", "torch.ops.aten.amax", "AsyncCompile"]
        assert [sign in text for sign, text in zip(signs[: len(stages)], texts, strict=True)] == [True] * len(stages)
        compile(texts[0], program, "exec")
        if len(stages) == 5:
            parts = [part in texts[3] for part in ("aten.embedding", "_attention", "sample_tokens")]
            assert parts == [True] * 3, "not in regions, as wrap would compile it"
    assert json.loads((root / "report.json").read_text()) == report.data


@pytest.mark.whole
def test_what_is_not_wrapped_can_be_timed(without_inductor):
    prefill, decode = compiled_llm.explain(plant(planted.ItemLeftATensor), timings=[1]).data["timings"]
    assert (prefill["program"], decode["program"], decode["rows"]) == ("prefill", "decode", 1)
    assert decode["measured"] == "operators"
    assert {kernel["name"]: kernel["launches"] for kernel in decode["kernels"]}["compiled_llm::decode_attention"] == 1


@pytest.mark.whole
def test_frames_of_a_broken_model_are_named_by_their_function_and_line(tmp_path):
    report = compiled_llm.explain(plant(planted.Print), dump=tmp_path / "dump")
    assert "programs that are one graph each" in " ".join(report.data["notes"])
    frames = tmp_path / "dump" / "frames"
    (bytecode,) = [file for file in frames.iterdir() if re.fullmatch(r"\d+_Print_forward_1_1_bytecode.py", file.name)]
    line = planted.Print.forward.__code__.co_firstlineno
    assert f"planted_faults.py:{line} in " in bytecode.read_text().partition("\n")[0]
    assert any("torch.nn" in path.read_text() for path in frames.glob("graph_*.py"))


def test_a_folder_that_holds_something_is_refused_and_left_alone(tmp_path):
    (tmp_path / "mine").write_text("mine")
    for taken in (tmp_path, tmp_path / "mine"):
        with pytest.raises(ValueError, match="name a new or an empty folder"):
            compiled_llm.explain(plant(planted.PrintDeleted), dump=taken)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(dump, "belongs_to_another", lambda folder: folder == tmp_path)
    with pytest.raises(ValueError, match="belongs to another user"):
        compiled_llm.explain(plant(planted.PrintDeleted), dump=tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---- without depyf, with one that fails, and under the user's own


def fails(*_: Any) -> Any:
    raise RuntimeError("something is new\nand strange")


def no_depyf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "depyf", None)


def new_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depyf, "decompile", fails)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (no_depyf, r"depyf is not installed.*pip install"),
        (new_torch, r"does not know this Python or torch \(RuntimeError: something is new\)"),
    ],
)
def test_without_a_depyf_that_works_bytecode_is_disassembled(spoil: Callable[..., None], said: str, monkeypatch):
    code = plant.__code__
    python, note = dump.readable(code)
    assert note == ""
    assert "def plant" in python
    spoil(monkeypatch)
    bytecode, note = dump.readable(code)
    assert re.search(said, note)
    assert note in bytecode
    assert "RETURN_VALUE" in bytecode


@pytest.mark.whole
def test_a_dump_is_whole_but_for_what_fails(tmp_path, monkeypatch):
    no_depyf(monkeypatch)
    monkeypatch.setattr(Sandbox, "inductor", fails)
    report = compiled_llm.explain(plant(planted.PrintDeleted), dump=tmp_path)
    assert report.clean
    assert len(report.data["notes"]) == 2
    for note in report.data["notes"]:
        assert note in " ".join(str(report).split())
    files = sorted(path.name for path in (tmp_path / "prefill").iterdir())
    assert files == ["1_bytecode.txt", "2_guards.txt", "3_graph.py"]


@pytest.mark.whole
def test_all_works_under_the_users_own_depyf(tmp_path):
    inputs = mixed_prompts([4], 128, seed=0)
    expected = greedy(plant(planted.PrintDeleted), inputs, 6)
    own = tmp_path / "own"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # depyf warns that it is on
        with depyf.prepare_debug(str(own)):
            model = compiled_llm.wrap(plant(planted.PrintDeleted), progress=False)
            torch.testing.assert_close(greedy(model, inputs, 6), expected)
            assert model.compiled.explain().clean
            assert compiled_llm.explain(model, dump=tmp_path / "ours").clean
            report = compiled_llm.explain(plant(planted.Print))
            assert [entry["kind"] for entry in report.data["findings"] if not entry["follows"]] == ["graph break"]
            torch.testing.assert_close(greedy(model, inputs, 6), expected)
    assert [path.name for path in own.glob("full_code_for_decode_*.py")]
    assert sorted(path.name for path in (tmp_path / "ours" / "prefill").glob("*.*")) == STAGES
