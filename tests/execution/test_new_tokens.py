"""Rows that feed in several known tokens in one step: the same as as many steps of one token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import compiled_llm
from compiled_llm.compilation.sampling.sampling import Sampling
from compiled_llm.execution.generate_loop import GenerateLoop
from support.execution.schedule import TOLERANCE, assert_fed, prompt_of
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture
from support.parity import assert_account_is_empty
from support.tiny_models import tiny_qwen3

pytestmark = pytest.mark.core

OPTIONS: dict[str, Any] = {"page_size": 4, "kv_memory": "1500 tokens", "max_batch_size": 8, "progress": False}
OVERRIDES: dict[str, Any] = {"eos_token_id": None, "num_hidden_layers": 2}
SAMPLED = [
    None,
    Sampling(temperature=0.9, top_k=20, seed=5),
    Sampling(temperature=1.1, repetition_penalty=1.5, presence_penalty=0.5, seed=6),
]


def wrapped(**options: Any) -> Any:
    return compiled_llm.wrap(tiny_qwen3(**OVERRIDES), **{**OPTIONS, "mode": "eager", **options})


def step_by_step(loop: GenerateLoop, tokens: Tensor) -> list[list[int]]:
    """Return the token sampled after each of ``tokens`` ``[B, q]``."""
    columns = []
    for at in range(tokens.shape[1]):
        loop.step(tokens[:, at])
        sampled = loop.drain()
        columns.append([sampled[row] for row in loop.rows])
    return [list(own) for own in zip(*columns, strict=True)]


@pytest.mark.drawn(most=3)
@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize(
    ("mode", "lengths", "new_tokens"),
    [
        ("eager", [4], 2),
        ("eager", [3, 4, 9], 5),
        ("eager", [1, 2, 7, 8, 15], 2),
        pytest.param("compile", [4], 5, marks=pytest.mark.whole),
        ("compile", [3, 4, 9], 2),
    ],
)
def test_several_tokens_in_a_step_are_as_many_steps(mode: str, lengths: list[int], new_tokens: int, seed: int) -> None:
    """Drawn tokens and penalties, too; after steps of one token and after one of as many."""
    rng, model = np.random.default_rng(seed), wrapped(mode=mode)
    prompts = [prompt_of(length, rng) for length in lengths]
    loops = [model.compiled.generate_loop() for _ in range(2)]
    for loop in loops:
        for number, prompt in enumerate(prompts):
            loop.admit(prompt, 40, SAMPLED[number % 3])
        loop.step()
        loop.drain()
    together, apart = loops
    for number in range(6):
        tokens = torch.tensor([prompt_of(new_tokens, rng) for _ in lengths])
        assert together.feed(tokens).tolist() == step_by_step(apart, tokens)
        if number % 3 < 2:
            continue
        torch.testing.assert_close(together.logits(), apart.logits(), **TOLERANCE)
        for layer in range(2):
            for own, other in zip(together.stored(layer), apart.stored(layer), strict=True):
                torch.testing.assert_close(own, other, **TOLERANCE)
        for _ in range(3):
            for loop in loops:
                loop.step()
            assert list(together.drain().values()) == list(apart.drain().values())
    stats = model.compiled.stats()
    assert (stats.graph_breaks, stats.recompiles) == (0, 0)
    for loop in loops:
        loop.close()
    assert_account_is_empty(model)


@pytest.mark.parametrize("lengths", [[5], [3, 4, 9]], ids=str)
def test_a_row_forgets_tokens_that_it_does_not_accept(lengths: list[int], seed: int) -> None:
    model = wrapped()
    loop = model.compiled.generate_loop()
    assert_fed(loop, tiny_qwen3(**OVERRIDES), np.random.default_rng(seed), lengths, new_tokens=4)
    loop.close()
    assert_account_is_empty(model)


def test_steps_of_several_tokens_are_captured_apart(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph is of so many rows and so many tokens of each."""
    let_a_cpu_capture(monkeypatch)
    rng, model = np.random.default_rng(seed), wrapped()
    loop, plain = model.compiled.generate_loop(), tiny_qwen3(**OVERRIDES)
    for _ in range(3):
        assert_fed(loop, plain, rng, [3, 4, 9], new_tokens=3)
        loop.close()
    graphs = {(row.rows, row.tokens): row for row in model.compiled.cuda_graphs.rows if row.phase == "decode"}
    assert graphs[4, 4].replays > 3
    assert graphs[4, 12].replays > 3
    assert_account_is_empty(model)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.ones(2, dtype=torch.int64), r"as many integers for each of 2 rows.*int64 \[2\]"),
        (torch.ones(3, 2, dtype=torch.int64), r"for each of 2 rows.*\[3, 2\]"),
        (torch.ones(2, 0, dtype=torch.int64), r"one at least; got torch.int64 \[2, 0\]"),
        (torch.ones(2, 2), r"float32"),
        (torch.ones(2, 2000, dtype=torch.int64), r"positions"),
    ],
)
def test_what_cannot_be_fed_is_refused_and_nothing_has_changed(tokens: Tensor, message: str, seed: int) -> None:
    model = wrapped()
    loop = model.compiled.generate_loop()
    rng = np.random.default_rng(seed)
    for length in (3, 6):
        loop.admit(prompt_of(length, rng), 20)
    with pytest.raises(RuntimeError, match="waits for its prefill"):
        loop.feed(torch.ones(2, 2, dtype=torch.int64))
    loop.step()
    lengths = [row.length for row in loop.rows]
    with pytest.raises(ValueError, match=message):
        loop.feed(tokens)
    assert [row.length for row in loop.rows] == lengths
    assert loop.feed(torch.ones(2, 1, dtype=torch.int64)).shape == (2, 1)


def test_rows_whose_tokens_are_sampled_late_are_refused() -> None:
    model = wrapped()
    loop = model.compiled.generate_loop()
    loop.admit([3, 4], 10, Sampling(temperature=0.0, deferred=True))
    loop.step()
    loop.drain()
    with pytest.raises(ValueError, match="sampled late"):
        loop.feed(torch.tensor([[3, 4]]))
