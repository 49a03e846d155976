"""Calls of ``generate`` and of the model itself, and what they stand in: gradient modes, autocast, another thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
    WatermarkingConfig,
)

from support.fuzzing.callbacks import Callback, Criterion, PatientEos, Processor, ShorterLength, Streamer
from support.fuzzing.data import Prompt, Step
from support.fuzzing.side import Chat, Side, plain
from support.in_threads import in_thread, start
from support.tiny_models import tiny_llama
from support.tiny_tokenizer import tokenizer


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "enable_grad": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default float64": lambda: _default_dtype(torch.float64),
    "default device": lambda: torch.device("meta"),
}


def inside(name: str, call: Callable[[], Any]) -> Any:
    """Run a call inside one of these, in a ``"thread"`` of its own, or just so."""
    if name == "thread":
        return in_thread(call)
    with AROUND.get(name, contextlib.nullcontext)():
        return call()


@dataclass(frozen=True, repr=False)
class Turn(Step):
    """A call with new text, or with the next part of a conversation."""

    # new tokens; with ``goes_on`` they follow the text of the conversation
    prompt: Prompt = field(default_factory=Prompt)
    settings: dict[str, Any] = field(default_factory=dict)  # arguments that are plain data
    # which cache is given: none, a ``"new"`` one of the model's kind, a ``"dynamic"`` or ``"static"`` one
    cache: str = ""
    goes_on: bool = False  # the call goes on with the conversation, over its cache
    keeps: bool = False  # the result is the conversation from now on
    embedded: bool = False  # embeddings are given in place of ids
    positions: int = 0  # how many apart given ``position_ids`` are; 0 gives none
    around: str = ""  # what the call stands in: one of ``AROUND``, or a ``"thread"``
    seed: int = 0  # of the random numbers

    def run(self, side: Side) -> Any:
        if self.goes_on and (side.chat is None or len(side.chat.text) != len(self.prompt.lengths)):
            return "no conversation of so many rows"
        torch.manual_seed(self.seed)
        ids, mask = self.prompt.ids(side.vocabulary), self.prompt.mask()
        if self.goes_on:
            assert side.chat is not None
            ids, mask = torch.cat([side.chat.text, ids], dim=1), torch.cat([side.chat.mask, mask], dim=1)
        return self.call(side, ids, mask)

    def call(self, side: Side, text: Tensor, mask: Tensor) -> Any:
        """Call the model with ``[B, T]``, all ids so far, and their mask."""
        raise NotImplementedError

    def inputs(self, side: Side, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        given = {"input_ids": ids}
        if self.embedded:
            given = {"inputs_embeds": side.model.get_input_embeddings()(ids).detach()}
        if self.prompt.masked:
            given["attention_mask"] = mask
        if self.positions:
            given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0) * self.positions
        return given

    def given_cache(self, side: Side, tokens: int) -> dict[str, Any]:
        if self.goes_on:
            assert side.chat is not None
            return {"past_key_values": side.chat.cache}
        if not self.cache:
            return {}
        if self.cache == "new" and side.wrapped:
            return {"past_key_values": side.model.compiled.new_cache()}
        if self.cache == "static":
            return {"past_key_values": StaticCache(config=side.model.config, max_cache_len=tokens + 40)}
        return {"past_key_values": DynamicCache(config=side.model.config)}


@dataclass(frozen=True, repr=False)
class Generate(Turn):
    """``generate``."""

    processors: tuple[Callback, ...] = ()  # a user's own
    criteria: tuple[Callback, ...] = ()  # a user's own; ``"patient"`` and ``"shorter"`` are subclasses of HuggingFace's
    streamer: Callback | None = None  # a user's own
    assistant: int | None = None  # the seed of a draft model; None has none

    def call(self, side: Side, text: Tensor, mask: Tensor) -> Any:
        inputs = self.inputs(side, text, mask)
        before = {name: value.clone() for name, value in inputs.items()}
        options = {**inputs, **self.options(side, text)}
        result = inside(self.around, lambda: side.model.generate(**options))
        if self.keeps:
            new = torch.ones(len(mask), result.sequences.shape[1] - mask.shape[1], dtype=mask.dtype)
            side.chat = Chat(result.sequences, torch.cat([mask, new], dim=1), result.past_key_values)
        seen = mask if self.prompt.masked else self.mask_that_is_made(side, text)
        return {
            "result": without_states_of_masked(plain(result), seen, least=2),  # new tokens have one column
            "given cache": plain(options.get("past_key_values")),
            "prompt": 0 if self.embedded else text.shape[-1],
            "inputs": [bool(torch.equal(value, before[name])) for name, value in inputs.items()],
        }

    def options(self, side: Side, ids: Tensor) -> dict[str, Any]:
        """All other arguments."""
        options = {"do_sample": False, **self.settings, **self.given_cache(side, ids.shape[-1])}
        if "watermarking_config" in options:
            options["watermarking_config"] = WatermarkingConfig(**options["watermarking_config"])
        if "stop_strings" in options or "token_healing" in options:
            options["tokenizer"] = tokenizer()
        if self.processors:
            options["logits_processor"] = LogitsProcessorList([Processor(own, side) for own in self.processors])
        if self.criteria:
            options["stopping_criteria"] = StoppingCriteriaList([_criterion(own, side, ids) for own in self.criteria])
        if self.streamer is not None:
            options["streamer"] = Streamer(self.streamer, side)
        if self.assistant is not None:
            options["assistant_model"] = draft_model(self.assistant, side)
        return {**options, "return_dict_in_generate": True} if self.keeps else options

    def beams(self, side: Side) -> int:
        return int(self.settings.get("num_beams") or side.model.generation_config.num_beams or 1)

    def mask_that_is_made(self, side: Side, ids: Tensor) -> Tensor:
        """HuggingFace's mask of prompts without one: it hides pads, unless they end texts too."""
        pad = self.pad(side)
        hides = not self.embedded and pad is not None and pad not in self.ends(side)
        return (ids != pad).long() if hides else torch.ones_like(ids)

    def ends(self, side: Side) -> list[int]:
        """The tokens that end a row."""
        eos = self.settings.get("eos_token_id", side.model.generation_config.eos_token_id)
        return eos if isinstance(eos, list) else [] if eos is None else [eos]

    def pad(self, side: Side) -> int | None:
        """The token that rows have after their end."""
        pad = self.settings.get("pad_token_id", side.model.generation_config.pad_token_id)
        return next(iter(self.ends(side)), None) if pad is None else pad

    @property
    def drafts(self) -> bool:
        """Whether tokens are drafted, and some of them rejected."""
        return self.assistant is not None or any(name in self.settings for name in DRAFTING)

    def draws(self, side: Side) -> bool:
        return bool(self.settings.get("do_sample")) and not self.drafts and self.beams(side) == 1

    @property
    def changed_logits(self) -> bool:
        """Whether a row may be left without a token."""
        return any(own.does == "bans" for own in self.processors) or not CERTAIN.isdisjoint(self.settings)

    @property
    def infinite(self) -> bool:
        """Whether a token's logit may be infinite, from which none can be drawn."""
        return any(own.does == "forces with inf" for own in self.processors)


