"""FlashInfer's layouts of keys and values, all as views ``[P, K, S, D]`` of whatever strides: nothing is copied."""

# Shapes: P pages, K kv heads, S page size, D head dimension, N tokens of all rows.

from __future__ import annotations

from typing import Any

from torch import Tensor

LAYOUTS = ("NHD", "HND")  # tokens before heads, and heads before tokens

Pages = Tensor | tuple[Tensor, Tensor] | list[Tensor]
"""``[P, 2, S, K, D]`` (NHD), ``[P, 2, K, S, D]`` (HND), or keys and values apart, without the axis of 2."""


def check_layout(kv_layout: str) -> None:
    """Raise KeyError, as FlashInfer does, unless there is such a layout."""
    if kv_layout not in LAYOUTS:
        raise KeyError(f"kv_layout={kv_layout!r} does not exist; use one of {', '.join(map(repr, LAYOUTS))}")


def paged(paged_kv_cache: Pages, kv_layout: str) -> tuple[Tensor, Tensor]:
    """Return keys and values of pages as ``[P, K, S, D]``. The axis of a page size of 1 may be left out."""
    check_layout(kv_layout)
    if isinstance(paged_kv_cache, Tensor):
        whole = _with_page_axis("paged_kv_cache", paged_kv_cache, kv_layout, 5)
        if whole.shape[1] != 2:
            raise ValueError(f"paged_kv_cache must be [P, 2, ...], keys and values; got {tuple(whole.shape)}")
        keys, values = whole.unbind(1)
    elif isinstance(paged_kv_cache, (tuple, list)) and len(paged_kv_cache) == 2:
        keys, values = (
            _with_page_axis(f"paged_kv_cache[{number}]", own, kv_layout, 4) for number, own in enumerate(paged_kv_cache)
        )
    else:
        raise KeyError(f"paged_kv_cache must be a tensor or a tuple of two; got {_shown(paged_kv_cache)}")
    return (keys, values) if kv_layout == "HND" else (keys.transpose(1, 2), values.transpose(1, 2))


def ragged(name: str, states: Tensor, kv_layout: str) -> Tensor:
    """Return ``[N, K, D]`` (NHD) or ``[K, N, D]`` (HND) as pages of one token each, ``[N, K, 1, D]``."""
    check_layout(kv_layout)
    if states.dim() != 3:
        axes = "[N, K, D]" if kv_layout == "NHD" else "[K, N, D]"
        raise ValueError(f"{name} must be {axes} with kv_layout={kv_layout!r}; got {tuple(states.shape)}")
    return (states if kv_layout == "NHD" else states.transpose(0, 1)).unsqueeze(2)


def _with_page_axis(name: str, pages: Tensor, kv_layout: str, dims: int) -> Tensor:
    if pages.dim() == dims - 1:
        return pages.unsqueeze(-3 if kv_layout == "NHD" else -2)
    if pages.dim() != dims:
        raise ValueError(f"{name} must have {dims} axes, or {dims - 1} for a page size of 1; got {tuple(pages.shape)}")
    return pages


def _shown(given: Any) -> str:
    return f"{type(given).__name__} of {len(given)}" if isinstance(given, (tuple, list)) else type(given).__name__
