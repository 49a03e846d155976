"""FlashInfer's prefill: any number of queries a row, over one row or over pages; ``ragged`` has that without pages."""

# Shapes: B rows, T packed tokens, Q queries and L tokens of the one row, H query heads, K kv heads, D head dimension of
# queries and keys, E that of values, P pages, S page size, N entries of the page table.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_llm_flashinfer.arguments import (
    Scale,
    check_backend,
    data_types,
    refuse,
)
from compiled_llm_flashinfer.attend import BatchTable, attend, logits
from compiled_llm_flashinfer.layouts import Pages, check_layout, paged, ragged
from compiled_llm_flashinfer.masks import packed_mask
from compiled_llm_flashinfer.page import get_seq_lens
from compiled_llm_flashinfer.quantization import packbits
from compiled_llm_flashinfer.ragged import BatchPrefillWithRaggedKVCacheWrapper
from compiled_llm_flashinfer.workspace import PlannedPrefill, as_index, without_lse

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]


def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale_q: Tensor | None = None,
    scale_k: Tensor | None = None,
    scale_v: Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: tuple[Tensor, Tensor] | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend with the last queries of one row, ``[Q, H, D]``; ``kv_cache_sf`` must be None.

    Args:
        v: like ``k``, or of another head size E.
        scale_q: ``[H]`` float32 or one for all, factors on the logits, like ``scale_k`` ``[K]``.
        scale_v: ``[K]``, factors on the results.
        custom_mask: ``[Q, L]`` bool, or packed as of ``packbits``.

    Returns:
        ``[Q, H, E]`` and, if wanted, ``[Q, H]`` float32: the log-sum-exp in base 2.
    """
    refuse(kv_cache_sf=kv_cache_sf)
    check_backend(backend)
    if q.dim() != 3:
        raise ValueError(f"q must be [Q, H, D]; got {tuple(q.shape)}")
    keys, values = ragged("k", k, kv_layout), ragged("v", v, kv_layout)
    how = logits(
        q.shape[1], q.device, causal=causal, pos_encoding_mode=pos_encoding_mode, window_left=window_left,
        logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta,
    )  # fmt: skip
    mask, pairs = packed_custom_mask, q.shape[0] * keys.shape[0]
    if mask is None and custom_mask is not None:
        if custom_mask.numel() != pairs:
            raise ValueError(
                f"custom_mask must be [{q.shape[0]}, {keys.shape[0]}], queries and keys; got {tuple(custom_mask.shape)}"
            )
        mask = packbits(custom_mask, bitorder="little")
    elif mask is not None and mask.numel() < (pairs + 7) // 8:
        raise ValueError(f"packed_custom_mask must be [{(pairs + 7) // 8}] uint8; got {tuple(mask.shape)}")
    dtype = q.dtype if o_dtype is None else o_dtype
    out = torch.empty((*q.shape[:2], values.shape[3]), dtype=dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
    attend(
        q, keys, values, out, lse, BatchTable(mask=mask), how,
        logit_scales={"scale_q": scale_q, "scale_k": scale_k, "k_scale": k_scale},
        value_scales={"scale_v": scale_v, "v_scale": v_scale},
    )  # fmt: skip
    return out if lse is None else (out, lse)


def single_prefill_with_kv_cache_return_lse(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """``single_prefill_with_kv_cache`` with ``return_lse=True``."""
    out, lse = single_prefill_with_kv_cache(*args, **{**kwargs, "return_lse": True})
    return out, lse


class BatchPrefillWithPagedKVCacheWrapper(PlannedPrefill):
    """Prefill over pages: ``plan`` says where they lie, ``run`` attends."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Make a wrapper for a device; ``jit_args`` and ``jit_kwargs`` must be None.

        ``custom_mask_buf``, uint8, has room for the largest mask; ``mask_indptr_buf`` is ``[B + 1]``. None without
        masks.
        """
        check_layout(kv_layout)
        check_backend(backend)
        refuse(jit_args=jit_args, jit_kwargs=jit_kwargs)
        super().__init__(float_workspace_buffer, use_cuda_graph, custom_mask_buf, mask_indptr_buf)
        self._kv_layout = kv_layout
        self._buffers = {
            "qo_indptr_buf": self._buffer("qo_indptr_buf", qo_indptr_buf),
            "paged_kv_indptr_buf": self._buffer("paged_kv_indptr_buf", paged_kv_indptr_buf),
            "paged_kv_indices_buf": self._buffer("paged_kv_indices_buf", paged_kv_indices_buf),
            "paged_kv_last_page_len_buf": self._buffer("paged_kv_last_page_len_buf", paged_kv_last_page_len_buf),
        }
        if qo_indptr_buf is not None and use_cuda_graph:
            self._rows = len(qo_indptr_buf) - 1
            self._check_rows(
                self._rows,
                paged_kv_indptr_buf=(paged_kv_indptr_buf, 1),
                paged_kv_last_page_len_buf=(paged_kv_last_page_len_buf, 0),
            )

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
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
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Say where queries and pages lie, and how logits are made; ``page_size`` gives the sizes of masks.

        ``head_dim_qk``, ``head_dim_vo``, ``token_pos_in_items_len``, ``seq_lens``, ``seq_lens_q``,
        ``max_token_per_sequence`` and ``max_sequence_kv`` are not read; ``prefix_len_ptr``, ``token_pos_in_items_ptr``,
        ``max_item_len_ptr`` and ``block_tables`` must be None.
        """
        refuse(
            prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr,
            max_item_len_ptr=max_item_len_ptr,
            block_tables=block_tables,
        )
        self._check_rows(
            len(qo_indptr) - 1, paged_kv_indptr=(paged_kv_indptr, 1), paged_kv_last_page_len=(paged_kv_last_page_len, 0)
        )
        types = data_types(q_data_type, kv_data_type, o_data_type)
        how = logits(
            num_qo_heads, self.device, causal=causal, pos_encoding_mode=pos_encoding_mode, window_left=window_left,
            logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta,
            one_order=disable_split_kv or fixed_split_size is not None,
        )  # fmt: skip
        mask = None
        if custom_mask is not None or packed_custom_mask is not None:
            lengths = get_seq_lens(paged_kv_indptr, paged_kv_last_page_len, page_size)
            mask = packed_mask(custom_mask, packed_custom_mask, qo_indptr, lengths)
        tables = {
            "qo_indptr_buf": qo_indptr,
            "paged_kv_indptr_buf": paged_kv_indptr,
            "paged_kv_indices_buf": paged_kv_indices,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len,
        }
        placed = self._place_with_mask(
            non_blocking, mask, **{name: (as_index(table), self._buffers[name]) for name, table in tables.items()}
        )
        self._planned(placed, num_qo_heads, qo_indptr, types, how)

    begin_forward = plan

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
        kv_cache_sf: Pages | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend as planned.

        ``enable_pdl`` is not read; ``sinks``, ``kv_cache_sf`` and ``skip_softmax_threshold_scale_factor`` must be None.

        Args:
            *args: scales of queries, keys and values in fp8, ``[H]`` or ``[K]`` float32.
            window_left: as planned, or None.

        Returns:
            ``[T, H, E]`` of the planned dtype and, if wanted, ``[T, H]`` float32.
        """
        refuse(
            sinks=sinks,
            kv_cache_sf=kv_cache_sf,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        )
        table = self._checked(q, window_left)
        keys, values = paged(paged_kv_cache, self._kv_layout)
        self._types.check(q, keys)
        return self._attend(
            q, keys, values, table, out, lse, return_lse, self._types.result, args,
            q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip

    def forward_return_lse(
        self,
        q: Tensor,
        paged_kv_cache: Pages,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
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
            causal=causal, pos_encoding_mode=pos_encoding_mode, window_left=window_left,
            logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta,
        )  # fmt: skip
        return self.run_return_lse(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale)

    forward = without_lse(forward_return_lse)
