"""HuggingFace's logits processors as settings of our sampling."""

# Shapes: B rows, T prompt columns, V vocabulary.

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation.logits_process import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from compiled_llm.compat.xgrammar import is_grammar
from compiled_llm.compilation.sampling.bias import BARRED, FORCED, LARGEST, Bias, packed
from compiled_llm.compilation.sampling.masks import all_tokens, mask_of
from compiled_llm.compilation.sampling.sampling import Sampling
from compiled_llm.huggingface.call.call import PagedCall
from compiled_llm.huggingface.inspection.host_copies import HostCopies
from compiled_llm.huggingface.processors.grammar import Grammar
from compiled_llm.model.sizes import logits_width
from compiled_llm_ops import MAX_BIASES, MAX_FOLLOWED

_WARPERS: tuple[type[LogitsProcessor], ...] = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
)
# The order in which HuggingFace applies them. Ours has the same results: what bars a token bars it at any place.
_ORDER: tuple[type[LogitsProcessor], ...] = (
    SequenceBiasLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    NoBadWordsLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    Grammar,
    *_WARPERS,
    LogitNormalization,  # changes what scores are called, and none of the choices
)
_NUMBERS = (RepetitionPenaltyLogitsProcessor, *_WARPERS)

_Found = Mapping[type[LogitsProcessor], Any]


class Prompts(NamedTuple):
    """The prompts that processors are read for."""

    ids: NDArray[np.int64]  # [B, T], padding included
    copies: HostCopies
    vocabulary: int
    scored: bool = False  # whether the caller gets each step's scores

    @property
    def width(self) -> int:
        return len(self.ids[0])


def read_processors(call: PagedCall) -> list[Sampling] | None:
    """Return each row's settings, seeds from torch's default generator; None if the graph lacks a processor."""
    vocabulary = logits_width(call.runtime.facts.model)
    scored = call.wants_scores("output_scores")
    prompts = Prompts(call.ids, call.copies, vocabulary, scored)
    do_sample = bool(call.config.do_sample)
    if (settings := samplings_of(call.processors, do_sample, prompts)) is None or not do_sample:
        return settings
    seeds = new_seeds(len(settings)).tolist()
    return [replace(own, seed=seed) for own, seed in zip(settings, seeds, strict=True)]


def samplings_of(processors: Iterable[LogitsProcessor], do_sample: bool, prompts: Prompts) -> list[Sampling] | None:
    """Return the settings of each row that processors stand for; None if the graph lacks one of them."""
    if (found := _by_kind(processors)) is None or (adjustments := _adjustments(found, prompts)) is None:
        return None
    seen = _seen(found.get(RepetitionPenaltyLogitsProcessor), prompts)
    settings = replace(_numbers(found, do_sample), **adjustments)
    tails = prompts.ids[:, -MAX_FOLLOWED:] if settings.followed else [seen[0][:0]] * len(seen)
    return [replace(settings, seen=tokens, tail=tail) for tokens, tail in zip(seen, tails, strict=True)]


def is_in_graph(processor: LogitsProcessor) -> bool:
    """Return whether the graph can do the work of a processor, at least together with some others."""
    return _is_a_number(processor) or _is_of_tokens(processor)


def _is_a_number(processor: LogitsProcessor) -> bool:
    """Whether the graph has the processor, and a single number is its setting."""
    return (
        type(processor) in _NUMBERS
        and getattr(processor, "min_tokens_to_keep", 1) == 1
        and getattr(processor, "filter_value", -math.inf) == -math.inf
    )


def new_seeds(rows: int) -> Tensor:
    """Return ``[rows]`` int64 from torch's default generator, so that ``torch.manual_seed`` decides all draws."""
    return torch.randint(2**62, (rows,), device="cpu")


def _by_kind(processors: Iterable[LogitsProcessor]) -> _Found | None:
    """Return processors by their class; None if the graph does not have one, or not in this order."""
    listed = list(processors)
    if not all(map(is_in_graph, listed)):
        return None
    ranks = [_ORDER.index(_kind(entry)) for entry in listed]
    return {_kind(entry): entry for entry in listed} if ranks == sorted(set(ranks)) else None


def _kind(processor: LogitsProcessor) -> type[LogitsProcessor]:
    return Grammar if is_grammar(processor) else type(processor)


def _is_of_tokens(processor: Any) -> bool:
    """Whether the graph has the processor, which names tokens, or sequences that are not too long."""
    if type(processor) in (SequenceBiasLogitsProcessor, NoBadWordsLogitsProcessor):
        return all(len(sequence) <= MAX_FOLLOWED + 1 for sequence in processor.sequence_bias)
    return _kind(processor) in _ORDER and type(processor) not in _NUMBERS


