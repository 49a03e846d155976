"""Makes the sampling settings of rows from ``SamplingParams``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from compiled_llm.compilation.sampling.bias import BARRED, Bias, packed_values
from compiled_llm.compilation.sampling.masks import mask_of
from compiled_llm.compilation.sampling.sampling import Sampling
from compiled_llm.requests.sampling_params import SAMPLED_BY, SEEDS, SamplingParams
from compiled_llm_ops import MAX_BIASES, MAX_FOLLOWED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_COLDEST, _HOTTEST = 1e-20, 1e20
"""Temperatures from which on draws are the same; with others, scores would not be finite in float32."""


class RequestSampling:
    """The sampling settings of ``SamplingParams`` on one model, for any prompt."""

    def __init__(
        self, params: SamplingParams, ends: frozenset[int], vocabulary: int, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Check and pack the settings; ``ends`` are tokens that end an answer, or would if they were not ignored.

        Raises:
            ValueError: a token is not one of the model's, a word has too many tokens, or no token is left.
        """
        _check_tokens(params, vocabulary)
        words = list(_bad_words(params.bad_words or (), tokenizer))
        self._params = params
        self._shared = Sampling(
            **_numbers(params),
            biases=_biases(params, ends, words),
            mask=mask_of(vocabulary, params.allowed_token_ids, [word[0] for word in words if len(word) == 1]),
        )
        _check_left(params, self._shared.mask, ends, vocabulary)

    def samplings(self, prompt: NDArray[np.int64]) -> list[Sampling | None]:
        """Return the settings of each of the ``n`` answers to a prompt ``[T]``; None for the most likely token."""
        params, own = self._params, self._shared
        if params.repetition_penalty != 1:
            own = replace(own, seen=prompt)
        if own.temperature == 0:
            return [own if own.adjustments else None] * params.n
        seed = params.seed if params.seed not in (None, -1) else int(torch.randint(SEEDS, (), device="cpu"))
        return [replace(own, seed=(int(seed) + number) % SEEDS) for number in range(params.n)]


def _numbers(params: SamplingParams) -> dict[str, Any]:
    numbers = {name: type(field.default)(getattr(params, name)) for name, field in SAMPLED_BY.items()}
    numbers["top_k"] = max(0, numbers["top_k"])
    if numbers["temperature"]:
        numbers["temperature"] = min(max(numbers["temperature"], _COLDEST), _HOTTEST)
    return numbers


def _check_tokens(params: SamplingParams, vocabulary: int) -> None:
    for name in ("logit_bias", "allowed_token_ids", "logprob_token_ids"):
        largest = max(getattr(params, name) or (0,))
        if largest >= vocabulary:
            raise ValueError(f"{name}: token ids are from 0 to {vocabulary - 1}; got {largest}")


def _biases(params: SamplingParams, ends: Iterable[int], words: Iterable[tuple[int, ...]]) -> NDArray[np.int32]:
    values = params.logit_bias or {}
    biases = [Bias(word[-1], BARRED, after=word[:-1]) for word in words if len(word) > 1]
    if params.min_tokens and params.structured_outputs is None:  # whose grammar decides where an answer ends
        biases += [Bias(int(token), BARRED, 0, int(params.min_tokens)) for token in ends]
    if (count := len(values) + len(biases)) > MAX_BIASES:
        raise ValueError(
            f"logit_bias, bad_words and min_tokens: {count} biases, and there can be {MAX_BIASES}; give fewer "
            "words, or fewer stop_token_ids"
        )
    return packed_values(values, biases)


def _bad_words(words: Iterable[str], tokenizer: Any) -> Iterator[tuple[int, ...]]:
    """Yield the tokens that words are, at the beginning of a text and after a space, as vLLM does."""
    for word in words:
        if tokenizer is None:
            raise ValueError("bad_words: words need a tokenizer; give compiled_llm.Engine(model, tokenizer=tokenizer)")
        first, inside = (tokenizer.encode(before + word.lstrip(), add_special_tokens=False) for before in ("", " "))
        another = len(inside) == len(first) and inside[0] != first[0]
        for tokens in (first, inside) if another else (first,):
            if not 1 <= len(tokens) <= MAX_FOLLOWED + 1:
                raise ValueError(f"bad_words: {word!r} is {len(tokens)} tokens, and it can be {MAX_FOLLOWED + 1}")
            yield tuple(tokens)


def _check_left(params: SamplingParams, mask: NDArray[np.int32] | None, ends: frozenset[int], vocabulary: int) -> None:
    if mask is None:
        return
    left = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocabulary]
    if params.min_tokens:
        left[[token for token in ends if token < vocabulary]] = 0
    if not left.any():
        raise ValueError("allowed_token_ids, bad_words and min_tokens leave no token to choose; allow another one")
