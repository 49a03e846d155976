"""Models with recurrent layers generate what HuggingFace gives each row alone, whatever else is in its batch."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

import compiled_llm
from support.huggingface.callbacks import Halve
from support.huggingface.recurrent_families import WITH_EXPERTS, recurrent_model
from support.huggingface.recurrent_pairs import (
    FEW,
    HYBRIDS,
    LENGTHS,
    PAD,
    left_padded,
    new_tokens_of,
    of_rows_alone,
    plain_family,
    poison_released_states,
    prompts_of,
    wrapped_family,
)
from support.parity import assert_account_is_empty

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread")]

TWO = ["Lfm2", "Qwen3_5"]


def check_tokens(family: str, model: Any, seed: int, new: int = 8) -> None:
    """All in one batch, twice, and the longest alone."""
    prompts = prompts_of(LENGTHS, seed)
    expected = of_rows_alone(family, prompts, new)
    assert any(len(set(own)) > 3 for own in expected), "text that repeats one token shows little"
    for _ in range(2):
        assert new_tokens_of(model, prompts, new, eos_token_id=None) == expected
    assert new_tokens_of(model, prompts[3:], new, eos_token_id=None) == expected[3:]


ONE_OF_EACH_KIND = {"Bamba", "Jamba", "KimiLinear", "Lfm2", "Qwen3_5"}
"""Of recurrences, by which families differ in 16 bits."""


@pytest.mark.drawn(most=3)
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(own, marks=[pytest.mark.whole] * (own in WITH_EXPERTS and own not in ONE_OF_EACH_KIND))
        for own in HYBRIDS
    ],
)
def test_each_family_gives_huggingfaces_tokens(family: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are longer than a chunk and end on and beside pages; released states are NaN.

    Other families with experts have their tokens compared in `experts`.
    """
    model = wrapped_family(family)
    released = poison_released_states(model, monkeypatch)
    check_tokens(family, model, seed)
    assert released
    stats = model.compiled.stats()
    assert set(stats.generate_calls) == {"fast loop"}
    assert stats.recompiles == 0
    assert_account_is_empty(model)


@pytest.mark.parametrize(
    "family", [pytest.param(own, marks=[pytest.mark.whole] * (own not in ONE_OF_EACH_KIND)) for own in HYBRIDS]
)
def test_each_family_runs_in_16_bits(family: str, seed: int) -> None:
    """Some turn what they hand to a recurrence to float32, and some do so to a part of it."""
    model = compiled_llm.wrap(recurrent_model(family).to(torch.bfloat16), mode="eager", progress=False, **FEW)
    new_tokens_of(model, prompts_of([5, 1], seed), 3, eos_token_id=None)
    assert set(model.compiled.stats().generate_calls) == {"fast loop"}


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("family", HYBRIDS)
def test_compiled_steps_give_the_same_tokens_of_states(family: str, seed: int) -> None:
    model = wrapped_family(family, "compile")
    check_tokens(family, model, seed)
    stats = model.compiled.stats()
    assert (stats.graph_breaks, stats.recompiles) == (0, 0)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("family", TWO)
def test_sampled_rows_follow_the_seed_and_their_scores_are_huggingfaces(family: str, seed: int) -> None:
    """Of the tokens that were drawn, HuggingFace's logits are those that they were drawn from."""
    prompts, model = prompts_of([5, 9, 20], seed), wrapped_family(family)
    inputs, drawn = left_padded(prompts), []
    for number in (3, 3, 4):
        torch.manual_seed(number)
        drawn.append(
            model.generate(
                **inputs, do_sample=True, top_k=20, max_new_tokens=10, eos_token_id=None, pad_token_id=PAD,
                output_logits=True, return_dict_in_generate=True,
            )
        )  # fmt: skip
    assert torch.equal(drawn[0].sequences, drawn[1].sequences)
    assert not torch.equal(drawn[0].sequences, drawn[2].sequences)
    assert_drawn_from_huggingfaces_logits(family, prompts, drawn[0])
    assert_drawn_from_huggingfaces_logits(family, prompts, drawn[2])
    drawn.clear()
    gc.collect()
    assert_account_is_empty(model)


def assert_drawn_from_huggingfaces_logits(family: str, prompts: list[list[int]], out: Any) -> None:
    width = max(map(len, prompts))
    for row, prompt in enumerate(prompts):
        text = torch.tensor([prompt + out.sequences[row, width:].tolist()])
        with torch.no_grad():
            wanted = plain_family(family)(text).logits[0, len(prompt) - 1 : -1]
        found = torch.stack([step[row] for step in out.logits])
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
        assert (wanted.topk(20).indices == out.sequences[row, width:, None]).any(-1).all()


def test_copies_of_a_row_are_drawn_each_for_itself(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (prompt,) = wrapped_family("Qwen3_5"), prompts_of([21], seed)
    poison_released_states(model, monkeypatch)
    out = model.generate(
        **left_padded([prompt]), num_return_sequences=4, do_sample=True, top_k=20, max_new_tokens=8,
        eos_token_id=None, pad_token_id=PAD, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    assert len({tuple(row) for row in out.sequences.tolist()}) == 4
    assert_drawn_from_huggingfaces_logits("Qwen3_5", [prompt] * 4, out)
    del out
    assert_account_is_empty(model)


def test_a_processor_sees_the_scores_that_huggingface_gives_it(seed: int) -> None:
    model, prompts = wrapped_family("Lfm2"), prompts_of([5, 18], seed)
    options: dict[str, Any] = {"logits_processor": LogitsProcessorList([Halve()]), "eos_token_id": None}
    expected = [new_tokens_of(plain_family("Lfm2"), [own], 10, **options)[0] for own in prompts]
    assert new_tokens_of(model, prompts, 10, **options) == expected
    repeated: dict[str, Any] = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "eos_token_id": None}
    for own in prompts:
        assert new_tokens_of(model, [own], 10, **repeated) == new_tokens_of(plain_family("Lfm2"), [own], 10, **repeated)
    assert set(model.compiled.stats().generate_calls) <= {"fast loop", "processed loop"}
    assert_account_is_empty(model)


DRAFTS: dict[str, Callable[[], dict[str, Any]]] = {
    "prompt lookup": lambda: {"prompt_lookup_num_tokens": 3},
    "assistant": lambda: {"assistant_model": recurrent_model("Lfm2", 1)},
    "wrapped assistant": lambda: {"assistant_model": wrapped_family("Lfm2")},
}


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("kind", DRAFTS)
def test_drafts_take_huggingfaces_loop(kind: str, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Which is said: a state cannot forget several tokens."""
    model, (prompt,) = wrapped_family("Lfm2"), prompts_of([18], seed)
    for _ in range(2):
        try:
            expected: Any = new_tokens_of(plain_family("Lfm2"), [prompt * 2], 12, eos_token_id=None, **DRAFTS[kind]())
        except Exception as error:  # what HuggingFace refuses, we do, too
            with pytest.raises(type(error)):
                new_tokens_of(model, [prompt * 2], 12, eos_token_id=None, **DRAFTS[kind]())
        else:
            assert new_tokens_of(model, [prompt * 2], 12, eos_token_id=None, **DRAFTS[kind]()) == expected
            assert expected == of_rows_alone("Lfm2", [prompt * 2], 12)
    assert dict(model.compiled.stats().generate_calls) == {"original": 2}
    assert model.compiled.stats().slow_paths == {"generation_mode": 2}
    said = [message for message in caplog.messages if "(original), because" in message and "generation_mode" in message]
    assert len(said) >= 1
    assert_account_is_empty(model)
