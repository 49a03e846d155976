"""The constraints on the answers to one prompt, from ``SamplingParams``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from compiled_llm.engine.steps.constraint import Constraint, Processor
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.requests.structured_outputs.grammar_source import check_installed


def constraints_for(
    params: SamplingParams, eos: frozenset[int], vocabulary: int, tokenizer: Any
) -> list[Constraint | None]:
    """Return the constraint of each of the ``n`` answers; None for none.

    Args:
        params: the user's.
        eos: the model's end-of-sequence tokens.
        vocabulary: how many logits a token has.
        tokenizer: whose tokens grammars are about; None if there is none.

    Raises:
        ValueError: there is no tokenizer, or no token that would end an answer.
        RuntimeError: xgrammar is missing.
    """
    if (form := params.structured_outputs) is not None:
        check_tokenizer(tokenizer)
    source = None if form is None else form.source
    if source is None and not params.logits_processors:
        return [None] * params.n
    return [
        Constraint(
            source=source,
            stops=frozenset() if source is None else stops_of(eos, params.stop_token_ids or (), vocabulary, tokenizer),
            stop_token_ids=frozenset(token for token in (*eos, *(params.stop_token_ids or ())) if token < vocabulary),
            least=params.min_tokens,
            vocabulary=vocabulary,
            processors=tuple(map(Processor.of, params.logits_processors or ())),
        )
        for _ in range(params.n)
    ]


def check_tokenizer(tokenizer: Any) -> None:
    """Check that grammars can be compiled: ValueError without a tokenizer, RuntimeError without xgrammar."""
    check_installed()
    if tokenizer is None:
        raise ValueError(
            "structured_outputs: a form needs a tokenizer; give compiled_llm.Engine(model, tokenizer=tokenizer)"
        )


def stops_of(eos: frozenset[int], others: Iterable[int], vocabulary: int, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer whose form is complete: ``eos``, else ``others``, else the tokenizer's own.

    Raises:
        ValueError: there is none below ``vocabulary``.
    """
    own = getattr(tokenizer, "eos_token_id", None)
    found = eos or tuple(others) or ([] if own is None else [own])
    stops = frozenset(int(token) for token in found if token < vocabulary)
    if not stops:
        raise ValueError(
            "structured_outputs: no token ends an answer; set eos_token_id in model.generation_config, or give "
            "stop_token_ids"
        )
    return stops
