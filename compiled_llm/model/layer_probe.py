"""Learns each attention layer's geometry by watching one fake forward."""

# Configs of different families spell geometry in different ways, and some models never reach the attention interface at
# all. So nothing is concluded from the config: the model runs once on fake tensors (no memory, no arithmetic), and
# every call that reaches our attention function is recorded.

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from compiled_llm.compat.cache_names import cache_argument
from compiled_llm.compat.huggingface import experts_implementation, set_experts_implementation, state_beside_keys
from compiled_llm.compat.torch.tensors import fake_tensors, has_unknown_sizes
from compiled_llm.kinds.kind import Layer, LayerFunctions, SeenCall, attended_like
from compiled_llm.kinds.no_keys import WITHOUT_ATTENTION
from compiled_llm.kinds.refusals import UnsupportedModelError
from compiled_llm.kinds.registry import (
    check_kinds,
    kind_of,
    let_layers_compute_on_fakes,
    packing,
    state_probe,
    trial_inputs,
)
from compiled_llm.kinds.spec import StateSpec
from compiled_llm.model.places import line_of_model, stack_of
from compiled_llm.model.restore import attributes_restored, data_restored, restored

# Sent to attention functions by some families and without effect on what the packed, paged form computes.
_HARMLESS = frozenset({"position_ids", "is_causal", "logits_to_keep"})
_TOKENS = 4  # how many a trial forward runs on


class UnpagedCallError(RuntimeError):
    """Our attention function was called without a batch."""


class LayerProbe:
    """A probe that takes the batch's place and records each attention layer that calls."""

    def __init__(self, functions: LayerFunctions, marks_prompts: bool = False) -> None:
        """``marks_prompts``: whether the model is told which tokens are of a prompt, which may see each other."""
        self.layers: dict[int, Layer] = {}
        self._functions = functions
        self._marks_prompts = marks_prompts

    def visit(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        sliding_window: int | None,
        softcap: float | None,
        others: Mapping[str, Any],
        sinks: bool = False,
    ) -> tuple[Tensor, None]:
        """Record a layer and answer with an output of the right shape."""
        name = type(module).__name__
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or index in self.layers:
            raise UnsupportedModelError(f"{name} has layer_idx={index!r}; each attention layer needs one of its own")
        kind = kind_of(SeenCall(module, index, query, key, value, others, sinks, self._functions))
        if attention_mask is not None and not kind.reads_mask:
            raise UnsupportedModelError(f"{name} builds an attention mask of its own; paged attention cannot honour it")
        if key.shape[-1] != query.shape[-1]:
            raise UnsupportedModelError(
                f"{name} has query heads of size {query.shape[-1]} and key heads of size {key.shape[-1]}; paged "
                "attention multiplies one by the other"
            )
        if key.shape[2] != query.shape[2] or value.shape[2] != query.shape[2]:
            raise UnsupportedModelError(
                f"{name} attends over {key.shape[2]} keys for {query.shape[2]} tokens; pages hold one key a token"
            )
        causal = others.get("is_causal") is not False and getattr(module, "is_causal", True) is not False
        if not causal and not self._marks_prompts:
            raise UnsupportedModelError(f"{name} is not causal; only decoder-only causal LMs can be wrapped")
        for argument, given in others.items():
            if isinstance(given, Tensor) and argument not in _HARMLESS | kind.arguments:
                raise UnsupportedModelError(
                    f"{name} passes {argument!r} to its attention, which paged attention lacks; a variant can read "
                    "tensors by query, head and position (compiled_llm_ops.register_variant, wrap(variants=...))"
                )
        self.layers[index] = Layer(
            query_heads=query.shape[1],
            kv_heads=key.shape[1],
            head_dim=query.shape[-1],
            window_left=-1 if sliding_window is None else int(sliding_window) - 1,
            logits_soft_cap=float(softcap or 0.0),
            kind=kind,
            causal=causal,
        )
        return attended_like(query, value), None


def probe_layers(
    model: PreTrainedModel, batch_argument: str, fake: bool = True, functions: LayerFunctions = MappingProxyType({})
) -> list[Layer]:
    """Return the layers of a model whose attention implementation is ours at the moment."""
    # ``fake`` tensors have no memory: a forward that looks at numbers does not take them. UnsupportedModelError if a
    # layer's attention does not reach our function or needs more than pages can do, or its states are not known.
    check_kinds(model, functions)
    probe = LayerProbe(functions, _marks_prompts(model))
    states = _watch(model, fake, batch_argument, probe)
    expected = model.config.get_text_config(decoder=True).num_hidden_layers
    return _in_order(type(model).__name__, probe.layers, states, expected)


