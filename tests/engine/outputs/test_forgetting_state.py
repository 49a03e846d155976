"""Scores are those of before the token was sampled, of a state that forgets: nobody could take the token out again."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compiled_llm.engine.engine import Engine
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm_ops import COUNTED, sample_tokens
from compiled_llm_ops.library import definitions
from compiled_llm_ops.sampling import launches
from compiled_llm_ops.sampling.adjustments import Noted, Places, note_tokens
from engine.outputs.test_logprobs import huggingfaces_scores
from engine.test_engine import some_prompts, tiny, wrapped

WINDOW = 3
STRONG = {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.4}
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 40, "prompt_logprobs": 1},  # its first token is sampled apart from its launch
    {"temperature": 0.8, "logits_processors": [lambda _, logits: logits / 2]},  # these are sampled late
    {"temperature": 0.0, "logits_processors": [lambda _, logits: logits / 2]},
    {"temperature": 0.8, "logit_bias": dict.fromkeys(range(0, 60, 3), 2.0)},
]


class LastTokens:
    """Penalties of the last ``WINDOW`` tokens of an answer: the one that leaves the window is counted no more."""

    def __init__(self) -> None:
        self._kept: defaultdict[int, deque[int]] = defaultdict(deque)
        self.forgotten = 0

    def note(self, counts: Tensor, recent: Tensor, places: Places, tokens: Tensor, adjustments: Tensor) -> None:
        note_tokens(counts, recent, places, tokens, adjustments)
        counted = (tokens >= 0) & (adjustments & COUNTED != 0)
        for slot, token in zip(places.slots[counted].tolist(), tokens[counted].tolist(), strict=True):
            kept = self._kept[slot]
            if int((counts[slot] >> 1).sum()) == 1:  # a row that has just come in
                kept.clear()
            kept.append(token)
            if len(kept) > WINDOW:
                counts[slot, kept.popleft()] -= 2
                self.forgotten += 1


@pytest.fixture
def window(monkeypatch: pytest.MonkeyPatch) -> LastTokens:
    state = LastTokens()
    monkeypatch.setattr(launches, "note_tokens", state.note)
    return state


@pytest.mark.parametrize("options", [{}, {"mixed": True}], ids=["two launches", "mixed"])
def test_scores_of_a_window_of_tokens(options: dict[str, Any], window: LastTokens, reading: None, seed: int) -> None:
    """In prompts' steps, decode steps, alone and beside others, and in rows that are sampled late."""
    plain, prompts = tiny(), some_prompts(len(SETTINGS), seed, longest=20)
    shared = {"max_tokens": 14, "seed": seed, "logprobs": 20, "ignore_eos": True}
    params = [SamplingParams(**STRONG, **shared, **own) for own in SETTINGS]
    with Engine(wrapped(prefill_tokens=64), logprobs_mode="processed_logprobs", max_num_seqs=4, **options) as engine:
        outputs = engine.generate(prompts, params)
        outputs += engine.generate(prompts[:1], params[:1])
    assert window.forgotten == len(outputs) * (14 - WINDOW)
    for prompt, own, output in zip([*prompts, prompts[0]], [*params, params[0]], outputs, strict=True):
        check(plain, prompt, own, output.token_ids, output.outputs[0].logprobs)


def check(plain: PreTrainedModel, prompt: list[int], params: SamplingParams, answer: list[int], logprobs: Any) -> None:
    raw = plain(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].detach()
    for step, (token, entries) in enumerate(zip(answer, logprobs, strict=True)):
        seen = answer[max(0, step - WINDOW) : step]
        values = huggingfaces_scores(raw[step], prompt, seen, params, []).log_softmax(dim=-1)
        assert entries[token].logprob == pytest.approx(float(values[token]), abs=5e-5)
        for other, (logprob, _) in entries.items():
            assert logprob == pytest.approx(float(values[other]), abs=5e-5)


def test_whatever_sampling_writes_is_copied_before() -> None:
    assert Noted._fields == tuple(definitions[sample_tokens].writes)
