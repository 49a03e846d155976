"""Requests are answered while other threads trace, whatever torch says of its process meanwhile."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import _symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

import compiled_llm
from compiled_llm import Engine, SamplingParams
from compiled_llm.config import WrapConfig
from compiled_llm.execution.threads.compiling_thread import CompilingThread
from support.parity import alone, greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread", "without_inductor")]

OPTIONS: dict[str, Any] = {"max_batch_size": 4, "kv_memory": "2000 tokens", "progress": False, "mode": "compile"}
NGRAMS = {"method": "ngram", "num_speculative_tokens": 3}
PROMPTS = [[10 + number, *[5, 6, 7] * 4] for number in range(4)]


@pytest.fixture
def traced_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some thread traces all the time, as torch 2.11 has it: a flag of the process says so, and nothing else."""
    if not hasattr(_symbolic_trace, "_is_fx_tracing_flag"):
        pytest.skip("from torch 2.15 on no flag of the process says it")
    monkeypatch.setattr(torch.compiler, "_compile_session_context", contextlib.nullcontext, raising=False)
    monkeypatch.setattr(WrapConfig, "compiles_drafts_beside_on", lambda config, device: True)
    monkeypatch.setattr(_symbolic_trace, "_is_fx_tracing_flag", True)


def plain() -> Any:
    return tiny_qwen3(0, eos_token_id=None, num_hidden_layers=1)


@pytest.mark.usefixtures("traced_elsewhere")
def test_a_cold_engine_that_drafts_answers_every_request_compiled(seed: int) -> None:
    """Its programs of drafts are compiled beside, from the first request on."""
    model, params = compiled_llm.wrap(plain(), **OPTIONS), SamplingParams(max_tokens=24, temperature=0.0)
    expected = [alone(plain(), prompt, 24) for prompt in PROMPTS]
    with Engine(model, max_num_seqs=2, speculative_config=NGRAMS) as engine:
        for _ in range(4):
            answers = [handle.result() for handle in [engine.submit(prompt, params) for prompt in PROMPTS]]
            assert [[*answer.token_ids] for answer in answers] == expected
        model.compiled.model_runner().graph_manager.beside.wait()
        engine.generate(PROMPTS, params)
        drafts = engine.stats().drafts
    assert drafts is not None
    assert drafts.accepted_tokens > 0
    assert model.compiled.stats().uncompiled == 0
    assert model.compiled.stats().recompiles == 0


@pytest.mark.usefixtures("traced_elsewhere")
def test_what_torch_compile_returns_asks_its_own_thread_alone() -> None:
    """Needed as long as ``torch.compile`` asks a flag of the process; it takes along what answers."""
    model = compiled_llm.wrap(plain(), **OPTIONS)
    inputs = mixed_prompts([4, 9], 128, 0)
    torch.testing.assert_close(greedy(model, inputs, 3), greedy(plain(), inputs, 3))
    with pytest.raises(RuntimeError, match="FX to symbolically trace"):
        make_fx(torch.compile(lambda x: x + 1, backend="eager"))(torch.ones(2))


@pytest.fixture
def tracing_thread() -> Iterator[None]:
    """Another thread compiles functions of its own, one after the other."""
    ended = threading.Event()

    def trace() -> None:
        while not ended.is_set():
            torch._dynamo.reset_code(gelu.__code__)
            torch.compile(gelu, fullgraph=True, backend="aot_eager")(torch.ones(4, 4))

    thread = threading.Thread(target=trace)
    thread.start()
    yield
    ended.set()
    thread.join(60)


def gelu(x: Tensor) -> Tensor:
    for _ in range(20):
        x = torch.nn.functional.gelu(x @ x)
    return x


@pytest.mark.usefixtures("tracing_thread")
def test_forwards_beside_a_trace_are_not_taken_for_traced_ones() -> None:
    """From torch 2.13 on ``is_compiling`` is true in all threads while one of them traces."""
    model = compiled_llm.wrap(plain(), **{**OPTIONS, "mode": "eager"})
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        kinds = {type(model(ids, use_cache=True).past_key_values).__name__ for _ in range(30)}
    assert kinds == {"PagedCache"}
    assert "outer_compile" not in str(model.compiled.stats())


def test_threads_that_compile_see_the_settings_of_who_starts_them() -> None:
    """Torch keeps them in a context, which a new thread does not have unless it is given."""
    seen: list[int] = []
    with torch._dynamo.config.patch(recompile_limit=37):
        thread = CompilingThread(lambda: seen.append(torch._dynamo.config.recompile_limit), seen.append)
        thread.wait()
    assert seen == [37]


def test_what_a_user_sets_while_a_thread_compiles_stays_and_it_compiles_again() -> None:
    """Dynamo remembers settings of the process when it begins to trace, and sets them again at the end."""
    before, began, compiled = torch.get_default_dtype(), threading.Event(), list[str]()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        if not began.is_set():
            began.set()
            while torch.get_default_dtype() == before:
                time.sleep(0.001)
        return graph.forward

    def compile() -> None:
        torch.compile(lambda x: x + 2, backend=backend)(torch.ones(2))
        compiled.append("compiled")

    thread = CompilingThread(compile, lambda error: compiled.append(f"failed: {error}"))
    try:
        assert began.wait(60)
        torch.set_default_dtype(torch.float64)
        thread.wait()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(before)
    assert compiled == ["compiled"]