def _watch(
    model: PreTrainedModel, fake: bool, batch_argument: str, probe: LayerProbe
) -> Mapping[int, tuple[StateSpec, ...]]:
    """Run a trial forward that ``probe`` watches; return the states of layers that have some."""
    name, make, noted = type(model).__name__, state_probe(model, _TOKENS), list[Any]()
    if make is None:
        _check_states(model)

    def inputs() -> dict[str, Any]:
        if make is None:
            return {batch_argument: probe}
        noted.append(make())
        return {batch_argument: probe, cache_argument(type(model).forward): noted[0]}

    try:
        with packing(model):
            trial_forward(model, fake, inputs)
    except UnsupportedModelError:
        raise
    except UnpagedCallError as error:
        raise UnsupportedModelError(
            f"{name} does not hand keyword arguments of its forward on to its attention, so the page table cannot "
            "reach it; it stays usable unwrapped",
            error,
        ) from None
    except Exception as error:
        raise UnsupportedModelError(_untraceable(name, error), error) from None
    return noted[0].specs if noted else {}


def _in_order(
    name: str, attending: Mapping[int, Layer], states: Mapping[int, tuple[StateSpec, ...]], expected: int
) -> list[Layer]:
    """Return all of so many layers; UnsupportedModelError if some may attend without our function."""
    # Beside layers with states, those that do not attend may keep nothing. But if none attends, each has to have
    # states: attention may have gone by unseen.
    layers = dict(attending)
    if states and (attending or len(states) == expected):
        layers = dict.fromkeys(range(expected), WITHOUT_ATTENTION) | layers
    if sorted(layers) != list(range(expected)):
        raise UnsupportedModelError(
            f"{name} has {expected} layer{'s' * (expected != 1)}, of which {len(layers) or 'none'} reach the attention "
            "interface of transformers (AttentionInterface); the others would silently run without pages. Models with "
            "attention of their own (Falcon, BLOOM, MPT, ...) cannot be wrapped"
        )
    return [layers[number]._replace(states=states.get(number, ())) for number in range(expected)]


def _check_states(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError if layers that attend keep more than keys and values, which nothing else shows."""
    if (found := state_beside_keys(model.config)) is not None:
        number, kind = found
        raise UnsupportedModelError(
            f"{type(model).__name__}: attention layer {number} keeps a {kind} in HuggingFace's cache: besides keys and "
            "values a state of its row, as that of a short convolution, which pages do not hold; it stays usable "
            "unwrapped"
        )


def _marks_prompts(model: PreTrainedModel) -> bool:
    """Whether types of tokens tell a model that sees images which of them are of the prompt."""
    return "image" in model.input_modalities and "token_type_ids" in inspect.signature(type(model).forward).parameters


def _untraceable(name: str, error: Exception) -> str:
    """Return why a trial forward of a class has failed."""
    reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if has_unknown_sizes(error):
        place = line_of_model(stack_of(error.__traceback__))
        reason = f"sizes depend on numbers that only the device knows, at {place}: `{place.source}`"
    return f"{name} cannot be traced with packed tokens, and stays usable unwrapped ({reason})"


def trial_forward(
    model: PreTrainedModel, fake: bool, made: Callable[[], Mapping[str, Any]] = dict, **inputs: object
) -> None:
    """Run a forward on a few tokens, ``fake`` (without memory) or not; all that it stores in the model is removed."""
    with _on_fakes(model) if fake else restored(model), torch.inference_mode(False), torch.no_grad():
        ids = torch.zeros((1, _TOKENS), dtype=torch.long, device=model.device)
        positions = torch.arange(_TOKENS, device=model.device)[None]
        given = {"input_ids": ids, "position_ids": positions, "use_cache": False, **inputs, **made()}
        if accepts_logits_to_keep(model):  # as programs do: a class may slice what its last layers get by a number
            given.setdefault("logits_to_keep", ids.new_zeros(1))
        given |= trial_inputs(model, given["input_ids"].shape[1])
        type(model).forward(model, **given)


@contextmanager
def _on_fakes(model: PreTrainedModel) -> Iterator[None]:
    with data_restored(model), attributes_restored(model), fake_tensors(model), _batched_experts(model):
        let_layers_compute_on_fakes(model, _TOKENS)
        yield


@contextmanager
def _batched_experts(model: PreTrainedModel) -> Iterator[None]:
    """Run mixtures of experts batched: grouped products have fakes for bfloat16 only (torch 2.13)."""
    configs = [getattr(module, "config", None) for module in model.modules()]  # a copied layer has its own
    known = {id(config): config for config in configs if isinstance(config, PretrainedConfig)}
    grouped = [config for config in known.values() if experts_implementation(config) == "grouped_mm"]
    for config in grouped:
        set_experts_implementation(config, "batched_mm")
    try:
        yield
    finally:
        for config in grouped:
            set_experts_implementation(config, "grouped_mm")


def accepts_logits_to_keep(model: PreTrainedModel) -> bool:
    """Whether the model's forward can compute the logits of sampled tokens only."""
    return "logits_to_keep" in inspect.signature(type(model).forward).parameters
