"""A batch says what runs in a step: rows that decode, new tokens of others, or both; chunks end in no token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm import OutOfPagesError
from compiled_llm.execution.batch import Batch, Extension, StepOutput
from compiled_llm.execution.decode.persistent_batch import PersistentBatch
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.kvcache.row import Row
from support.execution.alone import Alone
from support.tiny_models import tiny_qwen3

pytestmark = pytest.mark.core

OPTIONS: dict[str, Any] = {"mode": "eager", "page_size": 3, "kv_memory": "60 tokens", "max_batch_size": 5}
OVERRIDES: dict[str, Any] = {"eos_token_id": None, "num_hidden_layers": 1}
TOLERANCE = {"rtol": 1e-3, "atol": 1e-3}


class Scheduler:
    """Hands over batches, and compares what comes back with HuggingFace's forward."""

    def __init__(self) -> None:
        self.model: PreTrainedModel = compiled_llm.wrap(tiny_qwen3(**OVERRIDES), **OPTIONS, progress=False)
        self.model_runner: ModelRunner = self.model.compiled.model_runner()
        self.persistent = PersistentBatch(self.model_runner.state, self.model_runner.decode)
        self.twins: dict[Row, Alone] = {}

    def row(self) -> Row:
        return Row(self.model_runner.pool, 0)

    def run(self, decode: list[Row] | None = None, extend: list[Extension] | None = None) -> StepOutput:
        step: StepOutput = self.model_runner.thread.call(
            self.model_runner.run, Batch(decode or [], extend or []), self.persistent
        )
        for row in decode or []:
            self.twins[row].feed([self.twins[row].next])
        for extension in extend or []:
            row, ids = extension.row, extension.ids.tolist()
            assert isinstance(row, Row)
            if row in self.twins:
                self.twins[row].feed(ids)
            else:
                self.twins[row] = Alone(tiny_qwen3(**OVERRIDES), ids)
        chosen = [*(decode or []), *(extension.row for extension in extend or [] if extension.is_last)]
        assert step.rows == chosen
        assert step.tokens.tolist() == [self.twins[row].next for row in step.rows]
        assert (step.logits is None) == bool(decode and extend), "two launches have logits apart"
        if chosen and step.logits is not None:
            expected = torch.stack([self.twins[row].logits for row in step.rows])
            torch.testing.assert_close(step.logits, expected, **TOLERANCE)
        return step


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


def ids_of(length: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, length]).integers(3, 128, length)


def test_a_prompt_in_chunks_gives_a_token_after_the_last(scheduler, seed):
    row, prompt = scheduler.row(), ids_of(11, seed)
    for start, stop in ((0, 4), (4, 5), (5, 11)):
        scheduler.run(extend=[Extension.of(row, prompt[start:stop], is_last=stop == 11)])
    for _ in range(4):
        scheduler.run(decode=[row])


def test_chunks_and_whole_prompts_run_together(scheduler, seed):
    rows, prompts = [scheduler.row() for _ in range(3)], [ids_of(length, seed) for length in (7, 5, 4)]
    first = [Extension.of(row, prompt[:2], is_last=False) for row, prompt in zip(rows[:2], prompts[:2], strict=True)]
    scheduler.run(extend=[first[0], Extension.of(rows[2], prompts[2]), first[1]])
    scheduler.run(extend=[Extension.of(row, prompt[2:]) for row, prompt in zip(rows[:2], prompts[:2], strict=True)])
    for _ in range(3):
        scheduler.run(decode=[rows[2], *rows[:2]])


def test_rows_decode_beside_a_prompt_and_with_it_from_the_next_step_on(scheduler, seed):
    rows = [scheduler.row() for _ in range(4)]
    scheduler.run(
        extend=[Extension.of(row, ids_of(length, seed)) for row, length in zip(rows[:2], (5, 2), strict=True)]
    )
    scheduler.run(decode=rows[:2])
    scheduler.run(decode=rows[:2], extend=[Extension.of(rows[2], ids_of(6, seed))])
    scheduler.run(decode=rows[:3])
    prompt = ids_of(9, seed)
    scheduler.run(decode=rows[:3], extend=[Extension.of(rows[3], prompt[:5], is_last=False)])
    scheduler.run(decode=rows[:3], extend=[Extension.of(rows[3], prompt[5:])])
    for _ in range(4):
        scheduler.run(decode=rows)


@pytest.mark.parametrize("full", ["the prompt finds no pages", "a row that decodes finds none"])
def test_a_step_of_both_parts_that_finds_no_pages_changes_nothing(scheduler, seed, full):
    rows = [scheduler.row(), scheduler.row()]
    scheduler.run(extend=[Extension.of(row, ids_of(6, seed)) for row in rows])  # both enter a page next
    pool, new = scheduler.model_runner.pool, scheduler.row()
    left = pool.available
    pages = left if full == "a row that decodes finds none" else left + 1
    before = [(list(row.pages), row.length, row.position) for row in rows]
    with pytest.raises(OutOfPagesError):
        scheduler.run(decode=rows, extend=[Extension.of(new, ids_of(3 * pages, seed))])
    assert [(row.pages, row.length, row.position) for row in rows] == before
    assert (new.length, new.pages, pool.available) == (0, [], left)
    for _ in range(3):
        scheduler.run(decode=rows)
