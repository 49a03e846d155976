"""Deferred sampling on a GPU: from the logits of their own launches, whatever ran since, and without a wait.

Shapes: D rows, V vocabulary.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.compilation.sampling.masks import mask_of
from compiled_llm.compilation.sampling.sampling import NOT_A_TOKEN, Sampling
from compiled_llm.execution.batch import Batch, Extension, StepOutput
from compiled_llm.execution.decode.deferred_sampling import Masks
from compiled_llm.execution.decode.persistent_batch import PersistentBatch
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.kvcache.row import Row
from support.execution.twins import OPTIONS, SMALL, small_qwen3
from support.gpu import needs_cuda

pytestmark = [pytest.mark.gpu, needs_cuda]

WIDTH: int = SMALL["vocab_size"]
SLEEP = 2_000_000_000
"""Cycles: about a second."""


@pytest.fixture(
    scope="module",
    params=[("auto", "cuda-graphs"), ("flashinfer", "cuda-graphs"), ("auto", "eager"), ("auto", "reduce-overhead")],
    ids=" ".join,
)
def model(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    backend, mode = request.param
    wrapped = compiled_llm.wrap(
        small_qwen3(request.config.getoption("seed")), **OPTIONS, backend=backend, mode=mode, progress=False
    )
    wrapped.compiled.warmup([1, 4, 8])
    model_runner = wrapped.compiled.model_runner()
    model_runner.thread.call(model_runner.prepare_deferred, [1, 4, 8])
    assert model_runner.steps.sampling_graphs.buckets == ([1, 4, 8] if mode == "cuda-graphs" else [])
    words = model_runner.state.slots.tables.allowed.shape[1]
    assert all(len(area.bytes) >= 8 * (4 * words + 24) for area in model_runner.state.staging._areas)
    yield wrapped
    compiled_llm.unwrap(wrapped)
    gc.collect()


def allowed_after(token: int) -> NDArray[np.int64]:
    return np.arange(token % 7, WIDTH, 7)


def mask_after(token: int) -> NDArray[np.int32]:
    mask = mask_of(WIDTH, allowed=allowed_after(token).tolist())
    assert mask is not None
    return mask


class Grammared:
    """A loop whose rows follow a toy grammar: of each token, every seventh may follow."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model_runner: ModelRunner = model.compiled.model_runner()
        self.persistent = PersistentBatch(self.model_runner.state, self.model_runner.steps, self.model_runner.readbacks)
        self.last: dict[Row, int] = {}
        self.launched: dict[Row, Tensor] = {}

    def admit(self, length: int, deferred: bool = True) -> Extension:
        row, prompt = Row(self.model_runner.pool, 0), np.random.default_rng(length).integers(3, WIDTH, length)
        sampling = Sampling(temperature=0.0, presence_penalty=0.0 if deferred else 0.3)
        if deferred:
            sampling = Sampling(temperature=0.0, mask=mask_after(int(prompt[-1])), deferred=True)
            self.last[row] = int(prompt[-1])
        self.model_runner.thread.call(self.model_runner.state.slots.admit, [row], [sampling])
        return Extension.of(row, prompt)

    def run(self, decode: Sequence[Row] = (), extend: Sequence[Extension] = (), changes: bool = False) -> StepOutput:
        if changes:
            self.model_runner.expect_changes()
        batch = Batch(decode, extend)
        step: StepOutput = self.model_runner.thread.call(self.model_runner.run, batch, self.persistent)
        if step.logits is not None:
            self.launched |= dict(zip(step.rows, step.logits.clone(), strict=True))
        return step

    def sample(self) -> StepOutput:
        rows = self.persistent.deferred.rows
        masks = Masks(rows, np.stack([mask_after(self.last[row]) for row in rows]))
        step: StepOutput = self.model_runner.thread.call(self.model_runner.sample_deferred, self.persistent, masks)
        return step

    def check(self, step: StepOutput) -> None:
        """Each token is the likeliest that may follow, of the launch's own logits, and what the row feeds in next."""
        assert step.logits is not None
        tables = self.model_runner.state.slots.tables
        for row, logits, token in zip(step.rows, step.logits, step.tokens.tolist(), strict=True):
            if row in self.launched:
                assert torch.equal(logits, self.launched[row])
            allowed = allowed_after(self.last[row])
            assert token == allowed[int(logits.float().cpu()[allowed].argmax())]
            assert int(tables.next_token[row.slot]) == token
            self.last[row] = token

    def close(self) -> None:
        for row in self.last:
            row.free()


def test_tokens_follow_from_the_logits_of_their_own_launches(model: PreTrainedModel) -> None:
    """Beside rows that choose in the graph, over pages, with prefills and another loop's steps before the choice."""
    loop, other = Grammared(model), Grammared(model)
    extensions = [loop.admit(length, deferred) for length, deferred in ((5, True), (40, False), (17, True))]
    rows: Any = [extension.row for extension in extensions]
    first = loop.run(extend=extensions)
    assert first.tokens[::2].tolist() == [NOT_A_TOKEN] * 2
    loop.check(loop.sample())
    for step in range(40):
        loop.launched.clear()
        if step == 20:
            coming = loop.admit(33)
            loop.run(decode=rows, extend=[coming])
            rows = [*rows, coming.row]
        else:
            loop.run(decode=rows, changes=step in (0, 21))
        if step in (5, 20, 30):
            theirs = other.admit(60 + step)
            other.run(extend=[theirs])
            other.check(other.sample())
            other.run(decode=[theirs.row])  # type: ignore[list-item]
            other.check(other.sample())
        loop.check(loop.sample())
    for row in rows:
        row.free()
    other.close()


@pytest.mark.parametrize("count", [1, 4, 8])
def test_masks_and_choices_return_while_the_device_sleeps(count: int, model: PreTrainedModel) -> None:
    def play(cycles: int) -> list[int]:
        loop = Grammared(model)
        extensions = [loop.admit(6 + 3 * number) for number in range(count)]
        rows: Any = [extension.row for extension in extensions]
        loop.run(extend=extensions)
        for _ in range(4):
            loop.check(loop.sample())
            loop.run(decode=rows)
        torch.cuda.synchronize()
        asleep = torch.cuda.Event()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(cycles)
            asleep.record()
            start = time.perf_counter()
            for _ in range(3):
                chosen = loop.sample()
                loop.run(decode=rows)
            took, over = time.perf_counter() - start, asleep.query()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if cycles == SLEEP:
            assert not over, f"three choices and steps took {took:.3f} s, when the device had woken up"
        tokens: list[int] = chosen.tokens.tolist()
        loop.close()
        return tokens

    awake = play(1)
    play(SLEEP // 20)  # fills the allocators' caches: memory that CUDA pins for the first time may wait for the device
    assert play(SLEEP) == awake


def test_nothing_is_compiled_or_recorded_for_it(model: PreTrainedModel) -> None:
    before = model.compiled.stats()
    test_tokens_follow_from_the_logits_of_their_own_launches(model)
    after = model.compiled.stats()
    assert (after.graphs, after.recompiles, after.buckets) == (before.graphs, before.recompiles, before.buckets)