DRAFTING = ("prompt_lookup_num_tokens", "assistant_early_exit")
CERTAIN = frozenset({"suppress_tokens", "bad_words_ids"})


def draft_model(seed: int, side: Side) -> PreTrainedModel:
    return tiny_llama(seed=seed, num_hidden_layers=1, vocab_size=side.vocabulary, eos_token_id=None)


def _criterion(own: Callback, side: Side, ids: Tensor) -> Any:
    if own.does == "patient":
        return PatientEos(list(range(3, 20)))
    if own.does == "shorter":
        return ShorterLength(ids.shape[1] + 6)
    return Criterion(own, side)


@dataclass(frozen=True, repr=False)
class InThreads(Step):
    """Calls at the same time on the wrapped model, one after the other on its twin, whose results do not differ."""

    calls: tuple[Generate, ...] = ()

    def run(self, side: Side) -> Any:
        if side.wrapped:
            started = [start(partial(call.run, side)) for call in self.calls]
            wait(started, timeout=120)
            results = [future.result(timeout=0) for future in started]
        else:
            results = [call.run(side) for call in self.calls]
        side.log.clear()  # hooks saw the calls in any order
        return results


def without_states_of_masked(shown: Any, mask: Tensor, least: int) -> Any:
    """A plain result in which hidden states ``[B, Q, hidden]``, Q at ``least``, have those of seen tokens alone."""
    seen = partial(_seen, mask=mask, least=least)
    if isinstance(shown, dict):
        return {name: seen(value) if name == "hidden_states" else value for name, value in shown.items()}
    return [seen(part) if isinstance(part, list) else part for part in shown] if type(shown) is list else shown


