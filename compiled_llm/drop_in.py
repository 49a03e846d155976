"""What a wrapped model does in place of HuggingFace's methods; the one module that overrides private ones of theirs.

| HuggingFace's | why | ends when |
| --- | --- | --- |
| ``GenerationMixin._sample`` | the greedy loop is ours | generate accepts a decoding method of the model's own |
| ``GenerationMixin._prepare_cache_for_generation`` | rows instead of tensors | a model can name its cache class |
"""

from __future__ import annotations

import functools
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer

from compiled_llm import generate as loop
from compiled_llm.attention import set_implementations
from compiled_llm.checks import check_fits, check_ids, check_prompt, check_ready, pages_needed
from compiled_llm.config import WrapConfig
from compiled_llm.interrupts import held
from compiled_llm.layers import Layer
from compiled_llm.paged_cache import PagedCache
from compiled_llm.runtime import CompiledModel
from compiled_llm.sampling import read_processors

_PAGED_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_KNOWN_INPUTS = frozenset({"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"})


class WrappedModel:
    """The methods that ``wrap`` puts in front of a model's own class.

    Attributes:
        compiled: everything else that wrapping adds.
    """

    compiled: CompiledModel

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """HuggingFace's ``generate``, checked first."""
        model = cast(PreTrainedModel, self)
        check_ready(model)
        input_ids = inputs if inputs is not None else kwargs.get("input_ids")
        if input_ids is not None:
            check_prompt(model, input_ids, kwargs.get("attention_mask"), kwargs.get("past_key_values") is not None)
        return super().generate(inputs, *args, **kwargs)  # type: ignore[misc]

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        model = cast(PreTrainedModel, self)
        reason = _original_path(model, generation_config, model_kwargs, generation_mode)
        if reason is not None:
            self.compiled.counters.took("original", reason)
        elif model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = self.compiled.new_cache()
            return None
        return super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, generation_mode, *args, **kwargs
        )

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> Any:
        cache = model_kwargs.get("past_key_values")
        own = super()._sample  # type: ignore[misc]
        huggingface = functools.partial(
            own, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer
        )
        if not isinstance(cache, PagedCache):
            return huggingface(**model_kwargs)
        model, runtime = cast(PreTrainedModel, self), self.compiled
        call = loop.Call(
            runtime,
            cache,
            input_ids,
            model_kwargs.get("attention_mask"),
            model_kwargs.get("position_ids"),
            logits_processor,
            stopping_criteria,
            generation_config,
            streamer,
        )
        reason = "synced_gpus" if synced_gpus else loop.obstacle(model, call)
        fresh = not cache.seen
        try:
            if reason is None:
                result = _own_loop_in_turn(model, call)
            else:
                if fresh:
                    check_fits(model, runtime.paged(), call.prompt_lengths, call.most_new)
                runtime.counters.took("compiled forward", reason)
                result = huggingface(**model_kwargs)
        except BaseException:
            if fresh:  # one that held a conversation stays the user's
                cache.close()
            raise
        if not call.returns_cache:
            cache.close()
        return result


def _own_loop_in_turn(model: PreTrainedModel, call: loop.Call) -> Any:
    """Run one of our loops once no other runs, and once there are pages for it."""
    paged, prompts = call.runtime.paged(), call.prompt_lengths
    needed = pages_needed(paged, prompts, call.most_new)
    with held(), call.runtime.turn.taken(fits=lambda: needed <= paged.pool.available):
        check_fits(model, paged, prompts, call.most_new)
        try:
            return _own_loop(call)
        finally:
            if not call.returns_cache:
                call.cache.close()  # before the next in the queue looks for pages


def _own_loop(call: loop.Call) -> Any:
    """Run the fast loop, or the one that lets processors see each step."""
    counters, do_sample = call.runtime.counters, bool(call.config.do_sample)
    if not do_sample and not call.processors and not call.wants_scores:
        counters.took("fast loop")
        return loop.fast_loop(call, [None] * len(call.input_ids))
    settings = None if call.wants_scores else read_processors(call.processors, do_sample, call.input_ids)
    if settings is None:
        names = sorted({type(processor).__name__ for processor in call.processors})
        counters.took("processed loop", "output_scores or output_logits" if call.wants_scores else ", ".join(names))
        return loop.processed_loop(call)
    counters.took("fast loop")
    return loop.fast_loop(call, settings)


