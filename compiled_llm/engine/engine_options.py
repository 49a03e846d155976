"""The options of an engine, checked before it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, get_args

from compiled_llm.engine.admission.policies import POLICIES
from compiled_llm.engine.loop_settings import LogprobsMode
from compiled_llm.engine.parts import DRAFTS
from compiled_llm.features import check_has, needed
from compiled_llm.kinds.support import FoundKind, refusal
from compiled_llm.model.sizes import max_positions_of

if TYPE_CHECKING:
    from compiled_llm.execution.lifecycle.runtime import Runtime


def check_options(options: Mapping[str, Any]) -> None:
    """Check options of an ``Engine``; ValueError if one is impossible."""
    for name, (holds, must) in _RULES.items():
        if not holds(options[name]):
            raise ValueError(f"{name}={options[name]!r}: give {must}")


def speculation_of(given: Mapping[str, Any] | None, runtime: Runtime, max_num_seqs: int) -> Any:
    """Return the ``SpeculativeConfig`` of an option, None for None; ValueError if it, or the model, does not fit."""
    if given is None:
        return None
    check_has("drafts", "speculative_config")
    part = needed(DRAFTS)
    speculation = part.config_of(given)
    part.check_model(runtime.config.backend, runtime.config.batch_invariant, runtime.facts.kinds)
    part.check_memory(runtime, max_num_seqs)
    return speculation


def check_fits(runtime: Runtime, max_num_seqs: int, max_model_len: int | None, mixed: Any) -> None:
    """Check options of an ``Engine`` against its model; ValueError if one does not fit."""
    model, config = runtime.facts.model, runtime.config
    if max_model_len is not None and max_model_len > (positions := max_positions_of(model)):
        raise ValueError(f"max_model_len={max_model_len}: exceeds the model's {positions} positions")
    if mixed is True:
        _check_can_mix(max_num_seqs, config.prefill_tokens, config.batch_invariant, runtime.facts.kinds)


def _check_can_mix(max_num_seqs: int, prefill_tokens: int, batch_invariant: bool, kinds: Sequence[FoundKind]) -> None:
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


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_num_seqs": (is_count, "1 or more"),
    "max_model_len": (lambda value: value is None or is_count(value), "1 or more, or None for the model's positions"),
    "max_step_ms": (
        lambda value: value in (None, "auto") or is_positive(value),
        'milliseconds above 0, "auto", or None for no limit',
    ),
    "max_queue": (lambda value: value is None or is_count(value), "1 or more, or None for no limit"),
    "logprobs_mode": (get_args(LogprobsMode).__contains__, f"one of {', '.join(get_args(LogprobsMode))}"),
    "mixed": (lambda value: value == "auto" or isinstance(value, bool), 'True, False or "auto"'),
    "admission": (lambda value: isinstance(value, str) and value in POLICIES, f"one of {', '.join(POLICIES)}"),
    "grammar_timeout": (is_positive, "seconds above 0"),
    "mm_encoder_cache_gb": (lambda value: is_positive(value) or value == 0, "GiB, 0 for none"),
}
"""For each option, whether a value is one, and what an error tells the user to give."""
