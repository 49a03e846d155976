"""FlashInfer's two wrappers of block-sparse attention, by our ops: its names, and what they mean.

Arguments that have no kernel here are refused by name. With ``max_items`` and ``max_entries`` a wrapper's tables have
fixed sizes and addresses, so that a captured ``run`` follows each later ``plan``.

Shapes: M queries, N keys, H query heads, K kv heads, D head dimension, R queries of a block, C keys of a block, MB rows
and NB columns of blocks, X blocks or pieces of keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm_ops.attention.decode import device_of
from compiled_llm_ops.attention.sparse.block_sparse import block_sparse_attention, block_sparse_attention_lse
from compiled_llm_ops.attention.sparse.variable import (
    variable_block_sparse_attention,
    variable_block_sparse_attention_lse,
)
from compiled_llm_ops.attention.sparse.work_items import block_sparse_items, most_pieces, variable_block_sparse_tables

PARTS = 1024
"""Partial results that there is room for, of each kv head."""


class _Tables:
    """The tables that ``plan`` writes and ``run`` reads, on the device."""

    def __init__(self, device: torch.device, max_items: int | None, max_parts: int, max_entries: int | None) -> None:
        if (max_items is None) != (max_entries is None):
            raise ValueError(
                f"max_items={max_items} and max_entries={max_entries}: give both, for tables of fixed sizes, or none"
            )
        self.device, self.max_items, self.max_parts, self.max_entries = device, max_items, max_parts, max_entries
        self.arguments: tuple[Any, ...] | None = None
        self.shape: tuple[int, int, int] = (0, 0, 0)
        self._held: dict[str, Tensor] = {}

    @property
    def processors(self) -> int:
        return device_of(self.device).processors if self.device.type == "cuda" else 1

    def room_for_items(self, most: int) -> int:
        return most + self.max_parts if self.max_items is None else self.max_items

    def write(self, name: str, rows: Tensor, size: int | None) -> Tensor:
        """Return a tensor that begins with these rows, the same each time if there is a ``size``.

        ValueError if they have no room there.
        """
        if size is None or self.max_entries is None:
            return rows.to(self.device)
        held = self._held.setdefault(name, torch.zeros((size, *rows.shape[1:]), dtype=rows.dtype, device=self.device))
        if len(rows) > len(held) or rows.shape[1:] != held.shape[1:]:
            raise ValueError(f"{name}: there is room for {tuple(held.shape)}; got {tuple(rows.shape)}")
        held[: len(rows)].copy_(rows)
        return held

    def write_items(self, items: NDArray[np.int32]) -> Tensor:
        used = items if self.max_items is not None else items[items[:, 2] > 0]
        return self.write("work_items", torch.from_numpy(used), self.max_items)

    def planned(self, query: Tensor) -> tuple[Any, ...]:
        """Return the op's arguments after the values, for queries ``[M, H, D]``."""
        if self.arguments is None:
            raise RuntimeError("call plan() before run()")
        if query.shape != self.shape:
            raise ValueError(f"q must be {self.shape}, as planned; got {tuple(query.shape)}")
        return self.arguments


class _Wrapper:
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        backend: str = "auto",
        *,
        max_items: int | None = None,
        max_parts: int = PARTS,
        max_entries: int | None = None,
    ) -> None:
        """Make a wrapper for a device.

        Args:
            float_workspace_buffer: any tensor on the device; it is not written.
            backend: there is one; not read.
            max_items: work items that plans may make; None for any.
            max_parts: partial results that plans may make, of each kv head; with fewer, long rows are shared by fewer
                programs.
            max_entries: blocks that plans may have; where blocks have any sizes, pieces of up to 64 keys, of all rows
                and kv heads. None for any.
        """
        self._tables = _Tables(float_workspace_buffer.device, max_items, max_parts, max_entries)