def _forward(own: Any, self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the compiled forward where the cache is ours, else the class's own."""
    cache = kwargs.get("past_key_values")
    if not isinstance(cache, PagedCache):
        with self.compiled.attention.original():
            return own(self, *args, **kwargs)
    if args:
        kwargs["input_ids"], *rest = args
        if rest:
            raise TypeError("forward with a PagedCache takes input_ids and keyword arguments only")
    for name, value in kwargs.items():
        if name not in (*_KNOWN_INPUTS, "input_ids", "return_dict") and value is not None and value is not False:
            raise ValueError(
                f"forward with a PagedCache does not take {name}={type(value).__name__}; "
                "pass a DynamicCache, or none, to run the model's own forward"
            )
    check_ready(self)
    check_ids(kwargs.get("input_ids"))
    keep = kwargs.get("logits_to_keep")
    output = cache.forward(
        kwargs["input_ids"], kwargs.get("attention_mask"), kwargs.get("position_ids"), 0 if keep is None else keep
    )
    return output.to_tuple() if kwargs.get("return_dict") is False else output


def _original_path(
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    generation_mode: GenerationMode,
) -> str | None:
    """Return why this call has to run HuggingFace's loop over the original forward, or None."""
    cache, mask = model_kwargs.get("past_key_values"), model_kwargs.get("attention_mask")
    others = [name for name, value in model_kwargs.items() if name not in _KNOWN_INPUTS and value is not None]
    reasons = (
        (generation_mode not in _PAGED_MODES, f"{generation_mode.value}"),
        (cache is not None and not isinstance(cache, PagedCache), f"past_key_values={type(cache).__name__}"),
        (generation_config.use_cache is False, "use_cache=False"),
        (generation_config.cache_implementation is not None, "cache_implementation"),
        (bool(generation_config.output_attentions), "output_attentions"),
        (bool(generation_config.output_hidden_states), "output_hidden_states"),
        (bool(getattr(generation_config, "is_assistant", False)), "the model assists another one"),
        (bool(others), f"model inputs that pages do not cover ({', '.join(others)})"),
        (mask is not None and bool((mask[:, -1] == 0).any()), "right padding"),
        (torch.is_autocast_enabled(model.device.type), "autocast"),
    )
    return next((reason for holds, reason in reasons if holds), None)


def wrapped_class(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return the subclass of ``base`` that wrapped models have, always the same one.

    It carries the name of ``base``, so that whatever is written to a config names the model's own class.
    """
    if base not in _classes:

        @functools.wraps(base.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return _forward(base.forward, self, args, kwargs)

        def reduce_ex(self: Any, protocol: int) -> Any:
            state = {name: value for name, value in self.__dict__.items() if name != "compiled"}
            compiled = self.compiled
            return _blank, (base,), (state, compiled.layers, compiled.config, compiled.attention.own_implementations())

        def setstate(self: Any, payload: tuple[dict[str, Any], list[Layer], WrapConfig, list[str | None]]) -> None:
            state, layers, config, implementations = payload
            base.__setstate__(self, state)
            set_implementations(self, implementations)  # another thread's step may have been running
            self.compiled = CompiledModel(self, base.forward, layers, config)

        members = {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "forward": forward,
            "__reduce_ex__": reduce_ex,
            "__setstate__": setstate,
        }
        _classes[base] = cast(type[PreTrainedModel], type(base.__name__, (WrappedModel, base), members))
    return _classes[base]


def _blank(base: type[PreTrainedModel]) -> PreTrainedModel:
    """Return an empty wrapped model for unpickling and copying to fill."""
    cls = wrapped_class(base)
    return cls.__new__(cls)


_classes: WeakKeyDictionary[type[PreTrainedModel], type[PreTrainedModel]] = WeakKeyDictionary()
