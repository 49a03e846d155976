"""Profiles: what is saved is read again, whatever it is; what is damaged, or of something else, is refused."""

from __future__ import annotations

import json
import random
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from compiled_llm.compilation.artifacts.profile import Profile
from compiled_llm.compilation.graphs.step_key import StepKey

MADE_FOR = {"model": "a.B", "rows": 8, "option mode": "cuda-graphs"}

steps = st.builds(
    StepKey.numbered,
    st.sampled_from(["decode", "prefill", "sampling"]),
    *[st.integers(0, 5000) for _ in range(3)],
)
uses = st.dictionaries(steps, st.integers(1, 10**9))
profiles = st.builds(Profile, st.just(MADE_FOR), uses, st.integers(0, 100))
deterministic = settings(derandomize=True, deadline=None, max_examples=60)
ONE = Profile(MADE_FOR, {StepKey.decode(4): 7, StepKey.prefill(64, 2, 1): 3}, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@deterministic
@given(profile=profiles)
def test_what_is_saved_is_read_again(folder: Path, profile: Profile) -> None:
    profile.save(folder / "profile.json")
    again = Profile.read(folder / "profile.json")
    assert again == profile
    counts = [count for _, count in again.by_use]
    assert counts == sorted(counts, reverse=True)
    assert len(counts) == len(profile.uses)


@deterministic
@given(now=profiles, before=profiles)
def test_earlier_runs_count_half(now: Profile, before: Profile) -> None:
    both = now.after(before)
    for step in now.uses.keys() | before.uses.keys():
        assert both.uses.get(step, 0) == now.uses.get(step, 0) + before.uses.get(step, 0) // 2
    assert all(both.uses.values())  # what nobody uses any more is forgotten
    assert now.after(None) == now


NO_PROFILES = [b"[]", b"3", b'"format"', b"\xff\xfe", b"{}", b"[" * 100_000]
SENSELESS = {"phase": ["encode"], "tokens": [-1, 1.5], "rows": [True, "8"], "variant": [None], "uses": [[]]}


def test_a_file_that_is_cut_anywhere_or_says_nothing_sensible_is_refused(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "profile.json"
    ONE.save(path)
    content = path.read_bytes()
    damaged = [content[:cut] for cut in random.Random(seed).sample(range(len(content) - 1), 50)]
    for field, values in SENSELESS.items():
        for value in values:
            said = json.loads(content)
            said["steps"][0][field] = value
            damaged.append(json.dumps(said).encode())
    for broken in damaged + NO_PROFILES:
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"profile='.*/profile.json' is damaged, or is no profile; remove it"):
            Profile.read(path)
    path.write_text('{"format": 2}')
    with pytest.raises(ValueError, match="has format 2, and this version reads 1; remove it"):
        Profile.read(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"profile='.*/none.json' cannot be read: No such file"):
        Profile.read(tmp_path / "none.json")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        Profile.read(tmp_path)


def test_what_differs_is_named() -> None:
    ONE.check(dict(MADE_FOR))
    with pytest.raises(ValueError, match=r"saved for something else: model 'a.B' there, 'a.C' here; rows 8 there, 16"):
        ONE.check({**MADE_FOR, "model": "a.C", "rows": 16})


def test_a_save_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "profile.json"
    ONE.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644

    def fail(self: Path, target: Path) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="the disk is full"):
        Profile(MADE_FOR, {}).save(path)
    assert list(tmp_path.iterdir()) == [path]
    assert Profile.read(path) == ONE


def test_structured_profiles_have_choices_with_masks() -> None:
    assert not ONE.masked
    assert not Profile(MADE_FOR, {StepKey.sampling(4, False): 1}).masked
    assert Profile(MADE_FOR, {StepKey.sampling(4, True): 1}).masked
