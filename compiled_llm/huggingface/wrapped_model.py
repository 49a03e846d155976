"""What a wrapped model does in place of HuggingFace's methods; the one module that overrides private ones of theirs.

| HuggingFace's | why | ends when |
| --- | --- | --- |
| ``GenerationMixin._sample`` | the loop is ours | generate accepts a decoding method of the model's own |
| ``._beam_search``, ``._assisted_decoding`` | pages go back at the end | a loop closes the cache it was given |
| ``._prepare_cache_for_generation`` | rows instead of tensors | a model can name its cache class |
| ``._prepare_generation_config`` | what takes long in it is kept | it deep-copies nothing |
| ``._prepare_special_tokens`` | they are uploaded once | the config keeps the tensors |
| ``._prepare_attention_mask_for_generation`` | the host knows the tokens | only 5.23 and later are supported |
| ``._prepare_position_ids_for_generation`` | the host knows the mask | the same: prompts may be on the host there |
| ``GenerationConfig._mask_length`` | how wide a mask of ones was (from 5.23) | the mask stays |
| ``Cache._is_user_defined`` | whose cache it is | generate says so |
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer

from compiled_llm.compilation.sampling import read_processors
from compiled_llm.config import WrapConfig
from compiled_llm.execution.limits import check_fits
from compiled_llm.execution.stats import Path
from compiled_llm.execution.threads.interrupts import allowed, held
from compiled_llm.huggingface import forward as over_pages
from compiled_llm.huggingface import generate as loop
from compiled_llm.huggingface.handle import CompiledModel
from compiled_llm.huggingface.host_copies import HostCopies
from compiled_llm.huggingface.paged_cache import PagedCache
from compiled_llm.huggingface.signatures import MethodSignature
from compiled_llm.kvcache.pool import OutOfPagesError
from compiled_llm.model.attention import set_implementations
from compiled_llm.model.checks import check_prompt, check_ready
from compiled_llm.model.facts import ModelFacts
from compiled_llm.model.fused_weights import Group
from compiled_llm.model.layer_probe import Layer

_PAGED_MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
    GenerationMode.ASSISTED_GENERATION,
)
_KNOWN_INPUTS = frozenset(
    {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "inputs_embeds"}
)


@dataclass(frozen=True)
class _Progress:
    """A call of ``generate`` in progress.

    Attributes:
        taken: the paths that it has taken, with the calls inside it; its forwards are not counted one by one.
        copies: what it has read of its inputs.
    """

    taken: list[Path]
    copies: HostCopies = field(default_factory=HostCopies)


_progress: ContextVar[_Progress | None] = ContextVar("progress", default=None)


def _copies() -> HostCopies:
    """Return what the call in progress has read of its inputs; nothing where a method of a loop is called by itself."""
    progress = _progress.get()
    return HostCopies() if progress is None else progress.copies


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
        outer = _progress.get()
        progress = _Progress([] if outer is None else outer.taken)
        input_ids = inputs if inputs is not None else kwargs.get("input_ids")
        if input_ids is not None:
            read, mask = progress.copies.of(input_ids), progress.copies.of(kwargs.get("attention_mask"))
            check_prompt(model, read, mask, kwargs.get("past_key_values") is not None)
        token = _progress.set(progress)
        try:
            result = super().generate(inputs, *args, **kwargs)  # type: ignore[misc]
            if kwargs.get("custom_generate") is not None and not progress.taken:
                self._took("compiled forward", "custom_generate")
            return result
        finally:
            _progress.reset(token)

    def _took(self, path: Path, reason: str | None = None) -> None:
        if (progress := _progress.get()) is not None:
            progress.taken.append(path)
        self.compiled.counters.took(path, reason)

    def _prepare_generation_config(self, generation_config: GenerationConfig | None, **kwargs: Any) -> Any:
        own = super()._prepare_generation_config  # type: ignore[misc]
        if not _is_huggingfaces(own):  # it may look at anything
            return own(generation_config, **kwargs)
        model = cast(Any, self)
        return self.compiled.settings.prepared(own, model.config, model.generation_config, generation_config, kwargs)

    def _prepare_special_tokens(
        self,
        generation_config: GenerationConfig,
        kwargs_has_attention_mask: bool | None = None,
        device: torch.device | str | None = None,
        batch_size: int | None = None,
    ) -> None:
        unbound = super()._prepare_special_tokens  # type: ignore[misc]
        own = functools.partial(unbound, generation_config, kwargs_has_attention_mask, device, batch_size)
        said = kwargs_has_attention_mask is False and batch_size != 1  # that a mask is missing
        if said or not (_is_huggingfaces(unbound) and isinstance(device, torch.device)):
            own()
        else:
            self.compiled.special_tokens.prepare(own, generation_config, device, _copies())

    def _prepare_attention_mask_for_generation(
        self, inputs_tensor: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> Any:
        own = super()._prepare_attention_mask_for_generation  # type: ignore[misc]
        pad, ids = generation_config.pad_token_id, inputs_tensor
        plain = _is_huggingfaces(own) and ids.dim() == 2 and "input_ids" not in model_kwargs
        absent = pad is None or (type(pad) is int and not bool((_copies().of(ids) == pad).any()))
        if not (plain and absent):
            return own(inputs_tensor, generation_config, model_kwargs)
        mask = torch.ones(ids.shape, dtype=torch.long, device=ids.device)
        _copies().note(mask, torch.ones(ids.shape, dtype=torch.long))
        return mask

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> Any:
        own = super()._prepare_position_ids_for_generation  # type: ignore[misc]
        mask: Any = model_kwargs.get("attention_mask")
        plain = _is_huggingfaces(own) and isinstance(mask, Tensor) and mask.dim() == 2
        if not (plain and bool((_copies().of(mask) == 1).all())):
            return own(inputs_tensor, model_kwargs)
        positions = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
        _copies().note(positions, torch.arange(mask.shape[1]).expand(mask.shape))
        return positions

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        model = cast(PreTrainedModel, self)
        cache = model_kwargs.get("past_key_values")
        reason = _original_path(model, generation_config, model_kwargs, generation_mode)
        if reason is not None and isinstance(cache, PagedCache):
            raise ValueError(
                f"generate: {reason} takes HuggingFace's own forward, which cannot use a PagedCache; pass a "
                "DynamicCache as past_key_values, or none"
            )
        if reason is not None:
            self._took("original", reason)
        elif generation_config.use_cache is False:
            self._took("compiled forward", "use_cache=False")
        elif cache is None:
            model_kwargs["past_key_values"] = self.compiled.new_cache()
            return None
        else:
            over_pages.check_belongs(self.compiled, cache)
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
        given = input_ids, logits_processor, stopping_criteria, generation_config
        call, reason = _call(self, *given, model_kwargs, streamer), None
        if call is not None:
            reason = "synced_gpus" if synced_gpus else loop.obstacle(cast(PreTrainedModel, self), call)
            if reason is None:
                return _own_loop_in_turn(self, call)
        own = functools.partial(super()._sample, synced_gpus=synced_gpus, streamer=streamer)  # type: ignore[misc]
        return _huggingfaces_loop(self, own, reason, *given, model_kwargs)

    def _beam_search(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **kwargs: Any,
    ) -> Any:
        own = super()._beam_search  # type: ignore[misc]
        return _huggingfaces_loop(
            self, own, None, input_ids, logits_processor, stopping_criteria, generation_config, kwargs
        )

    def _assisted_decoding(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: Tensor | None = None,  # named, or HuggingFace does not hand it over
        **kwargs: Any,
    ) -> Any:
        kwargs["inputs_tensor"] = inputs_tensor
        own = super()._assisted_decoding  # type: ignore[misc]
        return _huggingfaces_loop(
            self, own, None, input_ids, logits_processor, stopping_criteria, generation_config, kwargs
        )


WrappedModel._sample.__signature__ = MethodSignature.of(WrappedModel._sample)  # type: ignore[attr-defined]


def _is_huggingfaces(method: Any) -> bool:
    """Whether a bound method of the model's own class is the one that all models have."""
    function = method.__func__
    return function is vars(GenerationMixin).get(function.__name__)


