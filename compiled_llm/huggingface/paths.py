"""Chooses the path of a call of ``generate``; loops run one at a time, once there are pages for all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode
from transformers.utils.generic import ModelOutput

from compiled_llm.compat.cache_names import output_field
from compiled_llm.compilation.sampling.sampling import Sampling
from compiled_llm.execution.limits import check_fits
from compiled_llm.execution.reporting.slow_paths import Reason
from compiled_llm.execution.threads.interrupts import allowed, deferred
from compiled_llm.features import Seam, feature
from compiled_llm.huggingface.batch.joining import engine_to_join, run_in_engine
from compiled_llm.huggingface.cache.stand_in import StandIn
from compiled_llm.huggingface.cache_choice import CacheChoice
from compiled_llm.huggingface.call.call import LoopArguments, PagedCall
from compiled_llm.huggingface.call.current_call import took
from compiled_llm.huggingface.generate import Drafting, fast_loop
from compiled_llm.huggingface.inspection.model_obstacles import forward_reasons
from compiled_llm.huggingface.processed_loop import processed_loop
from compiled_llm.huggingface.processors.guidance import with_twins
from compiled_llm.huggingface.processors.output_room import check_room
from compiled_llm.huggingface.processors.processors import read_processors
from compiled_llm.kinds.support import refusal
from compiled_llm.model.facts import ModelFacts
from compiled_llm.model.version.model_version import Placement

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


def original_path(choice: CacheChoice, placement: Placement) -> Reason | None:
    """Return why this call has to run HuggingFace's loop over the original forward in this placement, or None."""
    reasons = forward_reasons(choice.model, choice.runtime.facts, placement)
    served = "output_hidden_states" if choice.config.output_hidden_states else None
    of_model = next((reason for reason in reasons if reason.id != served), None)
    return of_model or next(_reasons_of_call(choice, placement), None) or choice.obstacle() or _overridden(choice)


def _reasons_of_call(choice: CacheChoice, placement: Placement) -> Iterator[Reason]:
    facts, config = choice.runtime.facts, choice.config
    if choice.runtime.asleep:
        yield Reason("asleep")
    drafts = choice.mode is GenerationMode.ASSISTED_GENERATION
    if choice.mode not in _PAGED_MODES or (drafts and _cannot_crop(facts)):
        yield Reason("generation_mode", choice.mode.value)
    if config.output_attentions:
        yield Reason("output_attentions")
    # Steps of ours give neither those of HuggingFace's prefills, nor, as its chunks of them do, the last chunk's alone.
    apart = choice.prefill is not None or config.prefill_chunk_size is not None
    if config.output_hidden_states and (apart or facts.stacks_hidden_states):
        yield Reason("output_hidden_states")
    if getattr(config, "use_mtp", False):
        yield Reason("use_mtp")
    if getattr(config, "speculation_type", None) == "dflash":
        yield Reason("speculation_type", "dflash")
    if choice.model.config.get_text_config(decoder=True).num_hidden_layers != len(facts.layers):
        yield Reason("draft_layers")
    if torch.is_autocast_enabled(placement.device.type) and facts.autocast_matters():
        yield Reason("autocast")


def _cannot_crop(facts: ModelFacts) -> bool:
    """Whether rows cannot lose tokens, as HuggingFace's loop of drafts crops what it rejects."""
    return refusal(facts.kinds, "crop", "drafts") is not None or facts.sees_prompts_both_ways


def _overridden(choice: CacheChoice) -> Reason | None:
    """Return why pages cannot stand in for HuggingFace's cache: only HuggingFace's own functions can fill them."""
    names = choice.runtime.overrides.of(choice.model) if choice.stands_in else ()
    return Reason("overrides", ", ".join(names)) if names else None


class PromptLookupPart(Protocol):
    """The part that guesses tokens."""

    def drafting_of(self, call: PagedCall) -> Drafting | None:
        """Return what makes the rounds of a call, or None if HuggingFace's loop serves it."""
        ...

    def as_sampled(self, call: PagedCall) -> PagedCall: ...


_DRAFTS = Seam[PromptLookupPart]("drafts", "huggingface")


def run_drafted_loop(call: PagedCall) -> object:
    """Run the fast loop with the drafts that a call asks for; None if HuggingFace's loop is to run."""
    if (drafts := feature(_DRAFTS)) is None or (drafting := drafts.drafting_of(call)) is None:
        return None
    sampling = _sampling_in_graph(call)
    return None if sampling is None else run_our_loop(drafts.as_sampled(call), sampling, drafting)


