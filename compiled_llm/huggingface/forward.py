"""``forward`` of a wrapped model: one packed prefill over pages where it can be, else HuggingFace's own.

Shapes: B rows, Q tokens a row, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import ModelOutput

from compiled_llm.execution.slow_paths import Reason, SlowPath
from compiled_llm.huggingface.current_call import current_call
from compiled_llm.huggingface.handle import CompiledModel
from compiled_llm.huggingface.paged_cache import PagedCache
from compiled_llm.kvcache.pool import OutOfPagesError
from compiled_llm.model.inputs import check_ids, check_ready
from compiled_llm.model.sizes import max_positions_of

_TAKEN = frozenset(
    {
        *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values"),
        *("labels", "use_cache", "logits_to_keep", "return_dict"),
    }
)
_MORE_OUTPUTS: tuple[SlowPath, ...] = ("output_hidden_states", "output_attentions", "output_router_logits")
_KNOWN = _TAKEN.union(_MORE_OUTPUTS)
_IGNORED_LABEL = -100


def run_forward(own: Any, self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the compiled forward where it can be, else the class's own."""
    if torch.compiler.is_compiling():  # the user's own torch.compile or torch.export
        return own(self, *args, **kwargs)
    given, runtime = named(own, args, kwargs), self.compiled
    counted, cache = current_call.get() is None, given.get("past_key_values")
    reason = obstacle(own, self, given)
    if isinstance(cache, PagedCache):
        if reason is not None:
            raise ValueError(
                f"forward with a PagedCache: {reason}; that takes HuggingFace's own forward; "
                "pass a DynamicCache, or none"
            )
        if counted:  # a call of generate goes on as it began
            check_belongs(runtime, cache)
    elif reason is None:
        reason = fitting(runtime, given)
    if reason is None:
        try:
            output = compiled(own, runtime, given)
        except OutOfPagesError:
            if cache is not None:
                raise
            reason = Reason("out_of_pages")  # other threads took them since
        else:
            if counted:
                runtime.counters.took_forward("compiled")
            return output
    if counted:
        runtime.counters.took_forward("original", reason)
    with runtime.facts.attention.original():
        return own(self, *args, **kwargs)


