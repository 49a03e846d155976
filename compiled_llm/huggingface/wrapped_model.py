"""A wrapped model's replacements of HuggingFace's methods; ``compat.huggingface`` says why for each private one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer

from compiled_llm.compat.cache_names import gives_cache, taking_old_names
from compiled_llm.compat.huggingface import is_huggingfaces, reads_chosen_implementations
from compiled_llm.compat.known_functions import caller_of_inside
from compiled_llm.compat.torch.dynamo import is_traced
from compiled_llm.compat.torch.module_calls import note_calls, stop_noting
from compiled_llm.config import WrapConfig
from compiled_llm.execution.limits import whole_limit
from compiled_llm.execution.reporting.slow_paths import Reason
from compiled_llm.features import Seam, needed
from compiled_llm.huggingface.batch.continuous_batching import manager_for
from compiled_llm.huggingface.cache.paged_cache import PagedCache
from compiled_llm.huggingface.cache_choice import CacheChoice
from compiled_llm.huggingface.call.call import LoopArguments, PagedCall, obstacle
from compiled_llm.huggingface.call.current_call import (
    GenerateCall,
    copies,
    current_call,
    goes_original,
    made,
    took,
)
from compiled_llm.huggingface.call.other_inputs import reader_of
from compiled_llm.huggingface.forward.forward import check_belongs, count_outside, run_forward, run_own_forward
from compiled_llm.huggingface.handle import CompiledModel
from compiled_llm.huggingface.inspection.model_obstacles import check_hooks_run, passed_over
from compiled_llm.huggingface.inspection.overrides import forget_restored_forward, own_forward
from compiled_llm.huggingface.inspection.signatures import MethodSignature
from compiled_llm.huggingface.paths import original_path, run_drafted_loop, run_huggingfaces_loop, run_our_loop
from compiled_llm.kinds.registry import let_layers_pack
from compiled_llm.model.classifiers import is_classifier
from compiled_llm.model.facts import Learnt, ModelFacts
from compiled_llm.model.inputs import check_prompt, check_ready, has_tokens
from compiled_llm.model.traced.stand_ins import Groups, stand_ins_for

if TYPE_CHECKING:
    from transformers import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
    from transformers.generation.continuous_batching.utils import WorkloadHints

    from compiled_llm.huggingface.handle import Wrapped


class WrappedModel:
    """The methods that take precedence over those of a model's own class."""

    compiled: CompiledModel

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call the model, by a forward of the user's if it has one, which need not call ours."""
        call, model = super().__call__, cast(PreTrainedModel, self)  # type: ignore[misc]
        if is_traced() or current_call.get() is not None:
            return call(*args, **kwargs)
        forget_restored_forward(model)
        if (own := own_forward(model)) is None:
            return call(*args, **kwargs)
        return run_own_forward(functools.partial(call, *args, **kwargs), self.compiled, own)

    def generate(self, inputs: Tensor | None = None, *args: object, **kwargs: object) -> object:
        """HuggingFace's ``generate``, checked first."""
        model = cast(PreTrainedModel, self)
        self.compiled.home.check()
        if kwargs.get("cache_implementation") != "paged":  # generate_batch, which calls eval()
            check_ready(self.compiled.facts.version)
        with self.compiled.calls.begun():
            self.compiled.runner_lifecycle.check_weights()
            forget_restored_forward(model)
            call = GenerateCall.inside(current_call.get(), custom=kwargs.get("custom_generate") is not None)
            input_ids = inputs if inputs is not None else kwargs.get("input_ids")
            if has_tokens(input_ids, kwargs.get("inputs_embeds")):
                read, mask = call.copies.of(input_ids), call.copies.of(kwargs.get("attention_mask"))
                check_prompt(model, read, mask, gives_cache(kwargs))
            token = current_call.set(call)
            try:
                result = super().generate(inputs, *args, **kwargs)  # type: ignore[misc]
                if kwargs.get("custom_generate") is not None and not call.paths:
                    took(self.compiled, "compiled forward", Reason("custom_generate"))
                return result
            finally:
                current_call.reset(token)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note_inner_call(self) -> None:
        """Count a call of the module inside, unless it is part of a forward of ours."""
        if reads_chosen_implementations():
            return
        caller = caller_of_inside(vars(self).get("forward"))
        name = f"model.{cast(PreTrainedModel, self).base_model_prefix}"
        count_outside(self.compiled, Reason("inner_module", name) if caller is None else Reason("fused_head", caller))

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _note_outer_compile(self) -> None:
        """Count a graph that a compiler of the user's makes of the model; Dynamo calls it as it traces."""
        count_outside(self.compiled, Reason("outer_compile"))

    @torch.no_grad()
    def init_continuous_batching(
        self,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: WorkloadHints | None = None,
    ) -> ContinuousBatchingManager:
        """Return a manager for ``generate_batch``, over the engine if that can serve the configs."""
        self.compiled.home.check()
        model, original = cast(PreTrainedModel, self), super().init_continuous_batching  # type: ignore[misc]
        forget_restored_forward(model)
        return manager_for(
            model, self.compiled, original, generation_config, continuous_batching_config, workload_hints
        )

    def _prepare_generation_config(self, generation_config: GenerationConfig | None, **kwargs: object) -> object:
        original = super()._prepare_generation_config  # type: ignore[misc]
        if not is_huggingfaces(original):  # it may read anything
            return original(generation_config, **kwargs)
        model = cast(Any, self)
        return self.compiled.prepared_configs.prepared(
            original, model.config, model.generation_config, generation_config, kwargs
        )

    def _prepare_special_tokens(
        self,
        generation_config: GenerationConfig,
        kwargs_has_attention_mask: bool | None = None,
        device: torch.device | str | None = None,
        batch_size: int | None = None,
    ) -> None:
        method = super()._prepare_special_tokens  # type: ignore[misc]
        original = functools.partial(method, generation_config, kwargs_has_attention_mask, device, batch_size)
        warns = kwargs_has_attention_mask is False and batch_size != 1  # of a missing mask
        if warns or not (is_huggingfaces(method) and isinstance(device, torch.device)):
            original()
        else:
            self.compiled.special_tokens.prepare(original, generation_config, device, copies())

    def _prepare_attention_mask_for_generation(
        self, inputs_tensor: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> object:
        original = super()._prepare_attention_mask_for_generation  # type: ignore[misc]
        pad, ids = generation_config.pad_token_id, inputs_tensor
        plain = is_huggingfaces(original) and ids.dim() == 2 and "input_ids" not in model_kwargs
        # A draft model is given no mask if its caller hides nothing of its prompt: a pad in an answer is a token.
        drafts = generation_config.is_assistant is True
        absent = pad is None or (type(pad) is int and not bool((copies().of(ids) == pad).any()))
        if not (plain and (drafts or absent)):
            return original(inputs_tensor, generation_config, model_kwargs)
        mask = torch.ones(ids.shape, dtype=torch.long, device=ids.device)
        copies().note(mask, torch.ones(ids.shape, dtype=torch.long, device="cpu"))
        return mask

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> object:
        original = super()._prepare_position_ids_for_generation  # type: ignore[misc]
        mask: Any = model_kwargs.get("attention_mask")
        plain = is_huggingfaces(original) and isinstance(mask, Tensor) and mask.dim() == 2
        if not (plain and bool((copies().of(mask) == 1).all())):
            return original(inputs_tensor, model_kwargs)
        positions = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
        host_copies = copies()
        host_copies.note(positions, torch.arange(mask.shape[1], device="cpu").expand(mask.shape))
        host_copies.counted = positions
        return positions

    def _maybe_prepare_encoder_kwargs_for_generation(
        self, inputs_tensor: Tensor, model_kwargs: dict[str, Any], *args: object, **kwargs: object
    ) -> object:
        original = super()._maybe_prepare_encoder_kwargs_for_generation  # type: ignore[misc]
        if is_huggingfaces(original) and (reader := reader_of(model_kwargs)) is not None:
            model_kwargs = reader.encoded(cast(PreTrainedModel, self), self.compiled, model_kwargs)
        return original(inputs_tensor, model_kwargs, *args, **kwargs)

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> object:
        model, argument = cast(PreTrainedModel, self), self.compiled.facts.generate_argument
        cache = model_kwargs.get(argument)
        if generation_config.use_cache is False and isinstance(cache, PagedCache):
            raise ValueError(f"generate: use_cache=False, and {argument} is a PagedCache; leave one of them out")
        rows = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        choice = CacheChoice(
            self.compiled,
            model,
            generation_config,
            model_kwargs,
            cache,
            generation_mode,
            rows,
            whole_limit(max_cache_length),
        )
        placement = self.compiled.placement()
        reason = original_path(choice, placement)
        if (theirs := reason or choice.prefill) is not None:
            check_hooks_run("generate", self.compiled.facts.hooks, theirs)
        if reason is not None and isinstance(cache, PagedCache):
            raise ValueError(
                f"generate: {reason}; that takes HuggingFace's own forward, which cannot use a PagedCache; pass a "
                f"DynamicCache as {argument}, or none"
            )
        self.compiled.counters.passed([] if reason is not None else passed_over(model, self.compiled.facts.version))
        if reason is not None:
            goes_original(self.compiled, reason)
        elif generation_config.use_cache is False:
            took(self.compiled, "compiled forward", Reason("use_cache"))
        elif cache is None and not choice.stands_in:
            model_kwargs[argument] = made(self.compiled.new_cache(placement))
            return None
        elif isinstance(cache, PagedCache):
            check_belongs(self.compiled, cache)
            cache.end_prefill()  # of an earlier call, which has not come to it
        result = super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        if reason is None and generation_config.use_cache is not False and choice.stands_in:
            model_kwargs[argument] = choice.stand_in()
        return result

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        **model_kwargs: object,
    ) -> object:
        arguments = LoopArguments(
            input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, streamer
        )
        call, reason = PagedCall.of(arguments, self.compiled, copies()), None
        if call is not None:
            reason = Reason("synced_gpus") if synced_gpus else obstacle(cast(PreTrainedModel, self), call)
            if reason is None:
                return run_our_loop(call)
        original = functools.partial(super()._sample, synced_gpus=synced_gpus, streamer=streamer)  # type: ignore[misc]
        return run_huggingfaces_loop(original, arguments, call, reason)

    def _beam_search(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **kwargs: object,
    ) -> object:
        arguments = LoopArguments(input_ids, logits_processor, stopping_criteria, generation_config, kwargs)
        call = PagedCall.of(arguments, self.compiled, copies())
        return run_huggingfaces_loop(super()._beam_search, arguments, call)  # type: ignore[misc]

    def _assisted_decoding(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: Tensor | None = None,  # named, or HuggingFace does not hand it over
        **kwargs: object,
    ) -> object:
        kwargs["inputs_tensor"] = inputs_tensor
        arguments = LoopArguments(input_ids, logits_processor, stopping_criteria, generation_config, kwargs)
        call = PagedCall.of(arguments, self.compiled, copies())
        if call is not None and not (kwargs.get("synced_gpus") or obstacle(cast(PreTrainedModel, self), call)):
            result = run_drafted_loop(call)
            if result is not None:
                return result
        return run_huggingfaces_loop(
            super()._assisted_decoding,  # type: ignore[misc]
            arguments,
            call,
            Reason("assisted_generation"),
        )