def _seen(states: Any, mask: Tensor, least: int) -> Any:
    if isinstance(states, list):
        return [_seen(state, mask, least) for state in states]
    if not isinstance(states, Tensor) or states.dim() != 3 or not least <= states.shape[1] <= mask.shape[1]:
        return states
    seen = mask[:, -states.shape[1] :].repeat_interleave(len(states) // len(mask), 0)
    return states[seen.bool()]


@dataclass(frozen=True, repr=False)
class Forward(Turn):
    """``model(...)``; a list as ``logits_to_keep`` becomes a tensor."""

    around: str = "no_grad"
    labels: str = ""  # ``"ids"``, those with masked tokens ignored, or ``"all"``
    square: bool = False  # the mask has four dimensions
    training: bool = False  # in training mode
    backward: bool = False  # gradients are computed, and compared

    def call(self, side: Side, text: Tensor, mask: Tensor) -> Any:
        options = self.options(side, text, mask)
        side.model.train(self.training)
        try:
            result = inside(self.around, lambda: side.model(**options))
            gradients = self.gradients(side, result)
        finally:
            side.model.eval()
        if self.keeps:
            side.chat = Chat(text, mask, result.past_key_values)
        return {"result": self.shown(result, mask), "gradients": gradients}

    def options(self, side: Side, text: Tensor, mask: Tensor) -> dict[str, Any]:
        cache = self.given_cache(side, text.shape[-1])
        # The last token that generate returns is not in its cache.
        ids = text[:, cache["past_key_values"].get_seq_length() :] if self.goes_on else text
        options = {**self.settings, **cache, **self.inputs(side, ids, mask)}
        if isinstance(options.get("logits_to_keep"), list):
            options["logits_to_keep"] = torch.tensor(options["logits_to_keep"])
        if self.square:
            tril = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
            options["attention_mask"] = tril[None, None].expand(len(ids), 1, -1, -1)
        if self.labels:
            options["labels"] = ids if self.labels == "all" else ids.masked_fill(mask == 0, -100)
        return options

    def gradients(self, side: Side, result: Any) -> Any:
        if not self.backward:
            return None
        side.model.zero_grad()
        result.logits.float().square().mean().backward()
        named = side.model.named_parameters()
        norms = {name: parameter.grad.norm() for name, parameter in named if parameter.grad is not None}
        side.model.zero_grad()
        return plain(norms)

    def shown(self, result: Any, mask: Tensor) -> Any:
        """The result, without logits and hidden states of masked tokens: nothing is promised of those."""
        shown = plain(result)
        if self.square or not self.prompt.masked:
            return shown
        shown = without_states_of_masked(shown, mask, least=1)
        at = "logits" if isinstance(shown, dict) else 1 if self.labels else 0
        keep = self.settings.get("logits_to_keep", 0)
        columns = mask[:, keep] if isinstance(keep, list) else mask[:, -(keep or shown[at].shape[1]) :]
        if shown[at].shape[:2] == columns.shape:
            shown[at] = shown[at][columns.bool()]
        return shown
