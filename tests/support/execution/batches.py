"""Batches of rows on a model runner, each row compared with a twin in HuggingFace's forward.

Some rows follow a toy grammar: their sampling is deferred until they have got the masks that follow from their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.compilation.graphs.outputs import StepOutputs
from compiled_llm.compilation.graphs.step_table import Cost
from compiled_llm.compilation.sampling.masks import mask_of
from compiled_llm.compilation.sampling.sampling import NOT_A_TOKEN, Sampling
from compiled_llm.execution.batch import Batch, Extension, StepOutput, Tap
from compiled_llm.execution.decode.deferred_sampling import Masks
from compiled_llm.execution.decode.persistent_batch import PersistentBatch
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.steps import sampling_graphs, steps
from compiled_llm.execution.steps.sampling_graphs import SamplingGraphs
from compiled_llm.kvcache.row import Row
from support.execution.alone import Alone
from support.tiny_models import tiny_qwen3

OVERRIDES: dict[str, Any] = {"eos_token_id": None, "num_hidden_layers": 1}
OPTIONS: dict[str, Any] = {"mode": "eager", "page_size": 3, "kv_memory": "90 tokens", "max_batch_size": 5}
WIDTH = 128
PENALISED = Sampling(temperature=0.0, frequency_penalty=1.5, presence_penalty=0.5)
TOLERANCE = {"rtol": 1e-3, "atol": 1e-3}


def allowed_after(token: int) -> list[int]:
    """A toy grammar: of each token, every seventh may follow."""
    return list(range(3 + token * 5 % 7, WIDTH, 7))


def mask_after(token: int) -> NDArray[np.int32]:
    mask = mask_of(WIDTH, allowed=allowed_after(token))
    assert mask is not None
    return mask


def ids_of(length: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, length]).integers(3, WIDTH, length)


class _Kept(Tap):
    """A watcher that keeps what it is shown."""

    def __init__(self, seen: list[StepOutput]) -> None:
        self.sampled = seen.append  # type: ignore[method-assign]


class Batches:
    """Runs rows in one persistent batch; those of ``beside`` run in another one of the same model."""

    def __init__(self, beside: Batches | None = None, **options: Any) -> None:
        own = {**OPTIONS, "progress": False, **options}
        self.plain = tiny_qwen3(**OVERRIDES)
        self.model: PreTrainedModel = beside.model if beside else compiled_llm.wrap(tiny_qwen3(**OVERRIDES), **own)
        self.model_runner: ModelRunner = self.model.compiled.model_runner()
        self.persistent = PersistentBatch(self.model_runner.state, self.model_runner.steps, self.model_runner.readbacks)
        self.twins: dict[Row, Alone] = {}
        self.texts: dict[Row, list[int]] = {}  # since they were admitted
        self.constrained: set[Row] = set()
        self.penalised: set[Row] = set()
        self.seen: list[StepOutput] = []

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return self.model_runner.thread.call(function, *args, **kwargs)

    def admit(self, prompt: NDArray[np.int64], constrained: bool = True, penalised: bool = False) -> Row:
        row = Row(self.model_runner.pool, 0)
        sampling = PENALISED if penalised else Sampling(temperature=0.0)
        if constrained:
            fields = {"mask": mask_after(int(prompt[-1])), "deferred": True}
            sampling = Sampling(**vars(sampling) | fields)
            self.constrained.add(row)
        if penalised:
            self.penalised.add(row)
        self.call(self.model_runner.state.slots.admit, [row], [sampling])
        self.texts[row] = []
        return row

    def run(
        self, decode: Sequence[Row] = (), extend: Sequence[Extension] = (), changes: bool = True, mixed: bool = False
    ) -> StepOutput:
        mixed = mixed and self.model_runner.can_mix(decode, extend)
        if changes:
            self.model_runner.expect_changes()
        batch = Batch(list(decode), list(extend), mixed=mixed, taps=[_Kept(self.seen)])
        step: StepOutput = self.call(self.model_runner.run, batch, self.persistent)
        for row in decode:
            self.twins[row].feed(self.texts[row][-1:])
        for extension in extend:
            row, ids = extension.row, extension.ids.tolist()
            assert isinstance(row, Row)
            if row in self.twins:
                self.twins[row].feed(ids)
            else:
                self.twins[row] = Alone(self.plain, ids)
        assert step.rows == [*decode, *(extension.row for extension in extend if extension.is_last)]
        two = bool(decode and extend) and not mixed
        assert (step.logits is None) == two, "two launches have logits apart"
        if step.rows and step.logits is not None:
            expected = torch.stack([self.twins[row].logits for row in step.rows])
            torch.testing.assert_close(step.logits, expected, **TOLERANCE)
        for row, token in zip(step.rows, step.tokens.tolist(), strict=True):
            if row in self.constrained:
                assert token == NOT_A_TOKEN, "it waits to be sampled"
            else:
                self.take(row, token)
        return step

    def step(self, decode: Sequence[Row] = (), extend: Sequence[Extension] = ()) -> None:
        self.run(decode, extend)
        self.sample()

    def sample(self, **processed: Any) -> StepOutput:
        """Sample for the rows that wait, with the masks that follow from the tokens so far."""
        rows = [row for row in self.persistent.deferred.rows if self.texts[row]]
        masks = Masks(rows, np.stack([mask_after(self.texts[row][-1]) for row in rows])) if rows else None
        step: StepOutput = self.call(self.model_runner.sample_deferred, self.persistent, masks, **processed)
        for row, token in zip(step.rows, step.tokens.tolist(), strict=True):
            if row.slot is not None:
                self.take(row, token)
            else:
                assert token == NOT_A_TOKEN, "it has ended meanwhile"
        return step

    def take(self, row: Row, token: int) -> None:
        assert token == self.expected(row)
        self.texts[row].append(token)

    def expected(self, row: Row) -> int:
        twin, text = self.twins[row], self.texts[row]
        scores = twin.logits.clone()
        if row in self.penalised:
            times = torch.bincount(torch.tensor(text, dtype=torch.int64), minlength=WIDTH)
            scores -= PENALISED.frequency_penalty * times + PENALISED.presence_penalty * (times > 0)
        if row in self.constrained:
            allowed = allowed_after(text[-1] if text else twin.fed[-1])
            return allowed[int(scores[allowed].argmax())]
        return int(scores.argmax())


class ReplayedGraphCapture:
    """Captures nothing: a replay launches once more, into the same tensor, as a CUDA graph does."""

    def __init__(self, device: torch.device) -> None:
        pass

    def capture(self, launch: Callable[[], StepOutputs]) -> Any:
        outputs = launch()
        return SimpleNamespace(
            launch=lambda: outputs.tokens.copy_(launch().tokens), outputs=outputs, cost=Cost(), release=lambda: None
        )


def let_a_cpu_capture_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_graphs, "GraphCapture", ReplayedGraphCapture)
    monkeypatch.setattr(steps, "SamplingGraphs", lambda state, captures: SamplingGraphs(state, True))
