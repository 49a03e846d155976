"""On a GPU a row that reads a wrong page is named, in a replayed step, too, without a wait for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.execution.generate_loop import GenerateLoop
from support.execution.page_checks import PageCheck, WrongPageError, check_pages, wrong_tags
from support.gpu import needs_cuda
from support.parity import assert_account_is_empty
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.gpu, needs_cuda]

PROMPTS = [[*range(5, 45)], [*range(50, 83)]]


def model_for(**options: Any) -> PreTrainedModel:
    plain = tiny_qwen3(eos_token_id=None, head_dim=64).to("cuda", torch.bfloat16)
    options = {"kv_memory": "4000 tokens", "max_batch_size": 4, "progress": False, **options}
    return compiled_llm.wrap(plain, **options)


def step_and_wait(generate_loop: GenerateLoop, steps: int) -> None:
    for _ in range(steps):
        generate_loop.step()
        torch.cuda.synchronize()


@pytest.mark.parametrize("mode", ["cuda-graphs", "piecewise", "compile"])
def test_swapped_pages_are_named_and_the_next_call_works(mode: str) -> None:
    model = check_pages(model_for(mode=mode))
    generate_loop = model.compiled.generate_loop()
    first, _ = (generate_loop.admit(prompt, 60) for prompt in PROMPTS)
    for _ in range(6):
        generate_loop.step()
    state = generate_loop.model_runner.state
    assert first.slot is not None
    listed, start = state.slots.pages, first.slot * state.slots.pages_each
    listed[start : start + 2] = listed[start : start + 2].flip(0)
    said = rf"row {first.number} \(of a call\) has read page {first.pages[1]} at position 0,"
    with pytest.raises(WrongPageError, match=said):
        step_and_wait(generate_loop, 4)
    generate_loop.close()
    ids = torch.tensor([PROMPTS[0]], device="cuda")
    outputs = [model.generate(ids, max_new_tokens=20, do_sample=False) for _ in range(2)]
    assert torch.equal(*outputs)
    assert wrong_tags(model) > 0
    assert_account_is_empty(model)


def test_checked_steps_give_the_same_tokens() -> None:
    ids = torch.tensor([PROMPTS[0]] * 3, device="cuda")
    found = []
    for checked in (False, True):
        model = model_for()
        model.compiled.facts.taps[:] = [PageCheck] * checked
        found.append(model.generate(ids, max_new_tokens=60, do_sample=False))
    assert torch.equal(*found)
