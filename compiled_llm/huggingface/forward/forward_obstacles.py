"""Finds the calls of ``forward`` that run HuggingFace's own, and why."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from compiled_llm.compat.cache_names import cache_argument, generate_argument
from compiled_llm.execution.reporting.inner_reasons import UNSERVED_OUTPUTS, inner_reasons
from compiled_llm.execution.reporting.slow_paths import Reason
from compiled_llm.huggingface.cache.cache_columns import LogitsToKeep
from compiled_llm.huggingface.cache.paged_cache import PagedCache
from compiled_llm.huggingface.call.current_call import current_call
from compiled_llm.huggingface.call.other_inputs import (
    are_whole,
    one_a_token,
    reader_of,
    without_what_says_nothing,
)
from compiled_llm.huggingface.forward.prefills import OF_PREFILLS
from compiled_llm.huggingface.handle import CompiledModel
from compiled_llm.huggingface.inspection.model_obstacles import SEEN_BOTH_WAYS
from compiled_llm.model.gradients import requires_gradients
from compiled_llm.model.version.model_version import Placement

NUM_ITEMS = "num_items_in_batch"  # what HuggingFace's Trainer passes with labels: the loss function divides by it

_KNOWN = frozenset(
    {
        "input_ids",
        "inputs_embeds",
        "attention_mask",
        "position_ids",
        "labels",
        "use_cache",
        "logits_to_keep",
        "return_dict",
        "output_hidden_states",
        NUM_ITEMS,
    }
).union(UNSERVED_OUTPUTS)
_IGNORED_LABEL = -100
_HANDED_ON = frozenset({"tokenizer", "assistant_tokenizer", "streamer"})
"""Inputs of ``generate`` itself that it passes to beam search too, which passes them to the model."""


def by_name(original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name, without those that are None."""
    arguments = {**dict(zip(_parameters(original)[1:], args, strict=False)), **kwargs}
    own, of_generate = _cache_names(original)
    if own != of_generate and of_generate in arguments:  # a model written for an older version
        arguments[own] = arguments.pop(of_generate)
    return {name: value for name, value in arguments.items() if value is not None}


def ignored_inputs(original: Callable[..., Any]) -> frozenset[str]:
    """Return the inputs that this ``forward`` takes without reading them: of tokenizers, and _HANDED_ON."""
    return _HANDED_ON.union(["token_type_ids"]).difference(_parameters(original))


@functools.lru_cache(maxsize=16)  # of classes that may come and go
def _known_inputs(original: Callable[..., Any], cache_argument: str) -> frozenset[str]:
    """Return the inputs that are looked at one by one, and those that do nothing."""
    return _KNOWN.union(ignored_inputs(original), [cache_argument])


@functools.lru_cache(maxsize=16)  # of classes that may come and go
def _parameters(original: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(original).parameters)


@functools.lru_cache(maxsize=16)  # of classes that may come and go
def _cache_names(original: Callable[..., Any]) -> tuple[str, str]:
    return cache_argument(original), generate_argument(original)


def forward_obstacle(
    original: Callable[..., Any], model: PreTrainedModel, arguments: Mapping[str, Any], placement: Placement
) -> Reason | None:
    """Return why a call of ``forward`` has to run HuggingFace's own with its arguments and placement, or None."""
    return next(_obstacles(original, model, arguments, placement), None)


def _obstacles(
    original: Callable[..., Any], model: PreTrainedModel, arguments: Mapping[str, Any], placement: Placement
) -> Iterator[Reason]:
    compiled = cast(CompiledModel, model.compiled)
    argument = compiled.facts.cache_argument
    cache = arguments.get(argument)
    mask = arguments.get("attention_mask")
    paged = isinstance(cache, PagedCache)
    if compiled.asleep:
        yield Reason("asleep")
    yield from inner_reasons(compiled.facts, placement)
    for name in UNSERVED_OUTPUTS:
        if arguments.get(name, getattr(model.config, name, False)):
            yield Reason(name)
    if arguments.get("output_hidden_states") and compiled.facts.stacks_hidden_states:
        yield Reason("output_hidden_states")
    if compiled.facts.sees_prompts_both_ways and not (paged and tokens_in(arguments)[1] == 1):
        yield SEEN_BOTH_WAYS
    known = _known_inputs(original, argument)
    if paged and current_call.get() is not None:  # the prompt has been computed
        known |= OF_PREFILLS
    others = {name: value for name, value in arguments.items() if name not in known and value is not False}
    if others and (telling := without_what_says_nothing(model, others)):
        yield Reason("model_inputs", ", ".join(sorted(telling)))
    if cache is not None and not paged and not (type(cache) is DynamicCache and compiled.facts.shares_caches):
        yield Reason("past_key_values", type(cache).__name__)
    if not (mask is None or _covers_text(mask, arguments, cache)):
        yield Reason("attention_mask_shape")
    if (positions := arguments.get("position_ids")) is not None:
        if reader_of(arguments) is None and one_a_token(positions, model.config) is None:
            yield Reason("position_ids_shape")
        elif not are_whole(positions):
            yield Reason("fractional_positions")
    if not _names_columns(arguments.get("logits_to_keep", 0)):
        yield Reason("logits_to_keep", "neither a number nor a row of columns")
    if _packs_sequences(model, arguments):
        yield Reason("packed_sequences")
    own_positions = compiled.facts.default_positions == "own" or reader_of(arguments) is not None
    if "position_ids" not in arguments and own_positions:
        yield Reason("no_position_ids")
    if torch.is_autocast_enabled(placement.device.type) and compiled.facts.autocast_matters():
        yield Reason("autocast")
    if "labels" in arguments:
        yield from _label_obstacles(original, arguments)
    if paged:
        return
    if torch.is_grad_enabled() and _wants_gradients(model, arguments):
        yield Reason("gradients")
    yield from _input_obstacles(model, arguments)
    if cache is not None:
        yield from _cache_obstacles(model, cache, arguments)


