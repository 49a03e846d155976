"""The options of an engine, checked before it is made."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, Literal, get_args

from compiled_llm.kinds.support import FoundKind, refusal

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
"""Of what the model says, or of what tokens are drawn from: after penalties, biases, masks, temperature and filters."""


def check_options(
    max_num_seqs: object,
    max_model_len: object,
    max_step_ms: object,
    max_queue: object,
    logprobs_mode: object,
    grammar_timeout: object,
    mixed: object,
) -> None:
    """Raise ValueError if an option of an ``Engine`` is impossible."""
    if not is_count(max_num_seqs):
        raise ValueError(f"max_num_seqs={max_num_seqs!r}: give 1 or more")
    if max_model_len is not None and not is_count(max_model_len):
        raise ValueError(f"max_model_len={max_model_len!r}: give 1 or more, or None for the model's positions")
    if max_step_ms is not None and not is_positive(max_step_ms):
        raise ValueError(f"max_step_ms={max_step_ms!r}: give milliseconds above 0, or None for no limit")
    if max_queue is not None and not is_count(max_queue):
        raise ValueError(f"max_queue={max_queue!r}: give 1 or more, or None for no limit")
    if logprobs_mode not in get_args(LogprobsMode):
        raise ValueError(f"logprobs_mode={logprobs_mode!r}: give one of {', '.join(get_args(LogprobsMode))}")
    if mixed != "auto" and not isinstance(mixed, bool):
        raise ValueError(f'mixed={mixed!r}: give True, False or "auto"')
    if not is_positive(grammar_timeout):
        raise ValueError(f"grammar_timeout={grammar_timeout!r}: give seconds above 0")


def check_can_mix(max_num_seqs: int, prefill_tokens: int, batch_invariant: bool, kinds: Sequence[FoundKind]) -> None:
    """Raise ValueError if no step could ever be mixed; modes and backends do not matter: rows are a prefill's."""
    if batch_invariant:
        raise ValueError(
            "mixed=True with a model that is wrapped with batch_invariant=True: running requests and prompts have "
            "steps of their own there; leave mixed out"
        )
    if (refused := refusal(kinds, "mixed", "mixed=True")) is not None:
        raise ValueError(refused)
    if max_num_seqs < 2:
        raise ValueError(
            f"mixed=True with max_num_seqs={max_num_seqs}: a mixed step has a prompt and a request that runs; give "
            "max_num_seqs=2 or more, or leave mixed out"
        )
    if prefill_tokens < 2:
        raise ValueError(
            f"mixed=True with prefill_tokens={prefill_tokens}: a mixed step has at least 2 tokens, one of a request "
            "that runs and one of a prompt; wrap with prefill_tokens=2 or more, or leave mixed out"
        )


def is_count(value: Any) -> bool:
    """Whether a value is a whole number above 0."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def is_positive(value: Any) -> bool:
    """Whether a value is a number above 0."""
    return isinstance(value, Real) and float(value) > 0