def _huggingfaces_loop(
    wrapped: WrappedModel,
    own: Callable[..., Any],
    reason: str | None,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    kwargs: dict[str, Any],
) -> Any:
    """Run a loop of HuggingFace's; over the compiled forward if the cache is ours, which gives its pages back.

    Args:
        wrapped: the model.
        own: the loop.
        reason: why it is not the fast loop; the generation mode where None.
        input_ids: ``[B, T]``, and so on as ``own`` takes them.
        logits_processor: what changes logits.
        stopping_criteria: what ends rows.
        generation_config: everything else.
        kwargs: the rest, model inputs included.
    """
    run = functools.partial(
        own,
        input_ids,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        generation_config=generation_config,
        **kwargs,
    )
    call = _call(wrapped, input_ids, logits_processor, stopping_criteria, generation_config, kwargs, None)
    if call is None:
        return run()
    runtime, needed = call.runtime, call.pages_needed_by_huggingface()

    def run_in_turn() -> Any:
        wrapped._took("compiled forward", reason or generation_config.get_generation_mode(None).value)
        with call.cache.runner.promise.held(needed), runtime.turn.yielded(), allowed():
            return run()

    return _in_turn(wrapped, call, run_in_turn, call.most_new + call.drafted, needed)


def _call(
    wrapped: WrappedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    kwargs: dict[str, Any],
    streamer: BaseStreamer | None,
) -> loop.Call | None:
    """Return what HuggingFace hands to a decoding method, if the cache is ours."""
    cache = kwargs.get("past_key_values")
    if not isinstance(cache, PagedCache):
        return None
    given = logits_processor, stopping_criteria, generation_config, streamer
    return loop.Call.of(wrapped.compiled, cache, _copies(), input_ids, kwargs, *given)


