"""``wrap`` and ``unwrap``."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
import transformers
from transformers import PreTrainedModel

from compiled_llm.compat.continuous_batching import forget_kept_manager, kept_manager
from compiled_llm.compat.huggingface import warn_if_newer
from compiled_llm.compat.torch.cudagraph_trees import prepare_cudagraph_trees
from compiled_llm.compilation.artifacts.artifacts import rows_in
from compiled_llm.config import WrapConfig
from compiled_llm.execution.lifecycle.runtime import runtime_of
from compiled_llm.execution.threads.busy_cores import warn_of_spinning
from compiled_llm.huggingface.batch.continuous_batching import EngineManager
from compiled_llm.huggingface.call.keywords import takes_fields_of
from compiled_llm.huggingface.handle import CompiledModel
from compiled_llm.huggingface.wrapped_model import (
    WrappedModel,
    class_in_programs,
    forget_inner_calls,
    note_inner_calls,
    wrapped_class,
)
from compiled_llm.kinds.registry import as_they_were, let_layers_pack
from compiled_llm.model.checks import check_attention, check_layers, check_model, check_placement, on_fastest_backend
from compiled_llm.model.facts import ModelFacts
from compiled_llm.model.layers.experts import experts_of
from compiled_llm.model.places import leading_to_explain
from compiled_llm.model.probes.layers_of import layers_of
from compiled_llm.model.probes.position_probe import default_positions
from compiled_llm.model.traced.shallow_copies import shallow_copy
from compiled_llm.model.traced.stand_ins import stand_ins_for
from compiled_llm.model.weights.foreign_weights import check_weights
from compiled_llm.model.weights.fused_weights import LinearRecorder
from compiled_llm.model.weights.invariance import check_invariance

ModelT = TypeVar("ModelT", bound=PreTrainedModel)


@takes_fields_of(WrapConfig)
def wrap(model: ModelT, **options: object) -> ModelT:
    """Make a HuggingFace causal language model run as one compiled graph over paged attention.

    Options are the fields of ``WrapConfig``, which says what each one does. For a model that is wrapped already, those
    that are given must be what they were, and ``wrap(model)`` returns it.

    Large allocations and compilation happen later: at the first call, or in ``model.compiled.warmup()``.

    Args:
        model: a decoder-only causal LM, whole on one CUDA device (16 bits, or float32 with ``backend="triton"``) or on
            the CPU. In training mode no module may act otherwise than in evaluation mode: dropouts are 0.
        options: the fields of ``WrapConfig``.

    Returns:
        The same object. Its class is now a subclass of its own class, and ``model.compiled`` holds all that was added.

    Raises:
        TypeError: ``model`` is no HuggingFace model, or an option does not exist.
        ValueError: an option is impossible or not what it was, or the model's state or placement does not allow it.
        UnsupportedModelError: a model of this kind cannot run over pages (a ValueError).
        RuntimeError: a tool that compilation needs is not installed.

    Examples:
        >>> model = compiled_llm.wrap(AutoModelForCausalLM.from_pretrained(name))  # doctest: +SKIP
        >>> model.generate(**inputs, max_new_tokens=200)  # doctest: +SKIP
    """
    config = WrapConfig.from_options(options)
    if isinstance(model, WrappedModel):
        model.compiled.home.check()
        if differing := model.compiled.config.differing(options):
            raise ValueError(
                f"wrap: the model is wrapped already, with {differing}; "
                "call compiled_llm.unwrap(model) before wrapping it with other options"
            )
        return model
    warn_if_newer(transformers.__version__, stacklevel=2)
    config = _with_usual_rows(config, options)
    checked = check_model(model)
    check_placement(checked, config)
    if checked.device.type == "cpu":
        warn_of_spinning(torch.get_num_threads())
    check_attention(checked, config)
    stand_ins = stand_ins_for(checked, config.packed)
    base = type(checked)
    run = class_in_programs(checked)
    tried = checked if stand_ins is None else stand_ins.standing_in(checked)
    tried = tried if run is base else shallow_copy(tried, run)
    check_weights(tried, config)
    if config.uses_trees_on(checked.device.type):
        prepare_cudagraph_trees()
    with leading_to_explain():
        recorder = LinearRecorder()
        layers = layers_of(tried, config.layer_functions, recorder)
    if stand_ins is not None:
        stand_ins.note(recorder.of_ours)
    config = on_fastest_backend(config, layers, checked)
    check_layers(checked, layers, config)
    if config.batch_invariant:
        check_invariance(checked, recorder, bool(experts_of(checked)), packed=stand_ins is not None)
    groups = recorder.groups(checked)
    positions = default_positions(tried)
    let_layers_pack(checked)
    try:
        facts = ModelFacts.of(checked, run, layers, groups, positions, stand_ins=stand_ins)
        runtime = CompiledModel(facts, config)
    except BaseException:  # artifacts may be of another model
        as_they_were(checked)
        raise
    checked.__class__ = wrapped_class(base)
    checked.compiled = runtime  # type: ignore[assignment]
    note_inner_calls(checked)
    return cast(ModelT, checked)


def _with_usual_rows(config: WrapConfig, options: Mapping[str, Any]) -> WrapConfig:
    """Return it with fewer rows if nobody has said how many, and the artifacts have room for fewer."""
    if config.artifacts is None or "max_batch_size" in options:
        return config
    return replace(config, max_batch_size=min(config.max_batch_size, rows_in(config.artifacts)))


def unwrap(model: ModelT) -> ModelT:
    """Give a wrapped model its own class again, and free its device memory; return any other model as it is.

    A model that PEFT has put around a wrapped one is returned, and goes on around that one, unwrapped. Caches that it
    handed out keep their pages until they are dropped. Fused weights get memory of their own again, one group of them
    after the other.
    """
    runtime = runtime_of(model)
    if runtime is not None and runtime.facts.model is not model:
        unwrap(runtime.facts.model)
    elif isinstance(model, WrappedModel):
        model.compiled.home.check()
        if isinstance(kept_manager(model), EngineManager):
            forget_kept_manager(model)
        if model.compiled.asleep:
            for engine in list(model.compiled.engines):
                engine.close()  # no call can wake it any more
        model.compiled.separate_weights()
        forget_inner_calls(model)
        _, model.__class__ = type(model).__bases__  # as ``wrapped_class`` put them
        del model.compiled
        as_they_were(model)
        gc.collect()  # cycles that tracing left behind refer to the buffers
    return model