def _numbers(found: _Found, do_sample: bool) -> Sampling:
    def setting(kind: type[LogitsProcessor], name: str, default: float) -> float:
        return float(getattr(found[kind], name)) if kind in found else default

    return Sampling(
        temperature=setting(TemperatureLogitsWarper, "temperature", 1.0) if do_sample else 0.0,
        top_k=int(setting(TopKLogitsWarper, "top_k", 0)),
        top_p=setting(TopPLogitsWarper, "top_p", 1.0),
        min_p=setting(MinPLogitsWarper, "min_p", 0.0),
        repetition_penalty=setting(RepetitionPenaltyLogitsProcessor, "penalty", 1.0),
        cleaned=InfNanRemoveLogitsProcessor in found,
    )


def _seen(penalty: object, prompts: Prompts) -> list[NDArray[np.int64]]:
    """Return the prompt tokens of each row that HuggingFace's repetition penalty counts; None of it counts none."""
    if penalty is None:
        return [np.zeros(0, dtype=np.int64)] * len(prompts.ids)
    ignored = prompts.copies.of(getattr(penalty, "prompt_ignore_length", None))
    starts = np.broadcast_to(np.asarray(0 if ignored is None else ignored), len(prompts.ids))
    return [np.unique(row[start:]) for row, start in zip(prompts.ids, starts, strict=True)]


# ---- processors of tokens


def _adjustments(found: _Found, prompts: Prompts) -> dict[str, Any] | None:
    """Return the fields of ``Sampling`` that forbid, force and bias tokens; None if the graph cannot have them."""
    if set(found) <= set(_NUMBERS):
        return {}
    suppressed = _suppressed(found, prompts)
    biases = list(_biases(found, prompts))
    width = prompts.vocabulary
    ours = all(bias.token < width and (bias.value in (BARRED, FORCED) or abs(bias.value) <= LARGEST) for bias in biases)
    if not ours or len(biases) > MAX_BIASES or _order_decides(found, biases, suppressed):
        return None
    fields = {"biases": packed(biases), "mask": mask_of(width, banned=suppressed)}
    if Grammar not in found:
        return fields
    if any(bias.value == FORCED for bias in biases) or prompts.scored:
        return None  # it may bar what is forced; and it sees each step once
    return fields | {"mask": all_tokens(width) if fields["mask"] is None else fields["mask"], "deferred": True}


def _suppressed(found: _Found, prompts: Prompts) -> list[int]:
    suppressing = found.get(SuppressTokensLogitsProcessor)
    return [] if suppressing is None else _listed(suppressing.suppress_tokens, prompts)


def _biases(found: _Found, prompts: Prompts) -> Iterator[Bias]:
    """Yield the forbidden, forced and biased tokens of processors; steps count from the first new token."""
    width = prompts.width
    for kind in (SequenceBiasLogitsProcessor, NoBadWordsLogitsProcessor):
        if kind in found:
            for sequence, value in found[kind].sequence_bias.items():
                yield Bias(sequence[-1], float(value), after=tuple(sequence[:-1]))
    if (shortest := found.get(MinLengthLogitsProcessor)) is not None:
        yield from _barred(shortest.eos_token_id, prompts, shortest.min_length - width)
    if (fewest := found.get(MinNewTokensLengthLogitsProcessor)) is not None:
        skipped = fewest.prompt_length_to_skip - width
        yield from _barred(fewest.eos_token_id, prompts, skipped + fewest.min_new_tokens)
    if (begin := found.get(SuppressTokensAtBeginLogitsProcessor)) is not None and begin.begin_index >= width:
        step = begin.begin_index - width
        yield from _barred(begin.begin_suppress_tokens, prompts, step + 1, step)
    if (bos := found.get(ForcedBOSTokenLogitsProcessor)) is not None and (step := 1 - width) >= 0:
        yield Bias(bos.bos_token_id, FORCED, step, step + 1)  # after the first token, which embeddings are not
    if (eos := found.get(ForcedEOSTokenLogitsProcessor)) is not None and (step := eos.max_length - 1 - width) >= 0:
        yield from (Bias(token, FORCED, step, step + 1) for token in dict.fromkeys(_listed(eos.eos_token_id, prompts)))


def _barred(tokens: object, prompts: Prompts, end: int, first: int = 0) -> list[Bias]:
    return [Bias(token, BARRED, first, end) for token in _listed(tokens, prompts)] if end > first else []


def _listed(tokens: object, prompts: Prompts) -> list[int]:
    listed: list[int] = np.atleast_1d(np.asarray(prompts.copies.of(tokens))).tolist()
    return listed


def _order_decides(found: _Found, biases: list[Bias], suppressed: list[int]) -> bool:
    """Whether HuggingFace's order matters: a forced token is forbidden too, or penalised."""
    forced = [bias for bias in biases if bias.value == FORCED]
    barred = [*(bias for bias in biases if bias.value == BARRED), *(Bias(token, BARRED) for token in suppressed)]
    both = itertools.product(forced, barred)
    if any(one.token == other.token and _meet(one, other) for one, other in both):
        return True
    ends = {ForcedBOSTokenLogitsProcessor, ForcedEOSTokenLogitsProcessor}
    return len(forced) > 1 and (RepetitionPenaltyLogitsProcessor in found or ends <= set(found))


def _meet(one: Bias, other: Bias) -> bool:
    return one.first < other.end and other.first < one.end
