"""A call of ``generate`` that is repeated gives the same bits on a GPU, in bfloat16, the first one included."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import compiled_llm
from support.execution.twins import OPTIONS, prompts_on_device, small_qwen3
from support.gpu import needs_cuda
from support.parity import assert_account_is_empty

pytestmark = [pytest.mark.gpu, needs_cuda]

WAYS: dict[str, dict[str, Any]] = {
    "auto": {},
    "flashinfer": {"backend": "flashinfer"},
    "piecewise": {"mode": "piecewise"},
    "2 graphs": {"max_graphs": 2},
    "6 graphs": {"max_graphs": 6},
}
CALLS = [[9], [300], [5, 33], [50, 9, 17], [400, 3, 80, 20], [30] * 9, [10, 120] * 6, [7] * 17]
ENDS = list(range(0, 2048, 12))
"""So many tokens end a row that rows end one after the other."""


@pytest.fixture(params=WAYS)
def model(request: pytest.FixtureRequest, seed: int) -> Iterator[PreTrainedModel]:
    wrapped = compiled_llm.wrap(small_qwen3(seed), **{**OPTIONS, "progress": False, **WAYS[request.param]})
    yield wrapped
    compiled_llm.unwrap(wrapped)
    gc.collect()


def called(model: PreTrainedModel, lengths: list[int], seed: int) -> list[Tensor]:
    """Tokens and logits of a greedy call, the tokens of a drawn one, and those of one whose rows end early."""
    inputs = prompts_on_device(lengths, seed)
    whole = model.generate(
        **inputs, max_new_tokens=30, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    torch.manual_seed(seed)
    drawn = model.generate(**inputs, do_sample=True, top_p=0.95, max_new_tokens=30)
    torch.manual_seed(seed)
    ended = model.generate(
        **inputs, do_sample=True, max_new_tokens=50, eos_token_id=ENDS, pad_token_id=0, top_k=50, temperature=1.5
    )
    return [whole.sequences, torch.stack(whole.logits), drawn, ended]


def test_a_call_gives_the_same_bits_whatever_is_recorded(model: PreTrainedModel, seed: int) -> None:
    """Each is cold when it is first called, and others are called between."""
    rng, known = random.Random(seed), dict[int, list[Tensor]]()
    for repeat in range(3):
        for number, lengths in rng.sample([*enumerate(CALLS)], len(CALLS)):
            found = called(model, lengths, seed)
            for what, new, old in zip(
                ("tokens", "logits", "drawn", "ended"), found, known.setdefault(number, found), strict=True
            ):
                assert torch.equal(new, old), f"{what} of prompts of {lengths} tokens differ in repeat {repeat}"
    table, stats = model.compiled.cuda_graphs, model.compiled.stats()
    print(table)
    assert (table.padded, table.failures) == (0, 0)
    assert table.captures > len(CALLS)
    assert (stats.recompiles, stats.cudagraph_skips) == (0, 0)
    assert_account_is_empty(model)


def test_the_first_call_gives_the_bits_of_later_ones(model: PreTrainedModel, seed: int) -> None:
    """Its programs are compiled in it, and what is captured with them changes nothing."""
    first = called(model, [50, 9, 17], seed)
    for warm in ([], [4], [1, 2, 17]):
        if warm:
            model.compiled.warmup(warm)
        for new, old in zip(called(model, [50, 9, 17], seed), first, strict=True):
            assert torch.equal(new, old)
