"""FlashInfer's merges of results over parts of the keys.

Shapes: T tokens, N states, H heads, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm_ops.attention import merge


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two results of attention over different keys.

    Args:
        v_a: ``[T, H, D]``, any float dtype.
        s_a: ``[T, H]``, the log-sum-exps in base 2; those of other dtypes are made float32.
        v_b: ``[T, H, D]``.
        s_b: ``[T, H]``.

    Returns:
        ``[T, H, D]``, and ``[T, H]`` float32.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    return merge.merge_state(v_a, s_a.to(torch.float32), v_b, s_b.to(torch.float32))


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Merge any number of results of attention over different keys.

    Args:
        v: ``[T, N, H, D]``, any float dtype.
        s: ``[T, N, H]``, the log-sum-exps in base 2; those of other dtypes are made float32.

    Returns:
        ``[T, H, D]``, and ``[T, H]`` float32.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    return merge.merge_states(v, s.to(torch.float32))


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """Merge a second result of attention, over other keys, into the first.

    Args:
        v: ``[T, H, D]``, contiguous, written.
        s: ``[T, H]`` float32, contiguous, written.
        v_other: ``[T, H, D]``.
        s_other: ``[T, H]``; those of other dtypes are made float32.
        mask: ``[T]`` bool, the tokens that are merged; None for all.

    Raises:
        ValueError: shapes or dtypes do not fit together; nothing is written.
    """
    merge.merge_state_in_place(v, s, v_other, s_other.to(torch.float32), None if mask is None else mask.to(torch.bool))
