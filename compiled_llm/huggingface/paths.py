"""Which path a call of ``generate`` takes; loops run one at a time, once there are pages for all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from compiled_llm.compat import observer_of_operations
from compiled_llm.compilation.sampling import Sampling
from compiled_llm.execution.limits import check_fits
from compiled_llm.execution.slow_paths import Reason
from compiled_llm.execution.threads.interrupts import allowed, deferred
from compiled_llm.huggingface.call import Call, LoopArguments
from compiled_llm.huggingface.current_call import copies, took
from compiled_llm.huggingface.forward_obstacles import ignored_inputs
from compiled_llm.huggingface.generate import fast_loop, processed_loop
from compiled_llm.huggingface.handle import CompiledModel
from compiled_llm.huggingface.other_inputs import without_what_says_nothing
from compiled_llm.huggingface.paged_cache import PagedCache
from compiled_llm.huggingface.processors import read_processors

_PAGED_MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
    GenerationMode.ASSISTED_GENERATION,
)
_LOOPS_OF_HUGGINGFACE = {
    GenerationMode.BEAM_SEARCH: Reason("beam_search"),
    GenerationMode.BEAM_SAMPLE: Reason("beam_sample"),
    GenerationMode.ASSISTED_GENERATION: Reason("assisted_generation"),
}
_KNOWN_INPUTS = frozenset(
    {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "inputs_embeds"}
)


def original_path(
    runtime: CompiledModel,
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    generation_mode: GenerationMode,
) -> Reason | None:
    """Return why this call has to run HuggingFace's loop over the original forward, or None."""
    cache, mask = model_kwargs.get("past_key_values"), model_kwargs.get("attention_mask")
    known = _KNOWN_INPUTS | ignored_inputs(type(model).forward)
    given = without_what_says_nothing(model, model_kwargs, copies())
    others = [name for name, value in given.items() if name not in known and value is not None]
    caches = (None, "dynamic", getattr(model.generation_config, "cache_implementation", None))
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    speculation = getattr(generation_config, "speculation_type", None)
    observer, mixing = observer_of_operations(), runtime.modules.mixing(model)
    reasons = (
        (observer is not None, Reason("observed", observer or "")),
        (runtime.modules.hooked(model), Reason("inner_hooks")),
        (mixing is not None, Reason("mixed_tokens", mixing or "")),
        (generation_mode not in _PAGED_MODES, Reason("generation_mode", generation_mode.value)),
        (
            cache is not None and not isinstance(cache, PagedCache),
            Reason("past_key_values", type(cache).__name__),
        ),
        (generation_config.cache_implementation not in caches, Reason("cache_implementation")),
        (generation_config.output_attentions, Reason("output_attentions")),
        (generation_config.output_hidden_states, Reason("output_hidden_states")),
        (getattr(generation_config, "use_mtp", False), Reason("use_mtp")),
        (speculation == "dflash", Reason("speculation_type", "dflash")),
        (layers != len(runtime.facts.layers), Reason("draft_layers")),
        (others, Reason("model_inputs", ", ".join(others))),
        (mask is not None and bool((copies().of(mask)[:, -1] == 0).any()), Reason("right_padding")),
        (torch.is_autocast_enabled(model.device.type), Reason("autocast")),
    )
    return next((reason for holds, reason in reasons if holds), None)


def run_our_loop(call: Call) -> Any:
    """Run the fast loop, or the processed loop if a processor has to see each step."""
    with _alone(call, call.most_new, call.pages_needed()):
        sampling = _sampling_in_graph(call)
        if sampling is not None:
            took(call.runtime, "fast loop")
            return fast_loop(call, sampling)
        names = sorted({type(processor).__name__ for processor in call.processors})
        reason = Reason("scores") if call.wants_scores else Reason("processors", ", ".join(names))
        took(call.runtime, "processed loop", reason)
        return processed_loop(call)


def _sampling_in_graph(call: Call) -> Sequence[Sampling | None] | None:
    """Return how each row chooses its tokens inside the graph, or None if it cannot."""
    if call.wants_scores:
        return None
    if not call.processors and not call.config.do_sample:
        return [None] * len(call.input_ids)
    return read_processors(call.processors, bool(call.config.do_sample), call.input_ids)


def run_huggingfaces_loop(
    original: Callable[..., Any], arguments: LoopArguments, call: Call | None, reason: Reason | None = None
) -> Any:
    """Run a loop of HuggingFace's: over the compiled forward if the cache is ours.

    Args:
        original: HuggingFace's decoding method.
        arguments: what it takes.
        call: the call, if the cache is ours.
        reason: why it is not the fast loop; the generation mode if None.
    """
    if call is None:
        return arguments.run(original)
    needed = call.pages_needed_by_huggingface()
    with _alone(call, call.most_new + call.drafted, needed):
        took(call.runtime, "compiled forward", reason or _reason_of_mode(call.config))
        with call.cache.runner.promise.reserved(needed), call.runtime.loop_lock.yielded(), allowed():
            return arguments.run(original)


def _reason_of_mode(config: GenerationConfig) -> Reason:
    mode = config.get_generation_mode(None)
    return _LOOPS_OF_HUGGINGFACE.get(mode) or Reason("generation_mode", mode.value)


@contextmanager
def _alone(call: Call, most_new: int, needed: int) -> Iterator[None]:
    """Run a loop while no other one runs, and once there are pages for all that it may need.

    Args:
        call: the call; its cache gives its pages back at the end, unless it goes to the user.
        most_new: how many tokens the loop may store of each row.
        needed: how many pages it may take.

    Raises:
        ValueError: it does not fit the model, the batch size or the pages.
    """
    device_model, cache = call.device_model, call.cache
    fresh = not cache.seen
    try:
        with deferred(), call.runtime.loop_lock.taken(fits=lambda: needed <= device_model.pool.available):
            try:
                check_fits(device_model, call.lengths, most_new, needed)
                yield
            finally:
                if not call.returns_cache:
                    cache.close()  # before the next in the queue looks for pages
    except BaseException:
        if fresh:  # one that held a conversation stays the user's
            cache.close()
        raise
