"""Planted faults of states: each gives other tokens than HuggingFace's, or other logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compiled_llm.compilation import steps
from compiled_llm.execution.prefill import packing
from compiled_llm.kvcache.state_pool import RowStates
from compiled_llm.model.layers.recurrent import RecurrentStates
from support.huggingface.recurrent_pairs import (
    PAD,
    left_padded,
    of_rows_alone,
    plain_family,
    poison_released_states,
    prompts_of,
    wrapped_family,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def swapped_in_decode(patch: pytest.MonkeyPatch) -> None:
    """Read and write are exchanged."""
    original = steps._states
    patch.setattr(steps, "_states", lambda inputs: exchanged(original(inputs)))


def exchanged(rows: Any) -> Any:
    return rows._replace(read=rows.write, write=rows.read)


def swapped_in_chunks(patch: pytest.MonkeyPatch) -> None:
    """A part of a prompt begins with the entry that it writes."""
    original = packing._states_of

    def states_of(extension: Any, start: int, stop: int, spare: tuple[int, int]) -> tuple[int, int]:
        read, write = original(extension, start, stop, spare)
        return (write if start else read), write

    patch.setattr(packing, "_states_of", states_of)


def one_step_too_many(patch: pytest.MonkeyPatch) -> None:
    """States are written once more, from what has just been written."""
    original = RecurrentStates.causal_conv1d

    def twice(self: RecurrentStates, *args: Any, **kwargs: Any) -> Any:
        result, rows = original(self, *args, **kwargs), self.rows
        self.rows = rows._replace(read=rows.write)
        original(self, *args, **kwargs)
        self.rows = rows
        return result

    patch.setattr(RecurrentStates, "causal_conv1d", twice)


def wrong_parity_after_even_chunks(patch: pytest.MonkeyPatch) -> None:
    """What a step reads does not make way where an even number of tokens leads to its own place."""
    grow = RowStates.grow

    def grown(self: RowStates, length: int, tokens: int) -> tuple[int, int]:
        read, written = grow(self, length, tokens)
        if tokens > 1 and tokens % 2 == 0:
            self._entries.reverse()
        return read, written

    patch.setattr(RowStates, "grow", grown)


def kept_in_16_bits(patch: pytest.MonkeyPatch) -> None:
    """The matrix of a recurrence loses half of its bits where it is kept."""
    original = RecurrentStates.delta_rule

    def rounded(self: RecurrentStates, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        memory = self._memory[self._place].recurrent
        assert memory is not None
        memory.copy_(memory.bfloat16())
        return result

    patch.setattr(RecurrentStates, "delta_rule", rounded)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "swapped in decode": swapped_in_decode,
    "swapped in chunks": swapped_in_chunks,
    "one step too many": one_step_too_many,
    "wrong parity after even chunks": wrong_parity_after_even_chunks,
    "kept in 16 bits": kept_in_16_bits,
}


def answers_are_huggingfaces(seed: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Tokens are equal, and the logits that they follow from are close."""
    prompts, new = prompts_of([6, 1, 18, 37], seed), 10
    model = wrapped_family("Qwen3_5")
    poison_released_states(model, monkeypatch)
    wanted: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True, "eos_token_id": None}
    try:
        out = model.generate(**left_padded(prompts), max_new_tokens=new, do_sample=False, pad_token_id=PAD, **wanted)
    except (ValueError, RuntimeError) as error:  # NaN
        print(error)
        return False
    expected = of_rows_alone("Qwen3_5", prompts, new)
    if out.sequences[:, -new:].tolist() != expected:
        return False
    for row, (prompt, answer) in enumerate(zip(prompts, expected, strict=True)):
        with torch.no_grad():
            logits = plain_family("Qwen3_5")(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        if not torch.allclose(torch.stack([step[row] for step in out.logits]), logits, rtol=1e-4, atol=1e-4):
            return False
    return True


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_gives_other_answers(fault: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    assert not answers_are_huggingfaces(seed, monkeypatch)


def test_without_a_fault_they_are_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answers_are_huggingfaces(seed, monkeypatch)
