"""The features that meet, a line or a few each."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from random import Random

import xgrammar
from torch import Tensor
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor
from xgrammar.contrib import hf

from compiled_llm.requests.structured_outputs import StructuredOutputsParams
from support.combined.asked import Asked
from support.combined.feature import Feature
from support.engine.sampling_settings import REGEX, VOCABULARY, OfTheAnswer
from support.engine.text_tokenizers import byte_level

END = 1
FEW, COMPILED = "few", "compiled"
"""Stand for fewer tokens than requests have, and for a mode that compiles."""


@cache
def _compiled() -> xgrammar.CompiledGrammar:
    tokens = xgrammar.TokenizerInfo.from_huggingface(byte_level(), vocab_size=VOCABULARY, stop_token_ids=[END])
    return xgrammar.GrammarCompiler(tokens).compile_regex(REGEX)


def _by_grammar() -> LogitsProcessor:
    processor: LogitsProcessor = hf.LogitsProcessor(_compiled())
    return processor


def bias(asked: Asked, biases: Mapping[int, float]) -> None:
    """Add numbers to the logits of some tokens."""
    asked.params["logit_bias"] = {**asked.params.get("logit_bias", {}), **biases}
    asked.processors.append(partial(_Biased, biases))


class _Biased(LogitsProcessor):
    """Adds numbers to some tokens' logits."""

    def __init__(self, biases: Mapping[int, float]) -> None:
        self._biases = biases

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        for token, bias in self._biases.items():
            scores[:, token] += bias
        return scores


def _grammar(asked: Asked, chance: Random) -> None:
    asked.params |= {"structured_outputs": StructuredOutputsParams(regex=REGEX), "stop_token_ids": [END]}
    asked.processors.append(_by_grammar)


def _seed(asked: Asked, chance: Random) -> None:
    asked.params |= {"temperature": 0.9, "top_k": 3, "seed": chance.randrange(1000)}


def _several(asked: Asked, chance: Random) -> None:
    asked.params["n"] = chance.choice((2, 3))


def _penalties(asked: Asked, chance: Random) -> None:
    kind = chance.randrange(3)
    if kind == 0:
        asked.params["repetition_penalty"] = 1.6
        asked.processors.append(partial(RepetitionPenaltyLogitsProcessor, 1.6))
    elif kind == 1:
        asked.params |= {"presence_penalty": 1.5, "frequency_penalty": 0.9}
        asked.processors.append(partial(OfTheAnswer, 1.5, 0.9))
    else:
        biases = {chance.randrange(3, 100): chance.choice((-100.0, 1.0, 3.0)) for _ in range(4)}
        bias(asked, biases)


def _logprobs(asked: Asked, chance: Random) -> None:
    asked.params |= chance.choice([{"logprobs": 2}, {"logprobs": 0, "prompt_logprobs": 1}, {"prompt_logprobs": 2}])


def _processed(asked: Asked, chance: Random) -> None:
    asked.params["logprobs"] = 2


def _hidden(asked: Asked, chance: Random) -> None:
    asked.hidden = True


def _shared(asked: Asked, chance: Random) -> None:
    """Begins as others do; images stay where they are."""
    if asked.inputs is None:
        stem = Random(len(asked.ids) % 2).choices(range(3, 100), k=64)
        asked.ids[: len(asked.ids) * 3 // 4] = stem[: len(asked.ids) * 3 // 4]


FEATURES = [
    Feature("windows", subject="windows"),
    Feature("latents", subject="latents"),
    Feature("recurrent", subject="recurrent"),
    Feature("images", "prompt: it has an image", subject="images"),
    Feature("adapters", weights="adapters"),
    Feature("packed weights", weights="packed", wrap={"packed": True}, answers=frozenset({"packed"})),
    Feature("fp8 pages", "kv_dtype", wrap={"kv_dtype": "fp8_e4m3"}, answers=frozenset({"kv_dtype"})),
    Feature("cascade", "cascade", wrap={"cascade": True}, asks=_shared),
    Feature("batch_invariant", "batch_invariant", wrap={"batch_invariant": True, "mode": COMPILED}),
    Feature("chunked prompts", wrap={"prefill_tokens": FEW}),
    Feature("preemption", wrap={"kv_memory": FEW}, engine={"admission": "greedy"}),
    Feature("mixed", "mixed", engine={"mixed": True}),
    Feature(
        "drafts",
        "speculative_config",
        engine={"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ),
    Feature("prefix hits", asks=_shared),
    Feature("forks and n", "n", asks=_several),
    Feature("grammars", "structured_outputs", asks=_grammar),
    Feature("seeds", asks=_seed),
    Feature("penalties", asks=_penalties),
    Feature("log-probabilities", "prompt_logprobs", asks=_logprobs),
    Feature(
        "processed log-probabilities",
        engine={"logprobs_mode": "processed_logprobs"},
        answers=frozenset({"logprobs_mode"}),
        asks=_processed,
    ),
    Feature("hidden states", "hidden_states", asks=_hidden),
    Feature("sleep and wake", amid=lambda playing: playing.sleep()),
    Feature("weights written", between=lambda playing: playing.write_weights()),
]
BY_NAME = {feature.name: feature for feature in FEATURES}
