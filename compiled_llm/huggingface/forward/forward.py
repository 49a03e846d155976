"""``forward`` of a wrapped model: one packed prefill over pages if that can serve the call, else HuggingFace's own."""

# Shapes: B rows, Q tokens a row, V vocabulary.

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, cast, get_args

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import ModelOutput

from compiled_llm.compat.cache_names import output_field
from compiled_llm.compat.contexts import of_one_call
from compiled_llm.compat.huggingface import columns_in
from compiled_llm.compat.torch.dynamo import dynamo_watches, is_traced
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.reporting.slow_paths import Reason
from compiled_llm.execution.reporting.stats import ForwardPath
from compiled_llm.execution.threads.interrupts import deferred
from compiled_llm.huggingface.cache.cache_columns import on_host
from compiled_llm.huggingface.cache.extra_columns import EmbeddedColumns, ExtraColumns
from compiled_llm.huggingface.cache.hidden_columns import VisibilityMismatchError
from compiled_llm.huggingface.cache.layer_in_pages import move_out, pages_of, put_in_pages
from compiled_llm.huggingface.cache.more_outputs import GivenOutputs, MoreOutputs, more_outputs
from compiled_llm.huggingface.cache.paged_cache import PagedCache, PendingPrompt
from compiled_llm.huggingface.cache.reading import may_be_in_pages, read_into
from compiled_llm.huggingface.call.current_call import copies, current_call, original_reason, took
from compiled_llm.huggingface.call.other_inputs import one_a_token, reader_of
from compiled_llm.huggingface.forward.forward_obstacles import (
    NUM_ITEMS,
    by_name,
    forward_obstacle,
    keeps_cache,
    tokens_in,
)
from compiled_llm.huggingface.forward.new_rows import NewRows
from compiled_llm.huggingface.handle import CompiledModel
from compiled_llm.huggingface.inspection.model_obstacles import check_hooks_run
from compiled_llm.kvcache.errors import OutOfPagesError
from compiled_llm.model.inputs import check_ids, check_ready
from compiled_llm.model.version.model_version import Placement

if TYPE_CHECKING:
    from compiled_llm.huggingface.handle import Wrapped


Output = ModelOutput | tuple[Any, ...]  # the latter with ``return_dict=False``

_counted: ContextVar[list[str] | None] = of_one_call(ContextVar("counted", default=None), None)
"""The paths that forwards inside a forward of the user's were counted on."""


