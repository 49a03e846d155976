"""FlashInfer's prefill over keys and values that lie next to each other, row after row."""

# Shapes: B rows, T packed tokens, N tokens of keys, Q queries and L tokens of one row, H query heads, K kv heads, D
# head dimension of queries and keys, E that of values.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_llm_flashinfer.arguments import Scale, check_backend, data_types, refuse
from compiled_llm_flashinfer.attend import logits
from compiled_llm_flashinfer.layouts import check_layout, ragged
from compiled_llm_flashinfer.masks import packed_mask
from compiled_llm_flashinfer.workspace import PlannedPrefill, as_index, without_lse


class BatchPrefillWithRaggedKVCacheWrapper(PlannedPrefill):
    """Prefill without pages: ``plan`` says where rows begin, ``run`` attends."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        kv_indptr_buf: Tensor | None = None,
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
        self._qo_indptr_buffer = self._buffer("qo_indptr_buf", qo_indptr_buf)
        self._kv_indptr_buffer = self._buffer("kv_indptr_buf", kv_indptr_buf)
        if self._qo_indptr_buffer is not None:
            self._rows = len(self._qo_indptr_buffer) - 1
            self._check_rows(self._rows, kv_indptr_buf=(self._kv_indptr_buffer, 1))

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: Tensor | None = None,
        o_indptr: Tensor | None = None,
    ) -> None:
        """Say where queries and keys lie, and how logits are made; ``o_data_type`` is that of ``out``, if given.

        ``head_dim_qk``, ``head_dim_vo``, ``token_pos_in_items_len``, ``seq_lens``, ``seq_lens_q``,
        ``max_token_per_sequence`` and ``max_sequence_kv`` are not read; ``prefix_len_ptr``, ``token_pos_in_items_ptr``,
        ``max_item_len_ptr``, ``v_indptr`` and ``o_indptr`` must be None.

        Args:
            kv_indptr: ``[B + 1]``, where each row's keys and values begin.
        """
        refuse(
            prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr,
            max_item_len_ptr=max_item_len_ptr,
            v_indptr=v_indptr,
            o_indptr=o_indptr,
        )
        self._check_rows(len(qo_indptr) - 1, kv_indptr=(kv_indptr, 1))
        types = data_types(q_data_type, kv_data_type, o_data_type)
        how = logits(
            num_qo_heads, self.device, causal=causal, pos_encoding_mode=pos_encoding_mode, window_left=window_left,
            logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta,
            one_order=disable_split_kv or fixed_split_size is not None,
        )  # fmt: skip
        mask = packed_mask(custom_mask, packed_custom_mask, qo_indptr, kv_indptr[1:] - kv_indptr[:-1])
        placed = self._place_with_mask(
            non_blocking,
            mask,
            qo_indptr_buf=(as_index(qo_indptr), self._qo_indptr_buffer),
            kv_indptr_buf=(as_index(kv_indptr), self._kv_indptr_buffer),
        )
        self._planned(placed, num_qo_heads, qo_indptr, types, how)

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args: Scale,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        o_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend as planned; ``enable_pdl`` is not read, ``o_scale`` and ``kv_cache_sf`` must be None.

        Args:
            k: ``[N, K, D]`` (NHD) or ``[K, N, D]`` (HND), any strides; ``v`` likewise, with E.
            *args: scales of queries, keys and values in fp8, ``[H]`` or ``[K]`` float32.

        Returns:
            ``[T, H, E]`` of the queries' dtype (bfloat16 for fp8), or of the planned one where ``out`` is given and, if
                wanted, ``[T, H]`` float32.
        """
        refuse(o_scale=o_scale, kv_cache_sf=kv_cache_sf)
        table = self._checked(q, None)
        keys, values = ragged("k", k, self._kv_layout), ragged("v", v, self._kv_layout)
        self._types.check(q, keys)
        result = torch.bfloat16 if q.element_size() == 1 else q.dtype
        return self._attend(
            q, keys, values, table, out, lse, return_lse, result if out is None else self._types.result, args,
            q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip

    def forward_return_lse(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
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
        return self.run_return_lse(q, k, v)

    forward = without_lse(forward_return_lse)
