"""Text comes while it is made, from any thread, and stops where the user says, as with HuggingFace."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MaxTimeCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

import compiled_llm
from compiled_llm.execution.generate_loop import GenerateLoop
from compiled_llm.execution.steps.graph_manager import GraphManager
from compiled_llm.execution.steps.launch import BoundProgram
from support.characters import character_tokenizer
from support.huggingface.callbacks import Collected
from support.noting import note_calls
from support.parity import assert_account_is_empty, greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

PATIENCE = 60.0


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer()


@pytest.fixture(scope="module")
def plain():
    return tiny_qwen3(eos_token_id=None)


@pytest.fixture(scope="module")
def wrapped():
    return compiled_llm.wrap(tiny_qwen3(eos_token_id=None), mode="eager", page_size=4)


def text_of(model, tokenizer, inputs, new_tokens):
    ids = greedy(model, inputs, new_tokens)[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(ids, skip_special_tokens=True)


class Events(BaseStreamer):
    """Notes what comes, and between that when decode is launched."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def put(self, value: Tensor) -> None:
        self.seen.append("prompt" if value.dim() > 1 else "token")

    def end(self) -> None:
        self.seen.append("end")


def test_the_first_token_does_not_wait_for_decode_to_be_prepared(monkeypatch, seed):
    model = compiled_llm.wrap(tiny_qwen3(eos_token_id=None), mode="eager", page_size=4, progress=False)
    inputs, events = mixed_prompts([6], 128, seed), [Events(), Events()]
    launch = BoundProgram.__call__
    monkeypatch.setattr(GenerateLoop, "asynchronous", True)
    for each in events:
        monkeypatch.setattr(
            BoundProgram, "__call__", lambda *args, each=each: (each.seen.append("decode"), launch(*args))[1]
        )
        greedy(model, inputs, 3, streamer=each)
    cold, warm = [each.seen for each in events]
    assert cold == ["prompt", "token", "decode", "decode", "decode", "token", "token", "end"]
    assert warm == ["prompt", "decode", "token", "decode", "token", "token", "end"]


@pytest.mark.whole
def test_an_iterator_streamer_is_fed_from_a_thread_while_it_is_read(plain, wrapped, tokenizer, seed):
    inputs = mixed_prompts([6], 128, seed)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=PATIENCE)
    first_seen, finished = threading.Event(), threading.Event()

    def hold_after_the_first(input_ids: torch.Tensor, scores: object) -> bool:
        # The end is held back until the reader has seen the beginning: what comes at the end only would hang here.
        if input_ids.shape[1] == 6 + 150:
            assert first_seen.wait(PATIENCE)
        return False

    def run() -> None:
        greedy(wrapped, inputs, 200, streamer=streamer, stopping_criteria=[hold_after_the_first])
        finished.set()

    thread = threading.Thread(target=run)
    thread.start()
    parts = []
    for part in streamer:
        parts.append(part)
        if part:
            first_seen.set()
    thread.join(PATIENCE)
    assert finished.is_set()
    assert "".join(parts) == text_of(plain, tokenizer, inputs, 200)
    assert_account_is_empty(wrapped)


class Noting(BaseStreamer):
    def __init__(self, calls: list[Any], token: int) -> None:
        self.calls, self.token = calls, token

    def put(self, value: torch.Tensor) -> None:
        self.calls.append(f"streamer {value.dtype} {value.tolist()}")

    def end(self) -> None:
        self.calls.append("end")

    def criterion(self, ids: torch.Tensor, scores: object) -> torch.Tensor:
        self.calls.append(f"criterion {ids.tolist()}")
        return (ids[:, -1] == self.token) | (ids.shape[1] == 9)


@pytest.mark.drawn(most=2)
@pytest.mark.parametrize("lengths", [[5], [4, 9, 6]])
@pytest.mark.parametrize("pads", [False, True])
def test_streamer_and_criteria_are_called_as_huggingface_calls_them(pads, lengths, reading, plain, wrapped, seed):
    """A row that a criterion has ended gets pads if there are end tokens, and otherwise goes on."""
    inputs, calls = mixed_prompts(lengths, 128, seed), ([], [])
    free = greedy(plain, inputs, 12)
    eos = int(free[0, -4]) if pads else None
    for model, notes in zip((plain, wrapped), calls, strict=True):
        streamer = Noting(notes, token=int(free[-1, -3]))
        criteria = StoppingCriteriaList([streamer.criterion])
        out = greedy(model, inputs, 30, eos_token_id=eos, streamer=streamer, stopping_criteria=criteria)
        notes.append(out.tolist())
    assert calls[1] == calls[0]
    assert calls[0][-2] == "end"
    assert len(lengths) > 1 or len(calls[0]) == 1 + 2 * 4 + 2, "the prompt, four tokens, the end, the text"
    assert wrapped.compiled.stats().generate_calls.keys() == {"fast loop"}


def test_a_streamer_of_sampled_beams_gets_the_prompts_alone_as_huggingfaces_does(plain, wrapped, seed):
    inputs, texts, collected = mixed_prompts([4, 9, 6], 128, seed), [], []
    for model in (plain, wrapped):
        torch.manual_seed(seed)
        collected.append(Collected())
        texts.append(model.generate(**inputs, max_new_tokens=6, num_beams=2, do_sample=True, streamer=collected[-1]))
    assert torch.equal(*texts)
    assert collected[1].calls == collected[0].calls == [inputs["input_ids"].repeat_interleave(2, 0).tolist()]


class Own(TextStreamer):
    """May do anything."""


class Harmless(TextStreamer):
    leaves_model_alone = True


def long_enough(ids: torch.Tensor, scores: object) -> torch.Tensor:
    return torch.zeros(len(ids), dtype=torch.bool)


@pytest.mark.parametrize(
    ("streamer", "criteria", "watched"),
    [
        (None, [], False),
        (TextStreamer, [], False),
        (TextIteratorStreamer, [], False),
        (Own, [], True),
        (Harmless, [], False),
        (TextStreamer, [long_enough], True),
        (None, [MaxTimeCriteria(float("inf"))], False),  # its clock starts when the tests are collected
    ],
)
def test_the_model_is_looked_at_again_after_code_that_may_have_changed_it(
    streamer, criteria, watched, tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A call's prefill looks in any case."""
    model = compiled_llm.wrap(tiny_qwen3(eos_token_id=None), mode="eager", page_size=4)
    greedy(model, mixed_prompts([5], 128, seed=0), 6)  # what is prepared is looked at, too
    looks = note_calls(monkeypatch, GraphManager, "check_model", lambda *_: None)
    options = {"streamer": None if streamer is None else streamer(tokenizer)}
    greedy(model, mixed_prompts([5], 128, seed=0), 6, stopping_criteria=StoppingCriteriaList(criteria), **options)
    assert len(looks) == (6 if watched else 1)