def _own_loop_in_turn(wrapped: WrappedModel, call: loop.Call) -> Any:
    """Run one of our loops once no other runs."""
    run = functools.partial(_own_loop, wrapped, call)
    return _in_turn(wrapped, call, run, call.most_new, call.pages_needed())


def _in_turn(wrapped: WrappedModel, call: loop.Call, run: Callable[[], Any], most_new: int, needed: int) -> Any:
    """Run a loop once no other runs, and once there are pages for all that it may need.

    Args:
        wrapped: the model.
        call: the call.
        run: the loop.
        most_new: how many tokens it may store of each row.
        needed: how many pages it may take.

    Raises:
        ValueError: it does not fit the model, the batch size or the pages.
    """
    model, paged, cache = cast(PreTrainedModel, wrapped), call.paged, call.cache
    fresh = not cache.seen
    try:
        with held(), call.runtime.turn.taken(fits=lambda: needed <= paged.pool.available):
            try:
                check_fits(model, paged, call.lengths, most_new, needed)
                return run()
            finally:
                if not call.returns_cache:
                    cache.close()  # before the next in the queue looks for pages
    except BaseException:
        if fresh:  # one that held a conversation stays the user's
            cache.close()
        raise


def _own_loop(wrapped: WrappedModel, call: loop.Call) -> Any:
    """Run the fast loop, or the one that lets processors see each step."""
    do_sample = bool(call.config.do_sample)
    if not do_sample and not call.processors and not call.wants_scores:
        wrapped._took("fast loop")
        return loop.fast_loop(call, [None] * len(call.input_ids))
    settings = None if call.wants_scores else read_processors(call.processors, do_sample, call.input_ids)
    if settings is None:
        names = sorted({type(processor).__name__ for processor in call.processors})
        wrapped._took("processed loop", "output_scores or output_logits" if call.wants_scores else ", ".join(names))
        return loop.processed_loop(call)
    wrapped._took("fast loop")
    return loop.fast_loop(call, settings)


