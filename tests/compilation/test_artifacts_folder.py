"""A folder of artifacts is code: whole, ours and made for this, or it is refused before any of it is used."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from compiled_llm.compilation.artifacts import checked_folder
from compiled_llm.compilation.artifacts.manifest import NAME, Manifest
from compiled_llm.compilation.artifacts.writing import PLACE, check_new, seal, unfinished
from support.compilation.artifact_folders import FILES, HERE, ROWS, made_up, read

pytestmark = pytest.mark.core

PLACES = 50


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return made_up(tmp_path / "artifacts")


@pytest.fixture(autouse=True)
def no_copy_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Refused artifacts leave nothing in the folder for temporary files, and used ones go with their object."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    yield
    gc.collect()
    assert list(temporary.iterdir()) == []


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_what_is_read_is_a_private_copy_of_what_was_written(folder: Path) -> None:
    artifacts = read(folder)
    assert artifacts.rows == ROWS
    assert artifacts.builds() == {"graphs": 0, "C++ kernels": 0, "Triton kernels": 0, "FlashInfer kernels": 0}
    copy = artifacts.folder
    assert copy.stat().st_mode & 0o077 == 0
    assert {path.relative_to(copy).as_posix() for path in files_of(copy)} == FILES.keys()
    assert (copy / "inductor/aa/code.py").read_bytes() == FILES["inductor/aa/code.py"]


def test_lists_of_files_lead_to_wherever_these_lie(folder: Path) -> None:
    assert PLACE in (folder / "triton/KEY/__grp__kernel.json").read_bytes()
    artifacts = read(folder)
    (cubin,) = json.loads((artifacts.folder / "triton/KEY/__grp__kernel.json").read_text())["child_paths"].values()
    assert Path(cubin).read_bytes() == FILES["triton/KEY/kernel.cubin"]


@pytest.mark.parametrize("kind", ["cut", "flipped", "emptied", "removed", "added", "moved"])
def test_damage_at_random_places_is_an_error(folder: Path, seed: int, kind: str) -> None:
    at_random = random.Random(f"{seed} {kind}")
    for _ in range(PLACES):
        path = at_random.choice(files_of(folder))
        content = path.read_bytes()
        place = at_random.randrange(len(content))
        other = folder / "inductor" / f"other{at_random.random()}"
        bit = content[place] ^ 1 << at_random.randrange(8)
        written = {
            "cut": content[:place],
            "flipped": content[:place] + bytes([bit]) + content[place + 1 :],
            "emptied": b"",
        }
        if kind in written:
            path.write_bytes(written[kind])
        elif kind == "removed":
            path.unlink()
        elif kind == "added":
            other.write_bytes(content)
        else:
            path.rename(other)
        with pytest.raises(ValueError, match=r"artifacts='.*' (is damaged|is not whole|cannot be read|has )"):
            read(folder)
        other.unlink(missing_ok=True)
        path.write_bytes(content)
    assert read(folder).rows == ROWS


def test_a_manifest_that_is_not_ours_to_the_byte_is_an_error(folder: Path) -> None:
    whole = (folder / NAME).read_bytes()
    for content in (b"", b"{}", b"[]", b"null", whole + b" ", whole.replace(b"\n", b""), b"[" * 100_000, b"\xff"):
        (folder / NAME).write_bytes(content)
        with pytest.raises(ValueError, match="is damaged"):
            read(folder)


def test_a_manifest_of_another_format_is_named_as_that(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compiled_llm.compilation.artifacts.manifest.FORMAT", 2)
    (folder / NAME).write_bytes(Manifest(HERE, ROWS, {}).encoded())
    monkeypatch.undo()
    with pytest.raises(ValueError, match="has another format than this version reads, 1"):
        read(folder)


OTHERS = [
    *(("torch", "2.14.0"), ("dtype", "torch.bfloat16"), ("config.hidden_size", 65), ("option mode", "cuda-graphs")),
    ("GPU", "NVIDIA H200"),
]


@pytest.mark.parametrize(("name", "here"), OTHERS)
def test_what_differs_is_named(folder: Path, name: str, here: object) -> None:
    there = HERE.get(name, "missing")
    with pytest.raises(ValueError, match="was made for something else: ") as raised:
        read(folder, **{name: here})
    assert f"{name} {there!r} there, {here!r} here;" in str(raised.value)


def shared(mode: int) -> Callable[[Path], None]:
    return lambda path: path.chmod(path.stat().st_mode | mode)


def given_away(path: Path) -> None:
    os.chown(path, 12345, -1)


def linked(path: Path) -> None:
    elsewhere = path.parent.parent / f"elsewhere{path.name}"
    path.resolve().rename(elsewhere)
    path.resolve().symlink_to(elsewhere)


def made_a_pipe(path: Path) -> None:
    """Which nobody writes to: it is not waited for."""
    path.unlink()
    os.mkfifo(path)


OTHERS_WRITE = r"is not trusted: others may write .* \(chmod -R go-w\)"
DISTRUSTED: dict[str, tuple[list[str], Callable[[Path], None], str]] = {
    "its group may write": ([".", NAME, "inductor", "inductor/aa", "inductor/aa/code.py"], shared(0o020), OTHERS_WRITE),
    "others may write": ([".", NAME, "inductor", "inductor/aa", "inductor/aa/code.py"], shared(0o002), OTHERS_WRITE),
    "another user's": ([NAME, "inductor/aa", "inductor/aa/code.py"], given_away, "belongs to another user"),
    "a link": ([".", NAME, "inductor", "inductor/aa/code.py"], linked, "is a link|is not whole"),
    "a pipe": (["inductor/aa/code.py"], made_a_pipe, "cannot be (read|used)"),
    "a file": (["."], lambda path: (shutil.rmtree(path), path.touch()), "cannot be (read|used)"),
    "gone": (["."], shutil.rmtree, "cannot be (read|used)"),
}


@pytest.mark.parametrize(("why", "name"), [(why, name) for why, (names, *_) in DISTRUSTED.items() for name in names])
def test_a_part_that_is_not_trusted_or_not_there_is_refused(folder: Path, why: str, name: str) -> None:
    if why == "another user's" and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    _, change, message = DISTRUSTED[why]
    change(folder / name)
    with pytest.raises(ValueError, match=f"artifacts='.*' .*({message})"):
        read(folder)


@pytest.mark.parametrize("roots", [False, True])
def test_a_folder_of_another_user_is_refused_unless_it_is_roots(
    folder: Path, roots: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked_folder, "ROOT", folder.stat().st_uid if roots else -1)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    if roots:
        assert read(folder).rows == ROWS
    else:
        with pytest.raises(ValueError, match="is not trusted: artifacts belongs to another user"):
            read(folder)


# ---- writing


def test_a_folder_that_was_not_finished_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "folder" / "artifacts"
    target.parent.mkdir()
    with pytest.raises(KeyboardInterrupt), unfinished(target) as folder:  # noqa: PT012
        (folder / "inductor").mkdir()
        raise KeyboardInterrupt
    assert list(target.parent.iterdir()) == []


def test_a_folder_has_its_name_only_once_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "artifacts"
    with unfinished(target) as folder:
        (folder / "inductor").mkdir()
        with pytest.raises(ValueError, match="was never finished"):
            read(folder)
        seal(folder, HERE, ROWS)
        assert not target.exists()
    assert read(target).rows == ROWS


def test_of_two_that_write_one_folder_the_second_fails_and_the_first_stays(tmp_path: Path) -> None:
    target = tmp_path / "artifacts"
    with pytest.raises(OSError), unfinished(target) as folder:  # noqa: PT011, PT012
        (folder / "inductor").mkdir()
        seal(folder, HERE, ROWS)
        made_up(target)
    assert read(target).rows == ROWS


def test_what_exists_is_not_written_over(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for target in (folder, tmp_path / "link", folder / NAME):
        with pytest.raises(ValueError, match="that exists already"):
            check_new(target)
    with pytest.raises(ValueError, match="there is no folder"):
        check_new(tmp_path / "nowhere" / "artifacts")
    (tmp_path / "empty").mkdir()
    check_new(tmp_path / "empty")


def test_kernels_of_flashinfer_lie_where_it_finds_built_ones(tmp_path: Path) -> None:
    with unfinished(tmp_path / "artifacts") as folder:
        built = folder / "flashinfer_workspace/.cache/flashinfer/0.6.13/90a/cached_ops/page/page.so"
        built.parent.mkdir(parents=True)
        built.write_bytes(b"\x7fELF")
        (built.parent / "build.ninja").write_text("")
        seal(folder, HERE, ROWS)
    assert {path.relative_to(tmp_path / "artifacts").as_posix() for path in files_of(tmp_path / "artifacts")} == {
        NAME,
        "flashinfer/page/page.so",
    }