def _covers_text(mask: object, arguments: Mapping[str, Any], cache: Cache | None) -> bool:
    """Whether a mask has a column for each token; for pages that hold tokens, for the last ones."""
    if not (isinstance(mask, Tensor) and mask.dim() == 2):
        return False
    rows, tokens = tokens_in(arguments)
    known = 0 if cache is None else int(cache.get_seq_length())
    return len(mask) == rows and ((known > 0 and isinstance(cache, PagedCache)) or mask.shape[1] == known + tokens)


def _names_columns(logits_to_keep: LogitsToKeep) -> bool:
    """Whether these are columns, the same ones of each row."""
    return isinstance(logits_to_keep, (int, slice)) or np.ndim(logits_to_keep) == 1


def keeps_cache(model: PreTrainedModel, arguments: Mapping[str, Any]) -> bool:
    """Return whether a call of ``forward`` wants a cache, by itself or by the model's config."""
    return bool(arguments.get("use_cache", getattr(model.config, "use_cache", True)))


def _packs_sequences(model: PreTrainedModel, arguments: Mapping[str, Any]) -> bool:
    """Whether HuggingFace takes a row for several sequences, since its positions start again or skip some."""
    positions = arguments.get("position_ids")
    cached = cast(CompiledModel, model.compiled).facts.cache_argument in arguments
    if cached or "attention_mask" in arguments or not isinstance(positions, Tensor) or keeps_cache(model, arguments):
        return False
    return bool((positions.diff(dim=-1) != 1).any())


def _wants_gradients(model: PreTrainedModel, arguments: Mapping[str, Any]) -> bool:
    embeddings = arguments.get("inputs_embeds")
    return (embeddings is not None and embeddings.requires_grad) or requires_gradients(model)


def _label_obstacles(original: Callable[..., Any], arguments: Mapping[str, Any]) -> Iterator[Reason]:
    labels = arguments["labels"]
    mask = arguments.get("attention_mask")
    if "loss_function" not in inspect.unwrap(original).__code__.co_names:
        yield Reason("loss_function")
    elif NUM_ITEMS in arguments and not _hands_on_to_loss(original):
        yield Reason("model_inputs", NUM_ITEMS)
    keep = arguments.get("logits_to_keep", 0)
    if not isinstance(keep, int) or keep:
        yield Reason("labels_with_logits_to_keep")
    if mask is not None and isinstance(labels, Tensor) and labels.dim() == 2:
        hidden = (mask[:, -labels.shape[1] :] == 0)[:, :-1].to(labels.device)
        if bool((hidden & (labels[:, 1:] != _IGNORED_LABEL)).any()):
            yield Reason("labels_masked")


@functools.lru_cache(maxsize=16)  # of classes that may come and go
def _hands_on_to_loss(original: Callable[..., Any]) -> bool:
    """Whether a ``forward`` gives its further arguments to the loss function."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(original))))
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    losses = (call for call in calls if ast.unparse(call.func) == "self.loss_function")
    return any(keyword.arg is None for call in losses for keyword in call.keywords)


def _input_obstacles(model: PreTrainedModel, arguments: Mapping[str, Any]) -> Iterator[Reason]:
    """Yield inputs that HuggingFace's own forward answers better: with its original error, or without limits."""
    ids = arguments.get("input_ids")
    embeddings = arguments.get("inputs_embeds")
    if (ids is None) == (embeddings is None):
        yield Reason("inputs", "not one of input_ids and inputs_embeds")
    elif embeddings is not None and (embeddings.dim() != 3 or embeddings.dtype != model.dtype):
        yield Reason("inputs", f"{embeddings.dim()}-D inputs_embeds of {embeddings.dtype}")
    elif ids is not None and (ids.dim() != 2 or ids.is_floating_point() or not ids.numel()):
        yield Reason("inputs", f"{ids.dim()}-D input_ids of {ids.dtype}" if ids.numel() else "no token")
    elif tokens_in(arguments)[1] > cast(CompiledModel, model.compiled).facts.max_positions:
        yield Reason("out_of_positions")


def _cache_obstacles(model: PreTrainedModel, cache: DynamicCache, arguments: Mapping[str, Any]) -> Iterator[Reason]:
    """Yield what keeps pages from standing in for a user's cache; its layers are looked at later."""
    tokens = tokens_in(arguments)[1]
    known = int(cache.get_seq_length())
    mask = arguments.get("attention_mask")
    if mask is not None and bool((mask[:, known:] == 0).any()):
        yield Reason("prefill", "the cache has to hold masked tokens too")
    if known + tokens > cast(CompiledModel, model.compiled).facts.max_positions:
        yield Reason("out_of_positions")


def tokens_in(arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Return B and Q of the tokens or embeddings."""
    batch, tokens = arguments["input_ids" if "input_ids" in arguments else "inputs_embeds"].shape[:2]
    return int(batch), int(tokens)
