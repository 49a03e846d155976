"""A profile knows of features, too: sampling under grammars, and prompts as embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from compiled_llm.compilation.artifacts.profile import Profile
from compiled_llm.compilation.program import PREFILL_EMBEDDED
from compiled_llm.engine.engine import Engine
from compiled_llm.engine.grammars.compiling import Grammars
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.requests.structured_outputs import StructuredOutputsParams
from support.engine import tiny_engines
from support.engine.text_tokenizers import byte_level
from support.engine.tiny_engines import tiny

pytestmark = pytest.mark.usefixtures("one_thread", "untraced")


def wrapped() -> PreTrainedModel:
    return tiny_engines.wrapped(3000, tiny(eos_token_id=1, vocab_size=404), mode="compile", max_batch_size=8)


def test_choices_under_grammars_are_prepared_for_as_many_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xgrammar")
    model, path = wrapped(), tmp_path / "profile"
    choice = StructuredOutputsParams(choice=["yes", "no"])
    with Engine(model, tokenizer=byte_level(), max_num_seqs=8) as engine:
        engine.generate([[5, 6]], SamplingParams(n=3, seed=0, max_tokens=20, structured_outputs=choice))
    model.compiled.save_profile(path)
    profile = Profile.read(path)
    assert profile.masked
    rows = sorted({step.rows for step in profile.uses if step.phase == "sampling"})
    assert 4 in rows

    prepared: list[Any] = []
    own, deferred = Grammars.prepare, ModelRunner.prepare_deferred
    monkeypatch.setattr(Grammars, "prepare", lambda self, *given: prepared.append("grammars") or own(self, *given))
    monkeypatch.setattr(
        ModelRunner,
        "prepare_deferred",
        lambda self, buckets=(): prepared.append(list(buckets)) or deferred(self, buckets),
    )
    new = wrapped()
    with Engine(new, tokenizer=byte_level(), max_num_seqs=8) as engine:
        engine.warmup(profile=path)
    assert prepared == ["grammars", rows, []]
    prepared.clear()
    with Engine(new, max_num_seqs=8) as engine:  # which can have no grammars
        engine.warmup(profile=path)
    assert prepared == [rows, []]


def test_prefill_from_embeddings_is_prepared_if_it_was_used(tmp_path: Path) -> None:
    model, path = wrapped(), tmp_path / "profile"
    embeddings = model.get_input_embeddings()(torch.tensor([[5, 6, 7]]))
    model.generate(inputs_embeds=embeddings, max_new_tokens=3, do_sample=False)
    model.compiled.save_profile(path)
    assert Profile.read(path).embeddings == 1
    new = wrapped()
    new.compiled.warmup(profile=path)
    assert PREFILL_EMBEDDED in new.compiled.model_runner().graph_manager.prefills
    new.generate(inputs_embeds=embeddings, max_new_tokens=3, do_sample=False)
    assert new.compiled.events.cold_starts == []