WrappedModel._sample.__signature__ = MethodSignature.of(WrappedModel._sample)  # type: ignore[attr-defined]


class ClassifiersPart(Protocol):
    """The part that runs classifiers."""

    def check(self, model: PreTrainedModel) -> None:
        """Raise UnsupportedModelError, or ValueError, if a classifier cannot be run."""
        ...

    def scoring_class(self, base: type[PreTrainedModel]) -> type[PreTrainedModel]:
        """Return a subclass of a classifier's class that programs run."""
        ...

    def classify(
        self, base: type[PreTrainedModel], self_: Wrapped, args: tuple[Any, ...], kwargs: dict[str, Any], /
    ) -> object:
        """Run a wrapped classifier's ``forward``."""
        ...

    def refuse_to_generate(self, model: PreTrainedModel, /, *args: object, **kwargs: object) -> NoReturn: ...


_CLASSIFIERS = Seam[ClassifiersPart]("pooling", "huggingface")


def wrapped_class(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return the subclass of ``base`` that wrapped models have, always the same one."""
    # It carries the name of ``base``, so that whatever is written to a config names the model's own class.
    if base not in _classes:
        run: Callable[..., object] = needed(_CLASSIFIERS).classify if is_classifier(base) else _run

        @functools.wraps(base.forward)
        def forward(self: Wrapped, *args: object, **kwargs: object) -> object:
            return run(base, self, args, kwargs)

        forward = taking_old_names(forward, base.forward)
        forward.__signature__ = MethodSignature.of(base.forward)  # type: ignore[attr-defined]

        def reduce_ex(self: Wrapped, protocol: int) -> object:
            state = {name: value for name, value in self.__dict__.items() if name != "compiled"}
            facts = self.compiled.facts
            return _blank, (base,), (state, facts.learnt, self.compiled.config, facts.groups_of_stand_ins)

        def setstate(self: Wrapped, payload: tuple[dict[str, Any], Learnt, WrapConfig, Groups]) -> None:
            state, learnt, config, groups = payload
            base.__setstate__(self, state)
            let_layers_pack(self)
            stand_ins = stand_ins_for(self, config.packed, groups)
            facts = ModelFacts.of(self, class_in_programs(self, base), *learnt, stand_ins=stand_ins)
            self.compiled = CompiledModel(facts, config)
            note_inner_calls(self)

        members = {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "forward": forward,
            **_generating(base),
            "__reduce_ex__": reduce_ex,
            "__setstate__": setstate,
        }
        wrapped = cast(type[PreTrainedModel], type(base.__name__, (WrappedModel, base), members))
        _classes.setdefault(base, wrapped)  # another thread may have been faster
    return _classes[base]


def _run(base: type[PreTrainedModel], self: Wrapped, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    return run_forward(base.forward, self, args, kwargs)


def _generating(base: Any) -> dict[str, Any]:
    """Return the methods of generation of a wrapped class."""
    if is_classifier(base):
        return {"generate": needed(_CLASSIFIERS).refuse_to_generate}
    prepare = base.prepare_inputs_for_generation

    @functools.wraps(prepare)
    def prepare_inputs_for_generation(self: Wrapped, *args: object, **kwargs: object) -> object:
        return base.prepare_inputs_for_generation(self, *args, **kwargs)  # it may be replaced

    prepare_inputs_for_generation = taking_old_names(prepare_inputs_for_generation, prepare)
    prepare_inputs_for_generation.__signature__ = MethodSignature.of(prepare)  # type: ignore[attr-defined]
    return {
        "generate": taking_old_names(WrappedModel.generate, base.generate),
        "prepare_inputs_for_generation": prepare_inputs_for_generation,
    }


def class_in_programs(model: PreTrainedModel, base: type[PreTrainedModel] | None = None) -> type[PreTrainedModel]:
    """Return the class whose forward programs run, of a model of class ``base``; its own if None."""
    base = base or type(model)
    if not is_classifier(base):
        return base
    classifiers = needed(_CLASSIFIERS)
    classifiers.check(model)
    return classifiers.scoring_class(base)


def note_inner_calls(model: PreTrainedModel) -> None:
    """Count calls of the module inside a wrapped model, which are HuggingFace's own."""
    if (inner := model.base_model) is not model:
        note_calls(inner, cast(Any, model)._note_inner_call)


def forget_inner_calls(model: PreTrainedModel) -> None:
    stop_noting(model.base_model)


def _blank(base: type[PreTrainedModel]) -> PreTrainedModel:
    """Return an empty wrapped model for unpickling and copying to fill."""
    cls = wrapped_class(base)
    return cls.__new__(cls)


_classes: WeakKeyDictionary[type[PreTrainedModel], type[PreTrainedModel]] = WeakKeyDictionary()
