"""No change after which a trace would be another one leaves the fingerprint of a kept program as it was."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Qwen3Config

import compiled_llm
from compiled_llm.compilation.kept.fingerprint.fingerprint import Fingerprint
from support.compilation import fresh_fingerprint
from support.compilation.fingerprinted import Traced, traced_programs
from support.compilation.planted_changes import PLANTED
from support.parity import FEW_PAGES
from support.tiny_models import ONE_LAYER, tiny_qwen3


@pytest.fixture(scope="module")
def traced() -> Traced:
    """The prefill of a Qwen3 of one layer."""
    return traced_programs(compiled_llm.wrap(tiny_qwen3(**ONE_LAYER), **FEW_PAGES))[0]


def differences(traced: Traced) -> list[str]:
    return traced.call.compared_with(traced.fingerprint)


@pytest.mark.parametrize("name", PLANTED)
def test_a_change_is_found_by_name(traced, name):
    with ExitStack() as stack:
        PLANTED[name].make(stack, traced.call.model)
        found = differences(traced)
    assert any(PLANTED[name].named in difference for difference in found), found
    assert not differences(traced)


def test_what_python_notes_on_a_class_whose_objects_are_copied_changes_nothing(traced, monkeypatch):
    """``from_pretrained`` copies configs, and a model made from a config alone has none that was copied."""
    kind, noted = Qwen3Config, "__slotnames__"
    if noted in vars(kind):
        monkeypatch.delattr(kind, noted)
    else:
        monkeypatch.setattr(kind, noted, [], raising=False)
    assert not differences(traced)


def test_several_changes_at_once_are_found_each(traced, seed, whole):
    rng, names = np.random.default_rng(seed), [*PLANTED]
    for number in range(60 if whole else 5):
        chosen = [names[at] for at in rng.permutation(len(names))[: rng.integers(2, 5)]]
        print(f"seed {seed}, edit {number}: {chosen}")
        with ExitStack() as stack:
            for name in chosen:
                PLANTED[name].make(stack, traced.call.model)
            assert differences(traced), chosen
        assert not differences(traced), chosen


KINDS = {
    "functions": "function ",
    "classes": "class ",
    "modules": r"model[. ]|model$",
    "the config": r"model\.config",
    "globals": r"(transformers|torch)\.[\w.]+ ",
    "the process": "the process's ",
    "settings": "settings? ",
    "versions": "version of ",
    "our files": "compiled_llm's files",
}
"""Kinds of entries, by what their names begin with."""


@pytest.mark.whole
def test_each_kind_of_hash_is_needed(traced):
    """Left out, no other one would find some change."""
    needed = set()
    for name, planted in PLANTED.items():
        with ExitStack() as stack:
            planted.make(stack, traced.call.model)
            found = differences(traced)
        kinds = {kind for kind, begins in KINDS.items() if any(re.match(begins, each) for each in found)}
        kinds -= {"modules"} if "the config" in kinds else set()
        print(name, kinds, found[:3])
        needed |= kinds if len(kinds) == 1 else set()
    assert needed == KINDS.keys()


def test_it_is_read_back_as_it_was_written(traced):
    fingerprint = traced.fingerprint
    assert fingerprint.refused is None
    assert len(fingerprint.entries) > 300
    assert Fingerprint.decoded(json.loads(json.dumps(fingerprint.encoded()))) == fingerprint


@pytest.mark.parametrize(
    "damage",
    [
        lambda said: None,
        lambda said: [],
        lambda said: said | {"entries": None},
        lambda said: said | {"entries": {"a": 1}},
        lambda said: said | {"traced": [1]},
        lambda said: said | {"refused": 3},
        lambda said: {name: value for name, value in said.items() if name != "looked_up"},
    ],
)
def test_what_is_no_fingerprint_is_a_value_error(traced: Traced, damage: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match="fingerprint"):
        Fingerprint.decoded(damage(traced.fingerprint.encoded()))


@pytest.mark.whole  # alone: other tests of a worker leave marks on classes, which count as changes
def test_a_process_in_which_nothing_has_changed_finds_no_difference(traced, tmp_path):
    """With other hashes of texts, other addresses, after other imports, and without Inductor's compiler."""
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps(traced.fingerprint.encoded()))
    script = Path(fresh_fingerprint.__file__)
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, str(script), str(kept)], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout.splitlines()[-1])
    assert said["differences"] == []
    assert said["imported"] == []