def named(own: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name, without those that are None."""
    given = {**dict(zip(_parameters(own)[1:], args, strict=False)), **kwargs}
    return {name: value for name, value in given.items() if value is not None}


def ignored(own: Callable[..., Any]) -> frozenset[str]:
    """Return the inputs that tokenizers make and this ``forward`` takes without looking at them."""
    return frozenset({"token_type_ids"}.difference(_parameters(own)))


@functools.lru_cache(maxsize=16)  # of classes that may come and go
def _parameters(own: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(own).parameters)


def obstacle(own: Callable[..., Any], model: PreTrainedModel, given: Mapping[str, Any]) -> Reason | None:
    """Return why a call of ``forward`` has to run HuggingFace's own, or None.

    Args:
        own: the model class's ``forward``.
        model: the wrapped model.
        given: the call's arguments by name.
    """
    return next(_obstacles(own, model, given), None)


def _obstacles(own: Callable[..., Any], model: PreTrainedModel, given: Mapping[str, Any]) -> Iterator[Reason]:
    cache, mask = given.get("past_key_values"), given.get("attention_mask")
    paged = isinstance(cache, PagedCache)
    for name in _MORE_OUTPUTS:
        if given.get(name, getattr(model.config, name, False)):
            yield Reason(name)
    known = _KNOWN | ignored(own)
    others = sorted(name for name, value in given.items() if name not in known and value is not False)
    if others:
        yield Reason("model_inputs", ", ".join(others))
    if cache is not None and not paged:
        yield Reason("past_key_values", type(cache).__name__)
    if not (mask is None or (isinstance(mask, Tensor) and mask.dim() == 2)):
        yield Reason("attention_mask_shape")
    if given.get("position_ids", torch.empty(1, 0)).dim() != 2:
        yield Reason("position_ids_shape")
    if torch.is_autocast_enabled(model.device.type):
        yield Reason("autocast")
    if "labels" in given:
        yield from _label_obstacles(own, given)
    if paged:
        return
    if model.training:
        yield Reason("training")
    if torch.is_grad_enabled() and _wants_gradients(model, given):
        yield Reason("gradients")
    if cast(CompiledModel, model.compiled).hooks.of(model):
        yield Reason("inner_hooks")
    yield from _input_obstacles(model, given)


def _wants_gradients(model: PreTrainedModel, given: Mapping[str, Any]) -> bool:
    embeddings = given.get("inputs_embeds")
    return (embeddings is not None and embeddings.requires_grad) or any(
        parameter.requires_grad for parameter in model.parameters()
    )


def _label_obstacles(own: Callable[..., Any], given: Mapping[str, Any]) -> Iterator[Reason]:
    labels, mask = given["labels"], given.get("attention_mask")
    if "loss_function" not in inspect.unwrap(own).__code__.co_names:
        yield Reason("loss_function")
    keep = given.get("logits_to_keep", 0)
    if isinstance(keep, Tensor) or keep:
        yield Reason("labels_with_logits_to_keep")
    if mask is not None and isinstance(labels, Tensor) and labels.dim() == 2:
        hidden = (mask[:, -labels.shape[1] :] == 0)[:, :-1].to(labels.device)
        if bool((hidden & (labels[:, 1:] != _IGNORED_LABEL)).any()):
            yield Reason("labels_masked")


def _input_obstacles(model: PreTrainedModel, given: Mapping[str, Any]) -> Iterator[Reason]:
    """Yield what HuggingFace's own forward answers better: with its own error, or because it has no limits."""
    ids, embeddings = given.get("input_ids"), given.get("inputs_embeds")
    if (ids is None) == (embeddings is None):
        yield Reason("inputs", "not one of input_ids and inputs_embeds")
    elif embeddings is not None and (embeddings.dim() != 3 or embeddings.dtype != model.dtype):
        yield Reason("inputs", f"{embeddings.dim()}-D inputs_embeds of {embeddings.dtype}")
    elif ids is not None and (ids.dim() != 2 or ids.is_floating_point() or not ids.numel()):
        yield Reason("inputs", f"{ids.dim()}-D input_ids of {ids.dtype}" if ids.numel() else "no token")
    elif _tokens_in(given)[1] > max_positions_of(model):
        yield Reason("out_of_positions")


def _tokens_in(given: Mapping[str, Any]) -> tuple[int, int]:
    """Return B and Q of the tokens or embeddings given."""
    batch, tokens = given["input_ids" if "input_ids" in given else "inputs_embeds"].shape[:2]
    return int(batch), int(tokens)


def compiled(own: Callable[..., Any], runtime: CompiledModel, given: Mapping[str, Any]) -> Any:
    """Run a call for which there is no obstacle.

    Args:
        own: the model class's ``forward``.
        runtime: the wrapped model's ``compiled``.
        given: the call's arguments by name.

    Returns:
        HuggingFace's output: ``[B, Q', V]`` logits, the loss where there are labels, and a ``PagedCache`` where the
        call has or wants one.

    Raises:
        ValueError: the arguments do not fit the cache or the model.
        OutOfPagesError: the pages for the tokens are not free; nothing was stored.
    """
    model = runtime.facts.model
    cache: PagedCache | None = given.get("past_key_values")
    if cache is None and given.get("use_cache", getattr(model.config, "use_cache", True)):
        cache = runtime.new_cache()
    logits = _score(runtime, given) if cache is None else _checked_forward(runtime, cache, given)
    labels, loss = given.get("labels"), None
    if labels is not None:
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        loss = model.loss_function(logits=logits, labels=labels, vocab_size=vocabulary)
    output = _output_class(own)(loss=loss, logits=logits, past_key_values=cache)
    returns_dict = given.get("return_dict", getattr(model.config, "return_dict", True))
    return output if returns_dict else output.to_tuple()


def _output_class(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return what the model's own forward says that it returns."""
    returned = inspect.unwrap(own).__annotations__.get("return")
    classes = (kind for kind in get_args(returned) or (returned,) if isinstance(kind, type))
    return next((kind for kind in classes if issubclass(kind, ModelOutput)), CausalLMOutputWithPast)


def _score(runtime: CompiledModel, given: Mapping[str, Any]) -> Tensor:
    """Return logits without keeping anything, of at most ``max_batch_size`` rows at a time."""
    most, (rows, _) = runtime.config.max_batch_size, _tokens_in(given)
    logits: list[Tensor] = []
    for start in range(0, rows, most):
        part = {name: _rows_of(name, value, rows, start, most) for name, value in given.items()}
        cache = runtime.new_cache()
        try:
            logits.append(_checked_forward(runtime, cache, part))
        finally:
            cache.close()
    return logits[0] if len(logits) == 1 else torch.cat(logits)


def _rows_of(name: str, value: Any, rows: int, start: int, count: int) -> Any:
    per_row = name in ("input_ids", "inputs_embeds", "attention_mask", "position_ids") and len(value) == rows
    return value[start : start + count] if per_row else value


def _checked_forward(runtime: CompiledModel, cache: PagedCache, given: Mapping[str, Any]) -> Tensor:
    model, embeddings = runtime.facts.model, given.get("inputs_embeds")
    check_ready(model)
    if embeddings is None:
        check_ids(given.get("input_ids"))
    if not cache.runner.runs(model):
        raise _foreign()
    return cache.forward(
        given.get("input_ids"),
        given.get("attention_mask"),
        given.get("position_ids"),
        given.get("logits_to_keep", 0),
        None if embeddings is None else embeddings.to(model.device),
        counts_unmasked=runtime.counts_unmasked,
    )


def check_belongs(runtime: CompiledModel, cache: PagedCache) -> None:
    """Check at the beginning of a call that a cache lies in the present pages of this model.

    Raises:
        ValueError: it is another model's, or this one's from before it was moved or converted.
    """
    if not cache.runner.belongs_to(runtime.device_model()):
        raise _foreign()


def _foreign() -> ValueError:
    return ValueError(
        "past_key_values: this PagedCache belongs to another model, or to this one before it was moved, converted "
        "or hooked; begin with model.compiled.new_cache(), or with none"
    )


def fitting(runtime: CompiledModel, given: Mapping[str, Any]) -> Reason | None:
    """Return why a call without a cache finds no room here, where HuggingFace's own forward does, or None."""
    try:
        device_model = runtime.device_model()
    except (ValueError, RuntimeError) as error:
        return Reason("cannot_run", str(error))
    rows, tokens = _tokens_in(given)
    keeps = given.get("use_cache", getattr(runtime.facts.model.config, "use_cache", True))
    if keeps and rows > device_model.config.max_batch_size:
        return Reason("max_batch_size")
    pool, rows = device_model.pool, min(rows, device_model.config.max_batch_size)
    return None if rows * pool.pages_for(tokens) <= pool.available else Reason("out_of_pages")
