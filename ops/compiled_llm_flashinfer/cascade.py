"""FlashInfer's merges of results over parts of the keys, and its wrappers of rows that share some."""

# Rows share levels of pages, or one prefix that all begin with. Each part of the keys is attended to by all queries
# that see it, and the results are merged by their log-sum-exps.
# Shapes: B rows, T packed tokens, H query heads, K kv heads, D head dimension, P pages, S page size, N entries of the
# page table, or states to merge, L tokens of the prefix.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_llm_flashinfer.arguments import Positions
from compiled_llm_flashinfer.attend import BatchTable, Logits, attend
from compiled_llm_flashinfer.layouts import Pages, check_layout, paged
from compiled_llm_flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    single_prefill_with_kv_cache_return_lse,
)
from compiled_llm_flashinfer.workspace import Planned, as_index
from compiled_llm_ops.attention import merge


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge results ``[T, H, D]`` over different keys by log-sum-exps ``[T, H]`` in base 2, made float32."""
    return merge.merge_state(v_a, s_a.to(torch.float32), v_b, s_b.to(torch.float32))


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Merge results ``[T, N, H, D]`` over different keys by log-sum-exps ``[T, N, H]`` in base 2, made float32."""
    return merge.merge_states(v, s.to(torch.float32))


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """Merge a second result of attention, over other keys, into the first, at tokens of the ``mask`` ``[T]`` bool.

    ``v`` ``[T, H, D]`` and ``s`` ``[T, H]`` float32 are contiguous, and written; those of the other are alike.
    """
    merge.merge_state_in_place(v, s, v_other, s_other.to(torch.float32), None if mask is None else mask.to(torch.bool))