def run_our_loop(
    call: PagedCall, sampling: Sequence[Sampling | None] | None = None, drafting: Drafting | None = None
) -> object:
    """Run the fast loop, or the processed loop if a processor has to see each step."""
    sequences = None  # a call that has left an engine goes on with its seeds and tokens
    engine_thread = engine_to_join(call)
    if engine_thread is not None and (sampling := sampling or _sampling_in_graph(call)) is not None:
        sequences = run_in_engine(engine_thread, call, sampling)
        if sequences.done:
            took(call.runtime, "engine")
            return sequences.finish()
    processors = call.processors
    call, twins = with_twins(call)
    needed = call.pages_needed() + (0 if twins is None else twins.pages_needed(call))
    with _alone(call, call.max_new, needed):
        waits = call.waits
        if call.prefilled_apart:
            with call.cache.generate_loop.promise.reserved(needed), call.runtime.loop_lock.yielded(), allowed():
                call = call.prefilled()
        sampling = sampling or _sampling_in_graph(call)
        if sampling is not None:
            check_room(call)
            took(call.runtime, "fast loop", waits)
            return _with_original(call, fast_loop(call, sampling, sequences, drafting))
        names = sorted({type(processor).__name__ for processor in processors})
        took(call.runtime, "processed loop", waits or Reason("processors", ", ".join(names)))
        return _with_original(call, processed_loop(call, twins))


def _with_original(call: PagedCall, result: object) -> object:
    """Return a result with HuggingFace's cache, filled, in place of the pages that stood in for it."""
    if not (isinstance(call.cache, StandIn) and call.cache.returned):
        return result
    original = call.cache.write_back()
    if isinstance(result, ModelOutput):
        result[output_field(type(result))] = original
    return result


def _sampling_in_graph(call: PagedCall) -> Sequence[Sampling | None] | None:
    """Return how each row is sampled inside the graph, or None if it cannot be."""
    if not call.processors and not call.config.do_sample:
        return [None] * len(call.input_ids)
    return read_processors(call)


def run_huggingfaces_loop(
    original: Callable[..., Any], arguments: LoopArguments, call: PagedCall | None, reason: Reason | None = None
) -> object:
    """Run HuggingFace's loop, over the compiled forward of ``call``, if any; ``reason``: why not the fast loop."""
    if call is None:
        return arguments.run(original)
    needed = call.pages_needed_by_huggingface()
    with _alone(call, call.max_new + call.drafted, needed):
        took(call.runtime, "compiled forward", call.waits or reason or _reason_of_mode(call.config))
        with call.cache.generate_loop.promise.reserved(needed), call.runtime.loop_lock.yielded(), allowed():
            result = arguments.run(original)
            call.cache.generate_loop.let_taps_report()
            return _with_original(call, result)


def _reason_of_mode(config: GenerationConfig) -> Reason:
    mode = config.get_generation_mode(None)
    return _LOOPS_OF_HUGGINGFACE.get(mode) or Reason("generation_mode", mode.value)


@contextmanager
def _alone(call: PagedCall, max_new: int, needed: int) -> Iterator[None]:
    """Run a loop while no other one runs, and once there are pages, states and slots for all its needs."""
    # The cache gives its pages back at the end, unless it goes to the user. The loop may store ``max_new`` tokens of
    # each row, and take ``needed`` pages. ValueError if it does not fit the model, the batch size or the pages.
    model_runner, cache, pool = call.model_runner, call.cache, call.model_runner.pool
    fresh = not cache.seen or (isinstance(cache, StandIn) and cache.original is not None)
    rows = min(len(call.input_ids), model_runner.max_batch_size)

    def fits() -> bool:
        """Whether there are pages, states and slots; a call that never fits does not wait for them."""
        slots = model_runner.state.slots.room_for(rows, rows if call.processors else 0)
        return slots and not pool.lacks(needed, rows)

    try:
        with deferred(), call.runtime.loop_lock.taken(fits):
            try:
                call.runtime.take_back(needed, rows, pool)
                check_fits(model_runner, call.lengths, max_new, needed, call.config.num_beams or 1)
                yield
            finally:
                model_runner.end_captures()
                if not call.returns_cache:
                    cache.close()  # before the next in the queue looks for pages
    except BaseException:
        if fresh:  # one that held a conversation stays the user's
            cache.close()
        raise
