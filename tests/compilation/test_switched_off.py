"""Where `torch.compile` is switched off, for the process or for a while, models run uncompiled, which is said once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import compiled_llm
from compiled_llm.compilation import programs
from compiled_llm.config import WrapConfig
from support.huggingface.pairs import pair
from support.parity import mixed_prompts

pytestmark = pytest.mark.core

OPTIONS: dict[str, Any] = {"mode": "compile", "max_batch_size": 4}
NEW = {"max_new_tokens": 5, "do_sample": False}

WAYS: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "TORCH_COMPILE_DISABLE": lambda patch: setattr(torch._dynamo.config, "disable", True),
    "TORCHDYNAMO_DISABLE": lambda patch: patch.setenv("TORCHDYNAMO_DISABLE", "1"),
    "force_eager": lambda patch: torch.compiler.set_stance("force_eager"),
    "eager_on_recompile": lambda patch: torch.compiler.set_stance("eager_on_recompile"),
    "force_backend": lambda patch: torch.compiler.set_stance("default", force_backend="eager"),
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    programs._say_uncompiled.cache_clear()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.config.disable = False


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "switched off" in record.getMessage()]


def assert_all_as_huggingface(plain: Any, wrapped: Any) -> None:
    given = mixed_prompts([4, 9], 128, 0)
    ours, theirs = (model.generate(**given, **NEW) for model in (wrapped, plain))
    assert torch.equal(ours, theirs)
    with torch.no_grad():
        for use_cache in (True, False):
            ours, theirs = (model(given["input_ids"], use_cache=use_cache).logits for model in (wrapped, plain))
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    prompt = given["input_ids"][1].tolist()
    with compiled_llm.Engine(wrapped) as engine:
        params = compiled_llm.SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
        answer = engine.submit(prompt, params).result().token_ids
    assert answer == plain.generate(torch.tensor([prompt]), **NEW)[0, 9:].tolist()


@pytest.mark.parametrize("eager_first", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_model_runs_uncompiled_and_says_so_once(way, eager_first, monkeypatch, caplog):
    WAYS[way](monkeypatch)
    plain, wrapped = pair({**OPTIONS, "eager_first": eager_first}, eos_token_id=None)
    assert_all_as_huggingface(plain, wrapped)
    wrapped.compiled.warmup()
    (line,) = said(caplog)
    assert way in line
    assert line.endswith("models run uncompiled, and slowly")
    assert wrapped.compiled.stats().graphs == 0


@pytest.mark.whole
def test_a_stance_set_later_holds_for_calls_from_then_on(without_inductor, caplog):
    plain, wrapped = pair(OPTIONS, eos_token_id=None)
    wrapped.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2, do_sample=False)
    assert wrapped.compiled.stats().graphs == 2
    with torch.compiler.set_stance("force_eager"):
        assert_all_as_huggingface(plain, wrapped)
        assert wrapped.compiled.stats().graphs == 0
    assert len(said(caplog)) == 1
    manager = wrapped.compiled.model_runner().graph_manager
    manager.check_model()
    assert not manager.programs.interpreted


def test_what_needs_compiled_programs_is_refused(monkeypatch):
    WAYS["TORCHDYNAMO_DISABLE"](monkeypatch)
    wrapped = pair({**OPTIONS, "batch_invariant": True})[1]
    with pytest.raises(RuntimeError, match=r"batch_invariant=True: torch\.compile is switched off by TORCHDYNAMO_D"):
        wrapped.generate(torch.tensor([[3, 4, 5]]), **NEW)


def test_uncompiled_models_are_not_told(monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    WAYS["TORCHDYNAMO_DISABLE"](monkeypatch)
    wrapped = pair({"mode": "eager"})[1]
    wrapped.generate(torch.tensor([[3, 4, 5]]), **NEW)
    assert not said(caplog)
    assert WrapConfig(mode="eager").mode == wrapped.compiled.config.mode