def _forward(own: Any, self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the compiled forward where it can be, else the class's own."""
    if torch.compiler.is_compiling():  # the user's own torch.compile or torch.export
        return own(self, *args, **kwargs)
    given, runtime = over_pages.named(own, args, kwargs), self.compiled
    counted, cache = _progress.get() is None, given.get("past_key_values")
    reason = over_pages.obstacle(own, self, given)
    if isinstance(cache, PagedCache):
        if reason is not None:
            raise ValueError(
                f"forward with a PagedCache: {reason} takes HuggingFace's own forward; pass a DynamicCache, or none"
            )
        if counted:  # a call of generate goes on as it began
            over_pages.check_belongs(runtime, cache)
    elif reason is None:
        reason = over_pages.fitting(runtime, given)
    if reason is None:
        try:
            output = over_pages.compiled(own, runtime, given)
        except OutOfPagesError:
            if cache is not None:
                raise
            reason = "more tokens than pages are free"  # other threads took them since
        else:
            if counted:
                runtime.counters.took_forward("compiled")
            return output
    if counted:
        runtime.counters.took_forward("original", reason)
    with runtime.facts.attention.original():
        return own(self, *args, **kwargs)


def _original_path(
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    generation_mode: GenerationMode,
) -> str | None:
    """Return why this call has to run HuggingFace's loop over the original forward, or None."""
    cache, mask = model_kwargs.get("past_key_values"), model_kwargs.get("attention_mask")
    known = _KNOWN_INPUTS | over_pages.ignored(type(model).forward)
    others = [name for name, value in model_kwargs.items() if name not in known and value is not None]
    caches = (None, "dynamic", getattr(model.generation_config, "cache_implementation", None))
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    reasons = (
        (generation_mode not in _PAGED_MODES, f"{generation_mode.value}"),
        (cache is not None and not isinstance(cache, PagedCache), f"past_key_values={type(cache).__name__}"),
        (generation_config.cache_implementation not in caches, "cache_implementation"),
        (bool(generation_config.output_attentions), "output_attentions"),
        (bool(generation_config.output_hidden_states), "output_hidden_states"),
        (bool(getattr(generation_config, "use_mtp", False)), "use_mtp"),
        (getattr(generation_config, "speculation_type", None) == "dflash", "speculation_type='dflash'"),
        (layers != len(cast(WrappedModel, model).compiled.facts.layers), "drafting with some of the layers"),
        (bool(others), f"model inputs that pages do not cover ({', '.join(others)})"),
        (mask is not None and bool((_copies().of(mask)[:, -1] == 0).any()), "right padding"),
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

        forward.__signature__ = MethodSignature.of(base.forward)  # type: ignore[attr-defined]

        prepare: Any = base.prepare_inputs_for_generation  # type: ignore[attr-defined]

        @functools.wraps(prepare)
        def prepare_inputs_for_generation(self: Any, *args: Any, **kwargs: Any) -> Any:
            return prepare(self, *args, **kwargs)

        prepare_inputs_for_generation.__signature__ = MethodSignature.of(prepare)  # type: ignore[attr-defined]

        def reduce_ex(self: Any, protocol: int) -> Any:
            state = {name: value for name, value in self.__dict__.items() if name != "compiled"}
            facts = self.compiled.facts
            known = facts.layers, facts.fused_groups, self.compiled.config
            return _blank, (base,), (state, known, facts.attention.own_implementations())

        def setstate(
            self: Any,
            payload: tuple[dict[str, Any], tuple[Sequence[Layer], Sequence[Group], WrapConfig], list[str | None]],
        ) -> None:
            state, (layers, fused_groups, config), implementations = payload
            base.__setstate__(self, state)
            set_implementations(self, implementations)  # another thread's step may have been running
            self.compiled = CompiledModel(ModelFacts.of(self, base.forward, layers, fused_groups), config)

        members = {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "forward": forward,
            "prepare_inputs_for_generation": prepare_inputs_for_generation,
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
