"""The tokens that end an answer whose form is complete."""

from __future__ import annotations

from collections.abc import Iterable

from compiled_llm.engine.grammars.forms.grammar_source import check_installed


def ends_of(eos: frozenset[int], others: Iterable[int], vocabulary: int, tokenizer: object) -> frozenset[int]:
    """Check that grammars can be compiled, and return those tokens: ``eos``, else ``others``, else the tokenizer's own.

    Raises:
        ValueError: there is no tokenizer, or none of these tokens is below ``vocabulary``, the number of logits.
        GrammarsMissingError: xgrammar is missing.
    """
    check_installed()
    if tokenizer is None:
        raise ValueError(
            "structured_outputs: a form needs a tokenizer; give compiled_llm.Engine(model, tokenizer=tokenizer)"
        )
    own = getattr(tokenizer, "eos_token_id", None)
    found = eos or tuple(others) or ([] if own is None else [own])
    stops = frozenset(int(token) for token in found if token < vocabulary)
    if not stops:
        raise ValueError(
            "structured_outputs: no token ends an answer; set eos_token_id in model.generation_config, or give "
            "stop_token_ids"
        )
    return stops
