"""FlashInfer's decode: one query a row, or equally many, over one row or over pages."""

# Shapes: B rows, Q queries of a row, T = B * Q, H query heads, K kv heads, D head dimension, L tokens of the one row, P
# pages, S page size, N entries of the page table.

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from compiled_llm_flashinfer.arguments import (
    DataTypes,
    Scale,
    check_backend,
    data_types,
    refuse,
)
from compiled_llm_flashinfer.attend import BatchTable, Logits, attend, logits
from compiled_llm_flashinfer.layouts import Pages, check_layout, paged, ragged
from compiled_llm_flashinfer.workspace import PlannedRun, as_index, without_lse


def single_decode_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: Scale = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend with one query ``[H, D]`` over one row; ``use_tensor_cores`` is not read.

    Returns:
        ``[H, D]`` of the query's dtype and, if wanted, ``[H]`` float32: the log-sum-exp in base 2.
    """
    if q.dim() != 2:
        raise ValueError(f"q must be [H, D]; got {tuple(q.shape)}")
    keys, values = ragged("k", k, kv_layout), ragged("v", v, kv_layout)
    how = logits(
        q.shape[0], q.device, causal=False, pos_encoding_mode=pos_encoding_mode, window_left=window_left,
        logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta,
    )  # fmt: skip
    out = torch.empty((1, q.shape[0], values.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.empty((1, q.shape[0]), dtype=torch.float32, device=q.device) if return_lse else None
    scales: dict[str, Scale] = {"q_scale": q_scale, "k_scale": k_scale}
    attend(
        q[None], keys, values, out, lse, BatchTable(), how, logit_scales=scales, value_scales={"v_scale": v_scale}
    )  # fmt: skip
    return out[0] if lse is None else (out[0], lse[0])


class BatchDecodeWithPagedKVCacheWrapper(PlannedRun):
    """Decode over pages: ``plan`` says where they lie, ``run`` attends."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        """Make a wrapper for a device; ``use_tensor_cores`` is not read, and ``jit_args`` must be None."""
        check_layout(kv_layout)
        check_backend(backend)
        refuse(jit_args=jit_args)
        super().__init__(float_workspace_buffer, use_cuda_graph)
        self._kv_layout = kv_layout
        self._use_tensor_cores = use_tensor_cores
        self._indptr_buffer = self._buffer("paged_kv_indptr_buffer", paged_kv_indptr_buffer)
        self._indices_buffer = self._buffer("paged_kv_indices_buffer", paged_kv_indices_buffer)
        self._last_page_len_buffer = self._buffer("paged_kv_last_page_len_buffer", paged_kv_last_page_len_buffer)
        self._check_rows(self._indptr_buffer, self._last_page_len_buffer, "buffer")

    @property
    def use_tensor_cores(self) -> bool:
        """What the wrapper was made with."""
        return self._use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> None:
        """Say where pages lie, and how logits are made; ``data_type`` is the dtype of what is None.

        ``seq_lens``, ``head_dim``, ``page_size`` and ``q_len_per_req`` are not read; ``block_tables`` must be None.
        """
        refuse(block_tables=block_tables)
        self._check_rows(indptr, last_page_len, "table")
        types = data_types(
            (data_type or "float16") if q_data_type is None else q_data_type,
            data_type if kv_data_type is None else kv_data_type,
            o_data_type,
        )
        how = logits(
            num_qo_heads, self.device, causal=True, pos_encoding_mode=pos_encoding_mode, window_left=window_left,
            logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta,
            one_order=disable_split_kv or fixed_split_size is not None,
        )  # fmt: skip
        tables = self._place(
            non_blocking,
            paged_kv_indptr_buffer=(as_index(indptr), self._indptr_buffer),
            paged_kv_indices_buffer=(as_index(indices), self._indices_buffer),
            paged_kv_last_page_len_buffer=(as_index(last_page_len), self._last_page_len_buffer),
        )
        self._planned(tables, num_qo_heads, types, how)

    begin_forward = plan

    def _check_rows(self, indptr: Tensor | None, last_page_len: Tensor | None, what: str) -> None:
        if indptr is None or last_page_len is None:
            return
        rows = len(last_page_len)
        if len(indptr) != rows + 1:
            raise ValueError(f"the {what} of indptr must be [{rows + 1}] for {rows} rows; got [{len(indptr)}]")
        if self._last_page_len_buffer is not None and len(self._last_page_len_buffer) != rows:
            raise ValueError(
                f"with CUDA graphs the batch is always {len(self._last_page_len_buffer)}, as buffers are; got {rows}"
            )

    def _planned(self, tables: list[Tensor], heads: int, types: DataTypes, how: Logits) -> None:
        indptr, indices, last_page_len = tables
        self._paged_kv_indptr_buf = indptr
        self._paged_kv_indices_buf = indices
        self._paged_kv_last_page_len_buf = last_page_len
        self._table = BatchTable(None, indptr, indices, last_page_len)
        self._heads = heads
        self._types = types
        self._how = how

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Pages,
        *args: Scale,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Pages | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend as planned. With several queries a row, each sees the keys up to its own position.

        ``enable_pdl`` is not read; ``sinks``, ``skip_softmax_threshold_scale_factor`` and ``kv_cache_sf`` must be None.

        Args:
            *args: scales of queries, keys and values in fp8, ``[H]`` or ``[K]`` float32.
            window_left: as planned, or None.
            q_len_per_req: deprecated: Q, which is checked.

        Returns:
            ``[T, H, D]`` of the planned dtype and, if wanted, ``[T, H]`` float32.
        """
        refuse(
            sinks=sinks,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            kv_cache_sf=kv_cache_sf,
        )
        table = self._planned_table(window_left)
        keys, values = paged(paged_kv_cache, self._kv_layout)
        self._types.check(q, keys)
        self._check_run(q, q_len_per_req)
        return self._attend(
            q, keys, values, table, out, lse, return_lse, self._types.result, args,
            q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip

    def _check_run(self, q: Tensor, q_len_per_req: int | None) -> None:
        rows = self._paged_kv_last_page_len_buf.shape[0]
        if q.dim() != 3 or q.shape[0] % max(1, rows):
            raise ValueError(f"q must be [T, H, D], T a multiple of {rows} rows; got {tuple(q.shape)}")
        if q_len_per_req is None:
            return
        warnings.warn("run(q_len_per_req) is deprecated: give it to plan()", DeprecationWarning, stacklevel=3)
        if q.shape[0] != rows * q_len_per_req:
            raise ValueError(
                f"q must have {rows} * {q_len_per_req} queries, rows times q_len_per_req; got {tuple(q.shape)}"
            )

    def forward_return_lse(
        self,
        q: Tensor,
        paged_kv_cache: Pages,
        pos_encoding_mode: str = "NONE",
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Deprecated: ``run_return_lse``, after how logits are made was planned anew. Arguments as of both."""
        self._plan_logits(
            causal=True, pos_encoding_mode=pos_encoding_mode, window_left=window_left, logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta,
        )  # fmt: skip
        return self.run_return_lse(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)

    forward = without_lse(forward_return_lse)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """``BatchDecodeWithPagedKVCacheWrapper`` with ``use_cuda_graph=True``."""

    def __init__(
        self,
        workspace_buffer: Tensor,
        indptr_buffer: Tensor,
        indices_buffer: Tensor,
        last_page_len_buffer: Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        """Make a wrapper for a device; arguments as of the other, buffers first."""
        super().__init__(
            workspace_buffer,
            kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=use_tensor_cores,
            paged_kv_indptr_buffer=indptr_buffer,
            paged_kv_indices_buffer=indices_buffer,
            paged_kv_last_page_len_buffer=last_page_len_buffer,
        )


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: str | torch.dtype | None = None,
    kv_data_type: str | torch.dtype | None = None,
    data_type: str | torch.dtype | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    global_override_indptr_cpu: Tensor | None = None,
) -> None:
    """``plan`` without copies: with CUDA graphs, the caller has written to the buffers.

    ``global_override_indptr_cpu`` is not read, nor is a table on the host: without CUDA graphs tables lie on the
    device.
    """
    if self.is_cuda_graph_enabled:
        given = {"indptr": indptr, "indices": indices, "last_page_len": last_page_len}
        buffers = (self._indptr_buffer, self._indices_buffer, self._last_page_len_buffer)
        for (name, table), buffer in zip(given.items(), buffers, strict=True):
            if buffer is not None and len(table) > len(buffer):
                raise ValueError(f"{name} has room for {len(buffer)} entries in its buffer; got {len(table)}")
        indptr, indices, last_page_len = (
            table if buffer is None else buffer for table, buffer in zip(given.values(), buffers, strict=True)
        )
    BatchDecodeWithPagedKVCacheWrapper.plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode,
        window_left, logits_soft_cap, q_data_type, kv_data_type, None, data_type, sm_scale, rope_scale, rope_theta,
        non_blocking, None, None, fixed_split_size, disable_split_kv,
    )  # fmt: skip
