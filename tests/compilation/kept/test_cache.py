"""The cache of kept programs: whole or not there, this user's alone, bounded, and never a user's problem."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.codecache import CppPythonBindingsCodeCache

import compiled_llm
from compiled_llm.compilation.artifacts import writing
from compiled_llm.compilation.artifacts.manifest import NAME
from compiled_llm.compilation.kept.cache import room
from compiled_llm.compilation.kept.cache.program_cache import ProgramCache, _say_once
from compiled_llm.compilation.kept.cache.room import make_room
from compiled_llm.compilation.kept.cache.stored_program import StoredProgram
from compiled_llm.compilation.kept.kept_program import KeptProgram
from compiled_llm.execution.reporting.progress import watched
from support.compilation.kept_programs import results_in_turn, traces_counted, wait_for_writing
from support.parity import FEW_PAGES, greedy, mixed_prompts
from support.tiny_models import ONE_LAYER, tiny_qwen3

pytestmark = pytest.mark.slow

MADE_FOR = {"model": "Tiny"}
ROWS = ((7, 3), (2, 5))
"""Lengths of prompts: calls of several rows alone, whose kernels all tests here share."""


def answer(model: Any) -> list[list[int]]:
    return greedy(model, mixed_prompts([*ROWS[0]], 128, seed=0), 3).tolist()


def wrapped() -> Any:
    return compiled_llm.wrap(tiny_qwen3(**ONE_LAYER), **FEW_PAGES)


def ways(model: Any) -> set[str]:
    """Return whether programs were kept, traced or given up, without why."""
    return {way.partition(":")[0] for way in model.compiled.stats().programs.values()}


@pytest.fixture
def caching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep programs below a new folder, and return where they lie."""
    CppPythonBindingsCodeCache.cache_clear()  # other tests may have loaded the same kernels, of folders that are gone
    monkeypatch.setenv("COMPILED_LLM_KEEP_PROGRAMS", "1")
    monkeypatch.setenv("COMPILED_LLM_CACHE", str(tmp_path))
    return tmp_path / "programs"


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache after prefill and decode of two rows of a Qwen3 of one layer, as the fresh process below has them."""
    CppPythonBindingsCodeCache.cache_clear()  # other tests may have loaded the same kernels, of folders that are gone
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPILED_LLM_KEEP_PROGRAMS", "1")
        patch.setenv("COMPILED_LLM_CACHE", str(folder))
        answer(wrapped())
        wait_for_writing()
    return folder / "programs"


@pytest.fixture
def copied(filled: Path, caching: Path) -> Path:
    shutil.copytree(filled, caching)
    return caching


def programs_in(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.glob(f"[!.]*/*/{NAME}"))


def read(folder: Path) -> StoredProgram:
    return StoredProgram.read(folder, json.loads((folder / NAME).read_bytes())["manifest"]["made_for"])


# ---- a process that finds programs


@pytest.mark.usefixtures("caching")
def test_a_fresh_process_traces_nothing_and_needs_nothing_of_inductors_cache(tmp_path: Path) -> None:
    """Two of them: what other tests register with transformers in this one makes its programs others."""
    empty = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "empty")}
    first, second = results_in_turn("plain", "Qwen3", tmp_path, [{}, empty], ROWS)
    assert set(first["programs"].values()) == {"traced"}
    assert first["refusals"] == []
    assert second["programs"] == dict.fromkeys(first["programs"], "kept")
    assert (second["answers"], second["bits"]) == (first["answers"], first["bits"])
    assert second["traces"] == 0
    assert second["imported"] == []
    assert not [*(tmp_path / "empty").rglob("*.so")]


def test_what_lies_there_is_whole_and_this_users_alone(filled: Path) -> None:
    assert len(programs_in(filled)) == len([*filled.glob("*/*")]) == 2
    assert not [path for path in filled.rglob("*") if path.is_symlink() or path.stat().st_mode & 0o077]
    assert filled.stat().st_mode & 0o077 == 0


def test_a_program_that_is_damaged_is_traced_and_kept_again(copied: Path) -> None:
    expected = answer(tiny_qwen3(**ONE_LAYER))
    before = programs_in(copied)
    for library in before[0].rglob("*.so"):
        library.write_bytes(library.read_bytes()[:-1])
    (before[1] / "program.json").unlink()
    model = wrapped()
    assert answer(model) == expected
    assert ways(model) == {"given up", "traced"}
    wait_for_writing()
    assert programs_in(copied) == before
    heard: list[str] = []
    with traces_counted() as traces, watched(lambda doing, step=None, steps=None: heard.append(doing)):
        model = wrapped()
        assert answer(model) == expected
    assert ways(model) == {"kept"}
    assert not traces
    assert heard == ["loading prefill", "loading decode, 2 rows"]


@pytest.mark.whole
def test_a_changed_model_is_traced_and_kept_beside_the_other(copied: Path) -> None:
    def changed() -> Any:
        model: Any = tiny_qwen3(**ONE_LAYER)
        model.model.layers[0].mlp.act_fn = torch.nn.ReLU()
        return model

    expected, before = answer(changed()), programs_in(copied)
    for way in ("given up", "kept"):
        model = compiled_llm.wrap(changed(), **FEW_PAGES)
        assert answer(model) == expected
        assert ways(model) == {way}
        wait_for_writing()
    assert len(programs_in(copied)) == 2 * len(before)
    assert answer(wrapped()) == answer(tiny_qwen3(**ONE_LAYER))


def test_other_options_and_room_for_other_rows_are_another_key(copied: Path) -> None:
    for changed in ({}, {"max_batch_size": 3}, {"page_size": 32}):
        model: Any = compiled_llm.wrap(tiny_qwen3(**ONE_LAYER), **{**FEW_PAGES, **changed})
        names = model.compiled.model_runner().graph_manager.programs._taker.names
        assert bool(names) == (not changed)


def test_switched_off_nothing_is_read_or_written(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILED_LLM_KEEP_PROGRAMS", "0")
    model = wrapped()
    programs = model.compiled.model_runner().graph_manager.programs
    assert programs._taker is programs._recorder is None


# ---- files


def program(name: str = "decode", **more: Any) -> KeptProgram:
    return KeptProgram(name, result=0, **more)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    path = tmp_path / "inductor" / "ab" / "cab.py"
    path.parent.mkdir(parents=True)
    path.write_text("def call(values):\n    return values\n")
    return {"inductor/ab/cab.py": path, "triton/KEY/kernel.json": path}


def truncate(path: Path, content: bytes, chance: random.Random) -> None:
    path.write_bytes(content[: chance.randrange(len(content))])


def flip(path: Path, content: bytes, chance: random.Random) -> None:
    place = chance.randrange(len(content))
    path.write_bytes(content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[place + 1 :])


def remove(path: Path, content: bytes, chance: random.Random) -> None:
    path.unlink()


def link(path: Path, content: bytes, chance: random.Random) -> None:
    elsewhere = path.parents[len(path.parts) // 2].parent / f"elsewhere-{path.name}"
    elsewhere.write_bytes(content)
    path.unlink()
    path.symlink_to(elsewhere)


def let_others_write(path: Path, content: bytes, chance: random.Random) -> None:
    path.chmod(0o660)


def add(path: Path, content: bytes, chance: random.Random) -> None:
    path.with_name("more.py").write_bytes(content)


DAMAGES = [truncate, flip, remove, link, let_others_write, add]


def test_no_damage_is_ever_run(filled: Path, tmp_path: Path, seed: int, whole: bool) -> None:
    chance = random.Random(seed)
    for number in range(300 if whole else 20):
        source = chance.choice(programs_in(filled))
        folder = tmp_path / f"{number}" / source.name
        shutil.copytree(source, folder)
        damaged = chance.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
        damage = chance.choice(DAMAGES)
        damage(damaged, damaged.read_bytes(), chance)
        print(f"{damage.__name__} of {damaged.relative_to(folder)}")
        with pytest.raises((ValueError, OSError)):  # nothing else: nothing was loaded
            read(folder).load()
        assert damaged.name in (NAME, "program.json") or not folder.exists()


@pytest.mark.parametrize("what", ["root", "key", "program"])
@pytest.mark.parametrize("how", ["others write", "a link"])
def test_a_folder_that_others_can_change_is_not_used(what: str, how: str, copied: Path, tmp_path: Path) -> None:
    place = {"root": copied, "key": programs_in(copied)[0].parent, "program": programs_in(copied)[0]}[what]
    made_for = json.loads((programs_in(copied)[0] / NAME).read_bytes())["manifest"]["made_for"]
    if how == "a link":
        place.rename(tmp_path / "elsewhere")
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.chmod(0o770)
    found = ProgramCache(copied, made_for).read()
    assert len(found) == (1 if what == "program" else 0)
    assert place.exists() == (what != "program")


def test_where_nothing_can_be_written_the_log_says_so_once(
    tmp_path: Path, files: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    _say_once.cache_clear()
    (tmp_path / "programs").write_text("a file")
    caplog.set_level(logging.INFO, "compiled_llm.graphs")
    for name in ("prefill", "decode"):
        ProgramCache(tmp_path / "programs", MADE_FOR).write(program(name), files)
    (said,) = caplog.messages
    assert "are not kept in" in said


def test_files_of_inductors_that_are_gone_leave_nothing_behind(tmp_path: Path, files: dict[str, Path]) -> None:
    ProgramCache(tmp_path / "programs", MADE_FOR).write(
        program(), {**files, "inductor/ab/gone.so": tmp_path / "gone.so"}
    )
    assert [*(tmp_path / "programs").iterdir()] == []


# ---- processes that write


def in_children(count: int, do: Callable[[int], None]) -> list[int]:
    """Run a function in forked processes at once, and return how each ended: 0, or minus the signal's number."""
    children = []
    reading, writing = os.pipe()
    for number in range(count):
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)  # until all are there
            try:
                do(number)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    os.close(reading)
    os.close(writing)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def test_a_process_that_is_killed_before_the_renaming_leaves_nothing_under_that_name(
    tmp_path: Path, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ProgramCache(tmp_path / "programs", MADE_FOR)

    def killed(number: int) -> None:
        monkeypatch.setattr(writing.os, "rename", lambda *names: os.kill(os.getpid(), signal.SIGKILL))
        cache.write(program(), files)

    assert in_children(1, killed) == [-signal.SIGKILL]
    (unfinished,) = (tmp_path / "programs").glob(f"{writing.UNFINISHED}*")
    assert cache.read() == []
    cache.write(program(), files)
    assert [entry.program.name for entry in cache.read()] == ["decode"]
    os.utime(unfinished, (0, 0))  # as if it had lain there for an hour
    make_room(tmp_path / "programs")
    assert not unfinished.exists()
    assert len(cache.read()) == 1


def test_processes_write_and_read_at_once(tmp_path: Path, files: dict[str, Path]) -> None:
    def write_some(number: int) -> None:
        cache = ProgramCache(tmp_path / "programs", MADE_FOR)
        for each in range(6):  # all but the first of each are there, or are being written
            cache.write(program(f"program {(each + number) % 3}"), files)
            for entry in cache.read():
                assert entry.load() is not None

    assert in_children(4, write_some) == [0] * 4
    found = ProgramCache(tmp_path / "programs", MADE_FOR).read()
    assert sorted(entry.program.name for entry in found) == ["program 0", "program 1", "program 2"]
    assert not [*(tmp_path / "programs").glob(".*")]


# ---- room


def test_the_oldest_make_room_for_others(tmp_path: Path, files: dict[str, Path]) -> None:
    root = tmp_path / "programs"
    for number in range(5):
        ProgramCache(root, {"model": number}).write(program(), files)
    folders = sorted(programs_in(root), key=lambda folder: read(folder)._manifest.made_for["model"])
    for age, folder in enumerate(folders):
        os.utime(folder, (1000 - age, 1000 - age))
    StoredProgram.read(folders[4], {"model": 4}).load()  # was the oldest
    nbytes = sum(path.lstat().st_size for path in folders[0].rglob("*"))
    make_room(root, most=3 * nbytes)
    assert programs_in(root) == sorted([folders[4], *folders[:2]])
    assert len([*root.iterdir()]) == 3  # no empty folders


def test_of_programs_of_one_name_few_are_kept(tmp_path: Path, files: dict[str, Path]) -> None:
    cache = ProgramCache(tmp_path / "programs", MADE_FOR)
    cache.write(program("other"), files)
    for number in range(7):
        cache.write(program(form=[str(number)]), files)
        for folder in programs_in(tmp_path):
            os.utime(folder, (number, number)) if number == 3 else None
    names = [entry.program.name for entry in cache.read()]
    assert names.count("decode") == room.MOST_OF_A_NAME
    assert names.count("other") == 1