_Buffers = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class MultiLevelCascadeAttentionWrapper:
    """Attention over levels of pages: those of the first levels are shared by rows, those of the last are a row's."""

    # A level divides the same queries into rows of its own, and says where the keys of these lie.

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Sequence[Tensor] | None = None,
        paged_kv_indptr_buf_arr: Sequence[Tensor] | None = None,
        paged_kv_indices_buf_arr: Sequence[Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: Sequence[Tensor] | None = None,
    ) -> None:
        """Make a wrapper for a device, with at least one level; with CUDA graphs, buffers are those of each level."""
        if num_levels < 1:
            raise ValueError(f"num_levels must be at least 1; got {num_levels}")
        self._use_cuda_graph = use_cuda_graph
        self._levels = num_levels
        buffers: list[_Buffers] = [(None, None, None, None)] * num_levels
        if use_cuda_graph:
            columns = self._checked_levels(
                qo_indptr_buf_arr=qo_indptr_buf_arr,
                paged_kv_indptr_buf_arr=paged_kv_indptr_buf_arr,
                paged_kv_indices_buf_arr=paged_kv_indices_buf_arr,
                paged_kv_last_page_len_buf_arr=paged_kv_last_page_len_buf_arr,
            )
            buffers = [(first, second, third, fourth) for first, second, third, fourth in zip(*columns, strict=True)]
        self._buffers = buffers
        self._wrappers = [
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, use_cuda_graph, *own)
            for own in buffers
        ]

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether plans write to the user's buffers."""
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffers: Sequence[Tensor]) -> None:
        """Name another device's workspace; nothing is written, and ``int_workspace_buffers`` are not read."""
        self._checked_levels(int_workspace_buffers=int_workspace_buffers)
        for wrapper, own in zip(self._wrappers, int_workspace_buffers, strict=True):
            wrapper.reset_workspace_buffer(float_workspace_buffer, own)

    def plan(
        self,
        qo_indptr_arr: Sequence[Tensor],
        paged_kv_indptr_arr: Sequence[Tensor],
        paged_kv_indices_arr: Sequence[Tensor],
        paged_kv_last_page_len: Sequence[Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> None:
        """Say where queries and pages of each level lie, and how logits are made.

        Positions, and windows with them, count from the first key of a level; ``causal`` holds in the last level alone.
        ``q_data_type`` is that of results, too.
        """
        tables = self._checked_levels(
            qo_indptr_arr=qo_indptr_arr,
            paged_kv_indptr_arr=paged_kv_indptr_arr,
            paged_kv_indices_arr=paged_kv_indices_arr,
            paged_kv_last_page_len=paged_kv_last_page_len,
        )
        ends = [int(own[-1]) for own in qo_indptr_arr]
        if len(set(ends)) > 1:
            raise ValueError(f"qo_indptr_arr must end with one number of queries in all levels; got {ends}")
        for level in range(self._levels):
            self._check_tables(level, [column[level] for column in tables])
        for level, wrapper in enumerate(self._wrappers):
            qo_indptr, indptr, indices, last_page_len = (column[level] for column in tables)
            wrapper.plan(
                qo_indptr, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
                causal=causal and level == self._levels - 1, pos_encoding_mode=pos_encoding_mode, sm_scale=sm_scale,
                window_left=window_left, logits_soft_cap=logits_soft_cap, rope_scale=rope_scale, rope_theta=rope_theta,
                q_data_type=q_data_type, kv_data_type=kv_data_type,
            )  # fmt: skip

    begin_forward = plan

    def run(self, q: Tensor, paged_kv_cache: Pages) -> Tensor:
        """Attend as planned, with ``q`` ``[T, H, D]`` over pages of all levels; return ``[T, H, D]``."""
        out, lse = self._wrappers[-1].run_return_lse(q, paged_kv_cache)
        for wrapper in self._wrappers[:-1]:
            merge_state_in_place(out, lse, *wrapper.run_return_lse(q, paged_kv_cache))
        return out

    forward = run

    def _check_tables(self, level: int, tables: Sequence[Tensor]) -> None:
        """Raise ValueError if a level's tables fit neither each other nor their buffers; nothing is written before."""
        rows = len(tables[0]) - 1
        if len(tables[1]) != rows + 1 or len(tables[3]) != rows:
            found = [len(table) for table in tables]
            raise ValueError(f"level {level} must have tables of {rows} rows: [B + 1], [B + 1], [N], [B]; got {found}")
        for table, buffer in zip(tables, self._buffers[level], strict=True):
            if buffer is not None and len(table) > len(buffer):
                raise ValueError(f"buffers of level {level} have room for {len(buffer)} entries; got {len(table)}")

    def _checked_levels(self, **columns: Sequence[Tensor] | None) -> list[Sequence[Tensor]]:
        """Return columns; ValueError if one has not a tensor for each level."""
        checked = []
        for name, column in columns.items():
            if column is None or len(column) != self._levels:
                found = None if column is None else len(column)
                raise ValueError(f"{name} must have a tensor for each of {self._levels} levels; got {found}")
            checked.append(column)
        return checked


class _SharedPrefixWrapper(Planned):
    """Rows that begin with one prefix, whose keys lie outside of the pages; all queries see all of it."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        check_layout(kv_layout)
        super().__init__(float_workspace_buffer, use_cuda_graph=False)
        self._kv_layout = kv_layout
        self._table: BatchTable | None = None
        self._tokens = 0

    def _plan(self, qo_indptr: Tensor | None, indptr: Tensor, indices: Tensor, last_page_len: Tensor) -> None:
        rows = len(last_page_len)
        for name, column in (("qo_indptr", qo_indptr), ("indptr", indptr)):
            if column is not None and len(column) != rows + 1:
                raise ValueError(f"{name} must be [{rows + 1}] for {rows} rows; got [{len(column)}]")
        pages = (as_index(own).to(self.device) for own in (indptr, indices, last_page_len))
        self._table = BatchTable(None if qo_indptr is None else as_index(qo_indptr).to(self.device), *pages)
        self._tokens = rows if qo_indptr is None else int(qo_indptr[-1])

    def _attend(
        self, q: Tensor, k_shared: Tensor, v_shared: Tensor, pages: Pages, causal: bool, sm_scale: float | None
    ) -> Tensor:
        if self._table is None:
            raise RuntimeError("call begin_forward() before forward()")
        if q.dim() != 3 or q.shape[0] != self._tokens:
            raise ValueError(f"q must be [{self._tokens}, H, D], as planned; got {tuple(q.shape)}")
        keys, values = paged(pages, self._kv_layout)
        out, lse = single_prefill_with_kv_cache_return_lse(
            q, k_shared, v_shared, kv_layout=self._kv_layout, sm_scale=sm_scale
        )
        own, own_lse = torch.empty_like(out), torch.empty_like(lse)
        how = Logits(causal, -1, 0.0, sm_scale, Positions())
        attend(q, keys, values, own, own_lse, self._table, how, logit_scales={}, value_scales={})
        merge_state_in_place(out, lse, own, own_lse)
        return out


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_SharedPrefixWrapper):
    """Decode of rows that begin with one prefix; FlashInfer recommends ``MultiLevelCascadeAttentionWrapper``."""

    def begin_forward(
        self,
        unique_kv_indptr: Tensor,
        unique_kv_indices: Tensor,
        unique_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: str | torch.dtype = "float16",
    ) -> None:
        """Say where the pages of rows lie, without the prefix; sizes and ``data_type`` are not read."""
        self._plan(None, unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len)

    def forward(self, q: Tensor, k_shared: Tensor, v_shared: Tensor, unique_kv_cache: Pages) -> Tensor:
        """Attend with one query a row, ``[B, H, D]``, and a prefix's ``k_shared`` and ``v_shared``, like ``k``."""
        return self._attend(q, k_shared, v_shared, unique_kv_cache, causal=False, sm_scale=None)


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(_SharedPrefixWrapper):
    """Prefill of rows that begin with one prefix; FlashInfer recommends ``MultiLevelCascadeAttentionWrapper``."""

    def begin_forward(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        """Say where queries and the pages of rows lie, without the prefix; sizes are not read."""
        self._plan(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)

    def forward(
        self,
        q: Tensor,
        k_shared: Tensor,
        v_shared: Tensor,
        unique_kv_cache: Pages,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor:
        """Attend with the last queries of each row, and the prefix's ``k_shared`` and ``v_shared``, like ``k``.

        ``rope_scale`` and ``rope_theta`` are not read: there is no rotation.
        """
        return self._attend(q, k_shared, v_shared, unique_kv_cache, causal, sm_scale)