def run_forward(
    original: Callable[..., object], self: Wrapped, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> object:
    """Run the compiled forward if it can serve the call, else the class's own."""
    if is_traced() or dynamo_watches():  # the user's own torch.compile or torch.export
        self._note_outer_compile()
        return original(self, *args, **kwargs)
    arguments, runtime, call = by_name(original, args, kwargs), self.compiled, current_call.get()
    runtime.home.check()
    runtime.runner_lifecycle.check_weights()
    if call is not None:
        runtime.calls.moves += 1
    cache = arguments.get(runtime.facts.cache_argument)
    if call is not None and isinstance(cache, PagedCache) and cache.prefill is not None:
        return _run_prefill(original, self, arguments, cache, cache.prefill)
    # The model stays awake from the check that it is awake to the end of a forward.
    with runtime.calls.begun() if call is None else nullcontext():
        if isinstance(cache, PagedCache):
            return _run_over(cache, original, self, arguments)
        output = _serve(original, self, arguments, cache)
    if isinstance(output, Reason):
        return _run_original(original, self, args, kwargs, output)
    count_forward(runtime, "compiled")
    return output


def _serve(
    original: Callable[..., object], self: Wrapped, arguments: dict[str, Any], cache: Cache | None
) -> Output | Reason:
    """Return what the compiled forward gives a call without a ``PagedCache``, or why it cannot serve it."""
    runtime = self.compiled
    if isinstance(cache, DynamicCache) and isinstance(mask := arguments.get("attention_mask"), Tensor):
        arguments["attention_mask"] = mask.cpu()  # once: it is read several times
    placement = runtime.placement()  # once: to find it, all modules are walked
    reason = original_reason() or forward_obstacle(original, self, arguments, placement)
    if reason := reason or fitting(runtime, arguments, placement):
        return reason
    try:
        return compiled(original, runtime, arguments)
    except OutOfPagesError:
        return Reason("out_of_pages")  # other threads took them since
    except VisibilityMismatchError as error:
        return Reason(error.reason)


def _run_original(
    original: Callable[..., object], self: Wrapped, args: tuple[Any, ...], kwargs: Mapping[str, Any], reason: Reason
) -> object:
    """Run HuggingFace's own forward, and count it."""
    runtime = self.compiled
    if runtime.config.batch_invariant and current_call.get() is None and not torch.is_grad_enabled():
        raise ValueError(
            f"forward with batch_invariant=True: {reason}; that takes HuggingFace's own forward, whose bits depend on "
            "the batch; change the call, or wrap the model without batch_invariant"
        )
    check_hooks_run("forward", runtime.facts.hooks, reason)
    count_forward(runtime, "original", reason)
    with runtime.facts.attention.original():
        return original(self, *args, **kwargs)


def _run_prefill(
    original: Callable[..., Any],
    self: Wrapped,
    arguments: Mapping[str, Any],
    cache: PagedCache,
    prefill: PendingPrompt,
) -> object:
    """Run HuggingFace's own forward over a cache of its own, and read in the tokens that it leaves there."""
    with self.compiled.facts.attention.original():
        output = original(self, **{**arguments, self.compiled.facts.cache_argument: prefill.over})
    rows, tokens = tokens_in(arguments)
    columns = columns_in(prefill.over)
    columns = cache.seen + tokens if columns is None else columns
    mask = arguments.get("attention_mask")
    newest = torch.tensor([[columns - 1]], device="cpu")
    position_ids = arguments.get("position_ids", newest)
    last = one_a_token(position_ids[..., -1:], self.config)
    fits = mask is None or mask.shape == (rows, columns)
    if last is None or not fits:  # an override of the user's gives other shapes
        took(self.compiled, "original", prefill.reason)
        return output
    shown = np.ones((rows, columns), dtype=bool) if mask is None else copies().of(mask).numpy() != 0
    read_into(cache, prefill.over, shown, (on_host(last.expand(rows, 1))[:, 0] + 1).tolist())
    cache.end_prefill()
    output[output_field(type(output))] = cache
    return output


def _run_over(
    cache: PagedCache, original: Callable[..., object], self: Wrapped, arguments: Mapping[str, Any]
) -> object:
    """Run the compiled forward over our cache; HuggingFace's own takes only one that ``generate`` has made."""
    runtime = self.compiled
    call = current_call.get()
    check_ready(runtime.facts.version)
    replaceable = call is not None and any(made is cache for made in call.caches)
    reason = forward_obstacle(original, self, arguments, runtime.placement())
    if reason is None:
        if call is None:  # a call of generate goes on as it began
            check_belongs(runtime, cache)
        try:
            output = compiled(original, runtime, arguments)
        except OutOfPagesError:
            if not replaceable:
                raise
            reason = Reason("out_of_pages")  # what the user overrides gives more tokens than generate was given
        else:
            count_forward(runtime, "compiled")
            return output
    if not replaceable:
        raise ValueError(
            f"forward with a PagedCache: {reason}; that takes HuggingFace's own forward; pass a DynamicCache, or none"
        )
    check_hooks_run("generate", runtime.facts.hooks, reason)
    took(runtime, "original", reason)
    with runtime.facts.attention.original():
        return original(self, **{**arguments, runtime.facts.cache_argument: cache.handed_over(self.config)})


def run_own_forward(forward: Callable[[], object], runtime: CompiledModel, own: str) -> object:
    """Run a user's forward, named ``own``, and count it unless it calls ours, which counts itself."""
    runtime.home.check()
    paths: list[str] = []
    token = _counted.set(paths)
    try:
        result = forward()
    finally:
        _counted.reset(token)
    if not paths:
        check_hooks_run("forward", runtime.facts.hooks, Reason("own_forward", own))
        runtime.counters.took_forward("original", Reason("own_forward", own))
    return result


def count_forward(runtime: CompiledModel, path: ForwardPath, reason: Reason | None = None) -> None:
    """Count a call of ``forward``, or the call of ``generate`` that it is part of if that turns out to be original."""
    if (call := current_call.get()) is not None:
        # The cache stays empty if what the user overrides hands the forward another one.
        if path == "original" and path not in call.paths and any(not cache.seen for cache in call.caches):
            took(runtime, path, reason)
        return
    if (paths := _counted.get()) is not None:
        paths.append(path)
    runtime.counters.took_forward(path, reason)


def count_outside(runtime: CompiledModel, reason: Reason) -> None:
    """Count a forward that passes us by, unless the call that it is part of is counted anyway."""
    if current_call.get() is None and _counted.get() is None:
        runtime.counters.took_forward("outside", reason)


@deferred()  # once, for all that a forward does
def compiled(original: Callable[..., object], runtime: CompiledModel, arguments: Mapping[str, Any]) -> Output:
    """Run a call without a ``forward_obstacle``; ``original`` is the ``forward`` of the model's class.

    Returns:
        HuggingFace's output: ``[B, Q', V]`` logits, the loss if there are labels, and a new ``PagedCache`` if the call
        wants one, or the cache that it has, whose new tokens lie in pages, unless the class keeps that to itself.

    Raises:
        ValueError: the arguments do not fit the cache or the model.
        VisibilityMismatchError: a row would see other tokens than in HuggingFace's forward; nothing was stored.
        OutOfPagesError: the pages for the tokens are not free; nothing was stored.
    """
    model = runtime.facts.model
    if "position_ids" in arguments and reader_of(arguments) is None:
        arguments = {**arguments, "position_ids": one_a_token(arguments["position_ids"], model.config)}
    given, keeps = arguments.get(runtime.facts.cache_argument), keeps_cache(model, arguments)
    asked = arguments.get("output_hidden_states", getattr(model.config, "output_hidden_states", False))
    wanted = more_outputs(asked, runtime.facts.hooks)
    logits, cache, emitted = _computed(runtime, given, arguments, keeps, wanted)
    if cache is not None and isinstance(given, DynamicCache):
        put_in_pages(given, cache)
    returned = cache if given is None else given if keeps or runtime.facts.hands_cache_back else None
    kind = _output_class(original)
    loss = _loss(model, arguments, logits) if "labels" in arguments else None
    output = kind(loss=loss, logits=logits, **{output_field(kind): returned})
    if emitted is not None:
        emitted.put_into(output)
    returns_dict = arguments.get("return_dict", getattr(model.config, "return_dict", True))
    return output if returns_dict else output.to_tuple()


def _computed(
    runtime: CompiledModel,
    given: Cache | None,
    arguments: Mapping[str, Any],
    keeps: bool,
    wanted: MoreOutputs | None,
) -> tuple[Tensor, PagedCache | None, GivenOutputs | None]:
    """Return logits, the cache that holds the tokens, if the call wants one, and what is wanted besides."""
    if given is None and wanted is None and (rows := NewRows.of(runtime, arguments)) is not None:
        return *rows.forward(keeps), None
    if (cache := _cache_for(runtime, given, arguments, keeps)) is None:
        logits, emitted = _score(runtime, arguments, wanted)
    else:
        logits, emitted = _checked_forward(runtime, cache, arguments, wanted)
    return logits, cache, emitted


def _loss(model: PreTrainedModel, arguments: Mapping[str, Any], logits: Tensor) -> Tensor:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    items = {NUM_ITEMS: arguments[NUM_ITEMS]} if NUM_ITEMS in arguments else {}
    loss: Tensor = model.loss_function(logits=logits, labels=arguments["labels"], vocab_size=vocabulary, **items)
    return loss


def _cache_for(
    runtime: CompiledModel, given: Cache | None, arguments: Mapping[str, Any], keeps: bool
) -> PagedCache | None:
    """Return the pages that a call runs over of its cache or, if it ``keeps`` one, new; or None, or OutOfPagesError."""
    if isinstance(given, DynamicCache):
        return _pages_of(runtime, given, arguments)
    assert given is None or isinstance(given, PagedCache)
    return runtime.new_cache() if given is None and keeps else given


def _pages_of(runtime: CompiledModel, cache: DynamicCache, arguments: Mapping[str, Any]) -> PagedCache:
    mask = arguments.get("attention_mask")
    known = int(cache.get_seq_length())
    rows = tokens_in(arguments)[0]
    shown = np.ones((rows, known), dtype=bool) if mask is None else on_host(mask)[:, :known] != 0
    paged = pages_of(cache)
    current = paged is not None and paged.model_runner is runtime.model_runner()
    if paged is not None and current and np.array_equal(paged.stored, shown):
        return paged
    move_out(cache)
    paged = runtime.new_cache()
    if known:
        read_into(paged, cache, shown, shown.sum(axis=1).tolist())
    return paged


@functools.lru_cache(maxsize=16)  # of classes that may come and go
def _output_class(original: Callable[..., Any]) -> type[ModelOutput]:
    """Return the output class in the signature of the model's own forward."""
    returned = inspect.unwrap(original).__annotations__.get("return")
    classes = (kind for kind in get_args(returned) or (returned,) if isinstance(kind, type))
    return next((kind for kind in classes if issubclass(kind, ModelOutput)), CausalLMOutputWithPast)


def _score(
    runtime: CompiledModel, arguments: Mapping[str, Any], wanted: MoreOutputs | None
) -> tuple[Tensor, GivenOutputs | None]:
    """Return logits, and what is wanted besides; of at most ``max_batch_size`` rows at a time, and nothing is kept."""
    most, (rows, _) = runtime.config.max_batch_size, tokens_in(arguments)
    logits: list[Tensor] = []
    emitted: list[GivenOutputs | None] = []
    for start in range(0, rows, most):
        part = {name: _rows_of(name, value, rows, start, most) for name, value in arguments.items()}
        cache = runtime.new_cache()
        try:
            of_part = _checked_forward(runtime, cache, part, wanted)
            logits.append(of_part[0])
            emitted.append(of_part[1])
            cache.generate_loop.let_taps_report()
        finally:
            cache.close()
    if len(logits) == 1:
        return logits[0], emitted[0]
    return torch.cat(logits), None if emitted[0] is None else emitted[0].joined(emitted)


def _rows_of(name: str, value: Any, rows: int, start: int, count: int) -> object:
    per_row = name in ("input_ids", "inputs_embeds", "attention_mask", "position_ids") and len(value) == rows
    return value[start : start + count] if per_row else value


def _checked_forward(
    runtime: CompiledModel, cache: PagedCache, arguments: Mapping[str, Any], wanted: MoreOutputs | None
) -> tuple[Tensor, GivenOutputs | None]:
    if not cache.model_runner.is_of(runtime.facts.model):
        raise _foreign(runtime.facts.cache_argument)
    ids, positions, extra = _columns_of(cache.model_runner, arguments)
    return cache.forward(
        ids,
        arguments.get("attention_mask"),
        positions,
        arguments.get("logits_to_keep", 0),
        extra,
        counts_unmasked=runtime.facts.default_positions == "unmasked",
        wanted=wanted,
    )


def _columns_of(
    model_runner: ModelRunner, arguments: Mapping[str, Any]
) -> tuple[Tensor, Tensor | None, ExtraColumns | None]:
    """Return a forward's ids and positions, ``[B, Q]`` each, and what its rows bring besides."""
    positions = arguments.get("position_ids")
    embeddings = arguments.get("inputs_embeds")
    if embeddings is not None:
        ids = torch.zeros(embeddings.shape[:2], dtype=torch.long, device="cpu")
        return ids, positions, EmbeddedColumns(embeddings.to(model_runner.device))
    ids = cast(Tensor, arguments.get("input_ids"))
    check_ids(ids)
    if (reader := reader_of(arguments)) is None:
        return ids, positions, None
    ids = copies().of(ids)
    extra = reader.columns_of(model_runner, ids, arguments)
    return ids, torch.from_numpy(extra.positions), extra


def check_belongs(runtime: CompiledModel, cache: PagedCache) -> None:
    """Raise ValueError, at the beginning of a call, unless a cache lies in the present pages of this model."""
    if cache.model_runner is not runtime.model_runner():
        raise _foreign(runtime.facts.cache_argument)


def _foreign(argument: str) -> ValueError:
    return ValueError(
        f"{argument}: this PagedCache belongs to another model, or to this one before it was moved, converted, "
        "hooked, put to sleep or given more positions or other windows; begin with model.compiled.new_cache(), or with "
        "none"
    )


def fitting(runtime: CompiledModel, arguments: Mapping[str, Any], placement: Placement) -> Reason | None:
    """Return why pages cannot serve a call without a ``PagedCache``, or None; HuggingFace's own forward needs none."""
    try:
        model_runner = runtime.model_runner(placement)
    except (ValueError, RuntimeError) as error:
        return Reason("cannot_run", str(error))
    rows, tokens = tokens_in(arguments)
    cache: DynamicCache | None = arguments.get(runtime.facts.cache_argument)
    if rows > model_runner.max_batch_size and (cache is not None or keeps_cache(runtime.facts.model, arguments)):
        return Reason("max_batch_size")
    if cache is not None:  # it may have pages already
        fits = may_be_in_pages(cache, model_runner, rows, tokens)
        return None if fits else Reason("past_key_values", type(cache).__name__)
    pool = model_runner.pool
    rows = min(rows, model_runner.max_batch_size)
    return None if rows * pool.pages_for(tokens) <= pool.available else Reason("out_of_pages")