class BlockSparseAttentionWrapper(_Wrapper):
    """``block_sparse_attention`` with FlashInfer's arguments."""

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        M: int,  # noqa: N803  FlashInfer's names
        N: int,  # noqa: N803
        R: int,  # noqa: N803
        C: int,  # noqa: N803
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: Tensor | None = None,
        packed_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype = "float16",
        non_blocking: bool = True,
        block_mask: Tensor | None = None,
    ) -> None:
        """Decide on the host how the blocks are divided, and put the tables on the device.

        Args:
            indptr: ``[MB + 1]``, where each row of blocks begins in ``indices``; on any device, of any integer type.
            indices: ``[X]``, columns of blocks.
            M: queries, a multiple of R.
            N: keys, a multiple of C.
            R: queries of a block.
            C: keys of a block.
            num_qo_heads: H.
            num_kv_heads: K.
            head_dim: D.
            mask: ``[X, R, C]`` bool, which keys of each block its queries see; None if they see all.
            packed_mask: must be None.
            causal: must be False; give a mask.
            pos_encoding_mode: must be "NONE".
            use_fp16_qk_reduction: not read: sums are float32.
            logits_soft_cap: ``cap * tanh(logits / cap)`` after scaling; None or 0.0 for none.
            sm_scale: factor on the logits; None for ``D ** -0.5``.
            rope_scale: not read without rotary embeddings, like ``rope_theta``.
            rope_theta: as ``rope_scale``.
            q_data_type: not read: dtypes are those of the states.
            kv_data_type: not read.
            o_data_type: not read.
            non_blocking: not read.
            block_mask: must be None.

        Raises:
            ValueError: blocks do not divide queries or keys, the matrix is none, or tables have no room for it.
        """
        _refuse(packed_mask=packed_mask, causal=causal or None, block_mask=block_mask, **_rotation(pos_encoding_mode))
        tables, host = self._tables, (_on_host(indptr), _on_host(indices))
        sizes = (M, N, R, C, num_qo_heads, num_kv_heads, head_dim, tables.processors)
        items = block_sparse_items(*host, *sizes, tables.room_for_items(M), tables.max_parts)
        entries = tables.max_entries
        tables.arguments = (
            tables.write("indptr", indptr.int(), len(indptr)),
            tables.write("indices", indices.int(), entries),
            tables.write_items(items),
            R,
            C,
            tables.max_parts,
            head_dim**-0.5 if sm_scale is None else sm_scale,
            logits_soft_cap or 0.0,
            None if mask is None else tables.write("mask", mask.bool().contiguous(), entries),
        )
        tables.shape = (M, num_qo_heads, head_dim)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale_q: Tensor | None = None,
        scale_k: Tensor | None = None,
        scale_v: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend as planned.

        Args:
            q: ``[M, H, D]``.
            k: ``[N, K, D]``.
            v: ``[N, K, D]``.
            scale_q: must be None, like ``scale_k`` and ``scale_v``.
            scale_k: as ``scale_q``.
            scale_v: as ``scale_q``.
            out: ``[M, H, D]``, written and returned if given.
            lse: ``[M, H]`` float32, likewise.
            return_lse: whether the log-sum-exp, in base 2, is returned, too.
            enable_pdl: not read.
        """
        _refuse(scale_q=scale_q, scale_k=scale_k, scale_v=scale_v)
        arguments: list[Any] = [q, k, v, *self._tables.planned(q)]
        if not return_lse:
            return _into(out, block_sparse_attention(*arguments))
        found, found_lse = block_sparse_attention_lse(*arguments)
        return _into(out, found), _into(lse, found_lse)


class VariableBlockSparseAttentionWrapper(_Wrapper):
    """``variable_block_sparse_attention`` with FlashInfer's arguments."""

    def plan(
        self,
        block_mask_map: Tensor,
        block_row_sz: Tensor,
        block_col_sz: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> None:
        """Decide on the host how the blocks are divided, and put the tables on the device.

        Args:
            block_mask_map: ``[K, MB, NB]`` bool, whether a row of blocks reads a column.
            block_row_sz: ``[K, MB]``, queries of each row; of each kv head M in all.
            block_col_sz: ``[K, NB]``, keys of each column; of each kv head N in all.
            num_qo_heads: H.
            num_kv_heads: K.
            head_dim: D.
            causal: must be False.
            pos_encoding_mode: must be "NONE".
            use_fp16_qk_reduction: not read: sums are float32.
            logits_soft_cap: ``cap * tanh(logits / cap)`` after scaling; None or 0.0 for none.
            sm_scale: factor on the logits; None for ``D ** -0.5``.
            rope_scale: not read without rotary embeddings, like ``rope_theta``.
            rope_theta: as ``rope_scale``.
            non_blocking: not read.
            q_data_type: not read: dtypes are those of the states.
            kv_data_type: not read.

        Raises:
            ValueError: sizes and map do not fit together, or tables have no room for them.
        """
        _refuse(causal=causal or None, **_rotation(pos_encoding_mode))
        if len(block_mask_map) != num_kv_heads:
            raise ValueError(
                f"block_mask_map must be [{num_kv_heads}, MB, NB], one a kv head; got {tuple(block_mask_map.shape)}"
            )
        tables, blocks = self._tables, (block_mask_map.bool(), block_row_sz.int(), block_col_sz.int())
        host = _on_host(blocks[0]), _on_host(blocks[1]), _on_host(blocks[2])
        entries, room = tables.max_entries, tables.room_for_items(int(host[1].sum()))
        most = most_pieces(host[0], host[2]) if entries is None else entries
        made = variable_block_sparse_tables(
            *host, num_qo_heads, head_dim, tables.processors, room, tables.max_parts, most
        )
        tables.arguments = (
            *(own.to(tables.device) for own in blocks),
            tables.write_items(made.work_items),
            tables.write("pieces", torch.from_numpy(made.pieces), entries),
            tables.max_parts,
            head_dim**-0.5 if sm_scale is None else sm_scale,
            logits_soft_cap or 0.0,
        )
        tables.shape = (int(host[1][0].sum()), num_qo_heads, head_dim)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend as planned.

        Args:
            q: ``[H, M, D]``.
            k: ``[K, N, D]``.
            v: ``[K, N, D]``.
            out: ``[H, M, D]``, written and returned if given.
            lse: ``[H, M]`` float32, likewise.
            return_lse: whether the log-sum-exp, in base 2, is returned, too.
            enable_pdl: not read.
        """
        by_token = [states.transpose(0, 1) for states in (q, k, v)]
        arguments: list[Any] = [*by_token, *self._tables.planned(by_token[0])]
        if not return_lse:
            return _into(out, variable_block_sparse_attention(*arguments).transpose(0, 1))
        found, found_lse = variable_block_sparse_attention_lse(*arguments)
        return _into(out, found.transpose(0, 1)), _into(lse, found_lse.transpose(0, 1))


def _into(given: Tensor | None, found: Tensor) -> Tensor:
    return found if given is None else given.copy_(found)


def _rotation(mode: str) -> dict[str, Any]:
    return {"pos_encoding_mode": None if mode == "NONE" else mode}


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            shown = f"{tuple(value.shape)} tensor" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{name}={shown} has no kernel here; leave it out")


def _on_host(tensor: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.detach().cpu().numpy()
    return array
