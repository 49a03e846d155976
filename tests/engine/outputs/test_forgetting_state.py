"""Scores are those of before the token was sampled, of a state that forgets: nobody could take the token out again."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compiled_llm.engine.engine import Engine
from compiled_llm.engine.input_processing.input_processor import end_tokens
from compiled_llm.requests.outputs import RequestOutput
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.requests.structured_outputs import StructuredOutputsParams
from compiled_llm_ops import COUNTED, sample_tokens
from compiled_llm_ops.library import definitions
from compiled_llm_ops.sampling import launches
from compiled_llm_ops.sampling.adjustments import Noted, Places, note_tokens
from engine.outputs.test_logprobs import huggingfaces_scores
from engine.test_engine import some_prompts, tiny, wrapped
from support.engine import tiny_engines
from support.engine.text_tokenizers import byte_level
from support.execution.batches import let_a_cpu_capture_sampling
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture

WINDOW, TOKENS, END = 3, 14, 1
SHARED: dict[str, Any] = {"max_tokens": TOKENS, "min_tokens": TOKENS, "logprobs": 20}
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


@pytest.fixture(params=["uncompiled", "captured"])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps run as they are, or as launches that are captured and replayed."""
    if request.param == "captured":
        let_a_cpu_capture(monkeypatch)
        let_a_cpu_capture_sampling(monkeypatch)


@pytest.mark.parametrize("options", [{}, {"mixed": True}], ids=["two launches", "mixed"])
def test_scores_of_a_window_of_tokens(
    options: dict[str, Any], window: LastTokens, steps: None, reading: None, seed: int
) -> None:
    """In prompts' steps, decode steps, alone and beside others, and in rows that are sampled late."""
    prompts = some_prompts(len(SETTINGS), seed, longest=20)
    params = [SamplingParams(**STRONG, **SHARED, seed=seed, **own) for own in SETTINGS]
    with Engine(wrapped(prefill_tokens=64), logprobs_mode="processed_logprobs", max_num_seqs=4, **options) as engine:
        outputs = engine.generate(prompts, params)
        outputs += engine.generate(prompts[:1], params[:1])
    assert window.forgotten == len(outputs) * (TOKENS - WINDOW)
    for own, output in zip([*params, params[0]], outputs, strict=True):
        check(tiny(), own, output)


def test_scores_beside_masks_that_each_step_writes(window: LastTokens, steps: None, reading: None, seed: int) -> None:
    """Of rows with grammars: their masks are written with the step that samples, after what was noted is copied."""
    pytest.importorskip("xgrammar")
    tokenizer, plain = byte_level(), tiny_engines.tiny(eos_token_id=END, vocab_size=404)
    letters = StructuredOutputsParams(regex="[a-z]*")
    params = [SamplingParams(**STRONG, **SHARED, seed=seed, structured_outputs=own) for own in (letters, None, letters)]
    model = tiny_engines.wrapped(6000, tiny_engines.tiny(eos_token_id=END, vocab_size=404))
    with Engine(model, tokenizer=tokenizer, logprobs_mode="processed_logprobs", max_num_seqs=4) as engine:
        model_runner = model.compiled.model_runner()
        model_runner.thread.call(model_runner.prepare_deferred, (1, 2))  # what it captures writes the masks, too
        outputs = engine.generate(some_prompts(len(params), seed, longest=20), params)
    allowed = [token for token in range(len(tokenizer)) if re.fullmatch("[a-z]+", tokenizer.decode([token]))]
    for own, output in zip(params, outputs, strict=True):
        check(plain, own if own.structured_outputs is None else replace(own, allowed_token_ids=allowed), output)


def check(plain: PreTrainedModel, params: SamplingParams, output: RequestOutput) -> None:
    prompt, answer, logprobs = output.prompt_token_ids, output.token_ids, output.outputs[0].logprobs
    assert len(answer) == TOKENS
    raw = plain(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].detach()
    for step, (token, entries) in enumerate(zip(answer, logprobs or (), strict=True)):
        seen = answer[max(0, step - WINDOW) : step]
        values = huggingfaces_scores(raw[step], prompt, seen, params, [*end_tokens(plain)]).log_softmax(dim=-1)
        assert entries[token].logprob == pytest.approx(float(values[token]), abs=5e-5)
        for other, (logprob, _) in entries.items():
            assert logprob == pytest.approx(float(values[other]), abs=5e-5)


def test_whatever_sampling_writes_is_copied_before() -> None:
    assert Noted._fields == tuple(definitions[sample_tokens].writes)
