"""Each sampling setting with its names: HuggingFace's, ``SamplingParams``', and those of a body over HTTP."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from compiled_llm.requests.structured_outputs import StructuredOutputsParams
from support.engine.text_tokenizers import byte_level

VOCABULARY = 380
ENDS = [1, *range(20, 380, 40)]
"""The model's end-of-sequence tokens: several, so that answers end early, here and there."""
STOPS = list(range(60, 90))


class OfTheAnswer(LogitsProcessor):
    """OpenAI's penalties, which HuggingFace does not have: only what was generated counts."""

    def __init__(self, presence: float = 0.0, frequency: float = 0.0) -> None:
        self.presence, self.frequency, self.prompt = presence, frequency, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        self.prompt = self.prompt or input_ids.shape[1]
        answers = input_ids[:, self.prompt :]
        times = torch.stack([torch.bincount(row, minlength=scores.shape[1]) for row in answers])
        return scores - self.frequency * times - self.presence * (times > 0)


class OnlyAfter(LogitsProcessor):
    """Bars tokens before so many new ones."""

    def __init__(self, count: int, tokens: list[int]) -> None:
        self.count, self.tokens, self.prompt = count, tokens, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        self.prompt = self.prompt or input_ids.shape[1]
        if input_ids.shape[1] - self.prompt < self.count:
            scores[:, self.tokens] = -torch.inf
        return scores


def by_grammar(regex: str) -> LogitsProcessor:
    """xgrammar's own processor for HuggingFace."""
    import xgrammar
    from xgrammar.contrib import hf

    tokens = xgrammar.TokenizerInfo.from_huggingface(byte_level(), vocab_size=VOCABULARY, stop_token_ids=ENDS)
    processor: LogitsProcessor = hf.LogitsProcessor(xgrammar.GrammarCompiler(tokens).compile_regex(regex))
    return processor


class Setting(NamedTuple):
    """One setting.

    Attributes:
        huggingface: options of ``generate``; processors as functions that make them.
        params: ``SamplingParams``; empty if only ``generate`` has the setting.
        body: fields over HTTP, where they are others than those of ``params``.
    """

    huggingface: dict[str, Any]
    params: dict[str, Any]
    body: dict[str, Any] | None = None

    def options(self) -> dict[str, Any]:
        """The options of one call of ``generate``."""
        made = {name: value for name, value in self.huggingface.items() if name != "logits_processor"}
        processors = LogitsProcessorList([make() for make in self.huggingface.get("logits_processor", ())])
        return made | ({"logits_processor": processors} if processors else {})

    def fields(self) -> dict[str, Any]:
        return self.params if self.body is None else self.body


def generated(model: PreTrainedModel, prompt: list[int], setting: Setting, tokens: int) -> list[int]:
    """The most likely tokens by ``generate``, HuggingFace's or ours."""
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": tokens, "do_sample": False} | setting.options()
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def ids_of(word: str) -> list[int]:
    return list(byte_level().encode(word, add_special_tokens=False))


def together(settings: Iterable[Setting]) -> Setting:
    """All of them in one request."""
    options, params = dict[str, Any](), dict[str, Any]()
    for one in settings:
        processors = [*options.get("logits_processor", ()), *one.huggingface.get("logits_processor", ())]
        options |= {**one.huggingface, "logits_processor": processors}
        params |= one.params
    return Setting(options, params)


WORDS = ["a", "e", "t", "he", "(", "1", "x t", "qu"]
STRINGS = ["`", "go"]
REGEX = "[a-z]{3,6}[A-Z]{1,20}"
ALLOWED = range(0, VOCABULARY, 3)
BIASES = {3: 4.0, 40: -100.0, 77: 1.5, 200: 3.0}

GREEDY: dict[str, Setting] = {
    "repetition_penalty": Setting({"repetition_penalty": 1.6}, {"repetition_penalty": 1.6}),
    "presence_penalty": Setting({"logits_processor": [partial(OfTheAnswer, 1.5)]}, {"presence_penalty": 1.5}),
    "frequency_penalty": Setting({"logits_processor": [partial(OfTheAnswer, 0, 0.9)]}, {"frequency_penalty": 0.9}),
    "logit_bias": Setting(
        {"sequence_bias": {(token,): bias for token, bias in BIASES.items()}},
        {"logit_bias": BIASES},
        {"logit_bias": {str(token): bias for token, bias in BIASES.items()}},
    ),
    "allowed_token_ids": Setting(
        {"suppress_tokens": [token for token in range(VOCABULARY) if token not in ALLOWED]},
        {"allowed_token_ids": list(ALLOWED)},
    ),
    "bad_words": Setting(
        {"bad_words_ids": [ids_of(start + word) for word in WORDS for start in ("", " ")]}, {"bad_words": WORDS}
    ),
    "min_tokens": Setting({"min_new_tokens": 9}, {"min_tokens": 9}),
    "max_tokens": Setting({"max_new_tokens": 3}, {"max_tokens": 3}),
    "stop_token_ids": Setting({"eos_token_id": [*ENDS, *STOPS]}, {"stop_token_ids": STOPS}),
    "stop": Setting({"stop_strings": STRINGS, "tokenizer": byte_level()}, {"stop": STRINGS}),
    "structured_outputs": Setting(
        {"logits_processor": [partial(by_grammar, REGEX)]},
        {"structured_outputs": StructuredOutputsParams(regex=REGEX)},
        {"structured_outputs": {"regex": REGEX}},
    ),
    "ignore_eos": Setting({"eos_token_id": None}, {"ignore_eos": True}),
    "ignore_eos, min_tokens": Setting(
        {"eos_token_id": None, "logits_processor": [partial(OnlyAfter, 9, ENDS)]}, {"ignore_eos": True, "min_tokens": 9}
    ),
}
"""Settings that change the most likely tokens."""
COMBINED = [GREEDY[name] for name in list(GREEDY)[:7]] + [GREEDY["stop_token_ids"]]
"""Those that one request can have together."""

DRAWN: dict[str, Setting] = {
    "temperature": Setting({"temperature": 0.2}, {"temperature": 0.2}),
    "top_k": Setting({"top_k": 3}, {"top_k": 3}),
    "top_p": Setting({"top_p": 0.2}, {"top_p": 0.2}),
    "min_p": Setting({"min_p": 0.5}, {"min_p": 0.5}),
}
"""Settings that change from which tokens is drawn."""
