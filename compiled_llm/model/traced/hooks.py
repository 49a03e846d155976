"""Hooks that are traced into a model's programs: what a module computes of a step's tokens, read or changed."""

# Shapes: T packed tokens of a step, B rows, q new tokens of each.

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compiled_llm.compat.forks import lock
from compiled_llm.kinds.rows import PackedTokens
from compiled_llm.model.attention import PagedBatch

HookFunction = Callable[[nn.Module, tuple[Any, ...], Any, "StepTokens"], Any]


class StepTokens:
    """The tokens of one step, as a traced hook sees them: of several rows, one after the other, with padding.

    Attributes:
        rows: ``[T]`` int64, the same number for the tokens of one row; it may have another number in the next step.
        positions: ``[T]`` int64, each token's position, HuggingFace's ``position_ids``.
    """

    def __init__(self, rows: Tensor, positions: Tensor) -> None:
        self.rows, self.positions = rows, positions
        self.emitted: dict[str, Tensor] = {}

    def emit(self, name: str, tensor: Tensor) -> None:
        """Hand a tensor ``[T, ...]`` out, as it is now: results of calls have its tokens as ``emitted[name]``.

        Raises:
            ValueError: a hook has emitted something under this name, or the tensor has no entry for each token.
        """
        if name in self.emitted:
            raise ValueError(f"emit: {name!r} was emitted already in this step; give each hook a name of its own")
        if tensor.dim() == 0 or tensor.shape[0] != self.rows.shape[0]:
            raise ValueError(f"emit: {name!r} needs an entry for each token, [T, ...]; its shape is another")
        self.emitted[name] = tensor.clone()  # the step goes on to write into its buffers, and layers into their own


class PlacedHook(NamedTuple):
    """A hook on the module at a path, as ``nn.Module`` calls it."""

    path: tuple[str, ...]
    call: Callable[[nn.Module, Any, Any], Any]
    function: HookFunction


class HookedOutput(NamedTuple):
    """The outputs of a forward with hooks that programs read."""

    logits: Tensor
    hidden_states: tuple[Tensor, ...] | None
    emitted: dict[str, Tensor]


class HookSite:
    """The place where hooks find the tokens of the step that runs; None between steps."""

    tokens: StepTokens | None = None


class TracedHooks:
    """The traced hooks of one model."""

    def __init__(self) -> None:
        # the hooks, in the order in which they were added; replaced as a whole
        self.placed: tuple[PlacedHook, ...] = ()
        self._functions: tuple[HookFunction, ...] = ()
        self.site = HookSite()  # of their steps
        self._lock = lock()

    def __bool__(self) -> bool:
        return bool(self.placed)

    def add(self, path: str, function: HookFunction) -> PlacedHook:
        hook = PlacedHook(tuple(path.split(".")), as_forward_hook(function, self.site), function)
        with self._lock:
            self._place((*self.placed, hook))
        return hook

    def remove(self, hook: PlacedHook) -> bool:
        """Remove a hook; returns whether it was there."""
        with self._lock:
            left = tuple(other for other in self.placed if other is not hook)
            there = len(left) < len(self.placed)
            self._place(left)
        return there

    def _place(self, hooks: tuple[PlacedHook, ...]) -> None:
        self.placed, self._functions = hooks, tuple(hook.function for hook in hooks)

    def functions(self) -> tuple[HookFunction, ...]:
        """Return the functions of all hooks: the same tuple until there are others."""
        return self._functions


def as_forward_hook(function: HookFunction, site: HookSite) -> Callable[[nn.Module, Any, Any], Any]:
    """Return a hook for ``register_forward_hook`` that shows packed tokens, of ``[1, T, ...]`` or ``[B, q, ...]``."""

    def traced(module: nn.Module, args: object, output: object) -> object:
        tokens = site.tokens
        assert tokens is not None, "the module runs inside a step"
        changed = function(module, _packed(args), _packed(output), tokens)
        return None if changed is None else _as_before(changed, output)

    return traced


def _packed(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.flatten(0, 1) if value.dim() >= 3 else value
    return type(value)(map(_packed, value)) if type(value) in (tuple, list) else value


def _as_before(changed: Any, output: Any) -> Any:
    """Return what a hook gives in place of ``output``, in the shape that the model goes on with."""
    if isinstance(changed, Tensor) and isinstance(output, Tensor):
        if output.dim() < 3:
            return changed
        if changed.dim() != output.dim() - 1:
            raise ValueError("traced_hook: what the function returns has other dimensions than the output it was given")
        return changed.view(output.shape)
    if type(changed) in (tuple, list) and type(changed) is type(output) and len(changed) == len(output):
        return type(changed)(_as_before(*both) for both in zip(changed, output, strict=True))
    return changed


def with_hooks(forward: Callable[..., Any], hooks: TracedHooks) -> Callable[..., Any]:
    """Return a ``forward`` of a model with hooks on its modules; mostly ``forward`` itself."""
    if not hooks:
        return forward
    site = hooks.site

    def hooked(model: nn.Module, *, paged_batch: PagedBatch, position_ids: Tensor, **inputs: object) -> HookedOutput:
        site.tokens = tokens = StepTokens(_rows_of(paged_batch, position_ids), position_ids.flatten())
        try:
            out = forward(model, paged_batch=paged_batch, position_ids=position_ids, **inputs)
        finally:
            site.tokens = None
        return HookedOutput(out.logits, getattr(out, "hidden_states", None), tokens.emitted)

    return hooked


def _rows_of(batch: PagedBatch, position_ids: Tensor) -> Tensor:
    """Return ``[T]`` int64, the row of each token."""
    if isinstance(batch.rows, PackedTokens):
        return batch.rows.token_rows.long()
    rows, new = position_ids.shape
    if rows == 1 and batch.states is not None:  # a prefill of layers without attention
        return batch.states.token_rows.long()
    return torch.arange(rows, device=position_ids.device)[:, None].expand(rows, new).flatten()
