"""FlashInfer's two wrappers of block-sparse attention."""

# Plain ones run by ``block_sparse_attention`` and ``variable_block_sparse_attention``, whose work is divided on the
# host. Those with causal blocks, positions, packed masks, fp8, or what else these have no kernel for, run by
# ``strided_attention``: each row of blocks is a row whose pages are the blocks that it reads.
# With ``max_items`` and ``max_entries``, which FlashInfer lacks, a wrapper's tables have fixed sizes and addresses, so
# that a captured ``run`` follows each later ``plan``.
# Shapes: M queries, N keys, H query heads, K kv heads, D head dimension, R queries of a block, C keys of a block, MB
# rows and NB columns of blocks, X blocks or pieces of keys.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_llm_flashinfer.arguments import (
    as_dtype,
    data_types,
    results_like,
    softmax_scale,
)
from compiled_llm_flashinfer.attend import BatchTable, attend, logits
from compiled_llm_flashinfer.ops.sparse.block_sparse import block_sparse_attention, block_sparse_attention_lse
from compiled_llm_flashinfer.ops.sparse.variable import (
    variable_block_sparse_attention,
    variable_block_sparse_attention_lse,
)
from compiled_llm_flashinfer.ops.sparse.work_items import block_sparse_items, most_pieces, variable_block_sparse_tables
from compiled_llm_flashinfer.sparse_tables import SparseWrapper, bits_of, on_host, refuse_scales, tokens_of


class BlockSparseAttentionWrapper(SparseWrapper):
    """Rows of R queries that each read some blocks of C keys."""

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
    ) -> None:
        """Say which blocks there are, and decide on the host how they are divided; ``non_blocking`` is not read.

        Args:
            indptr: ``[MB + 1]``, where each row of blocks begins in ``indices``; on any device, of any integer type.
            indices: ``[X]``, columns of blocks.
            M: queries; the last row may have fewer than R.
            N: keys, a multiple of C.
            R: queries of a block; C keys of a block.
            mask: ``[X, R, C]`` bool, which keys of each block its queries see; None if they see all.
            packed_mask: uint8, the same for all keys of a row, ``[R, n * C]`` bits for its n blocks, as of
                ``segment_packbits`` with ``bitorder="little"``; then the other is not read.
            causal: without a mask: whether the last queries of a row see no keys after their own place among its
                blocks; ``pos_encoding_mode`` goes by these places, too.
            o_data_type: dtype of results; float16 as in FlashInfer, whatever the queries have.
        """
        types, short = data_types(q_data_type, kv_data_type, None), M % R if R > 0 else 0
        how = logits(
            num_qo_heads, self.device, causal=causal, pos_encoding_mode=pos_encoding_mode, window_left=-1,
            logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta,
        )  # fmt: skip
        plain = (not causal or mask is not None) and pos_encoding_mode == "NONE" and packed_mask is None and not short
        if short and mask is not None and packed_mask is None:
            raise ValueError(f"mask must be packed where R={R} does not divide M={M}; give packed_mask")
        whole = M - short + (R if short else 0)
        sizes = (whole, N, R, C, num_qo_heads, num_kv_heads, head_dim, self._processors)
        host = on_host(indptr), on_host(indices)
        items = block_sparse_items(*host, *sizes, self._room_for_items(whole), self._max_parts)
        entries = self._max_entries
        matrix = {"indptr": (indptr.int(), len(indptr)), "indices": (indices.int(), entries)}
        if plain and self._has_own_kernel(head_dim, types.query, types.states):
            masks = {} if mask is None else {"mask": (mask.bool().contiguous(), entries)}
            begins, numbers, work, *own = self._write(**matrix, work_items=self._items(items), **masks)
            self._arguments = (begins, numbers, work, *(own or (None,)))
            self._table = None
        else:
            starts = torch.arange(len(indptr), dtype=torch.int32, device="cpu") * R
            starts[-1] = M
            bits = bits_of(mask, packed_mask, starts, indptr.cpu(), C)
            room = None if entries is None else entries * -(-R * C // 8) + len(indptr)
            masks = {} if bits is None else {"mask_bits": (bits[0], room), "mask_indptr": (bits[1], len(indptr))}
            begins, numbers, queries, *own = self._write(**matrix, qo_indptr=(starts, len(indptr)), **masks)
            self._arguments = None
            self._table = BatchTable(queries, begins, numbers, None, *own)
        self._how = how
        self._mode = pos_encoding_mode
        self._blocks = (R, C)
        self._result = as_dtype(o_data_type)
        self._shape = (M, num_qo_heads, head_dim)
        self._keys = (N, num_kv_heads, head_dim)

    begin_forward = plan

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
        """Attend as planned, with ``q`` and ``out`` ``[M, H, D]``, ``k`` and ``v`` ``[N, K, D]``, ``lse`` ``[M, H]``.

        ``enable_pdl`` is not read. With queries of fp8, ``scale_q`` ``[H]`` and ``scale_k`` ``[K]`` float32 are factors
        on the logits, ``scale_v`` ``[K]`` on the results.
        """
        self._check_run("q", q)
        for name, states in (("k", k), ("v", v)):
            if states.shape != self._keys:
                raise ValueError(f"{name} must be {self._keys}, as planned; got {tuple(states.shape)}")
        out, lse = results_like(out, lse, return_lse, self._shape, self._result, q)
        if self._table is None:
            refuse_scales(scale_q=scale_q, scale_k=scale_k, scale_v=scale_v)
            self._run_own(q, k, v, out, lse)
        else:
            keys, values = (states.unflatten(0, (-1, self._blocks[1])).transpose(1, 2) for states in (k, v))
            attend(
                q, keys, values, out, lse, self._table, self._how,
                logit_scales={"scale_q": scale_q, "scale_k": scale_k}, value_scales={"scale_v": scale_v},
            )  # fmt: skip
        return (out, lse) if return_lse and lse is not None else out

    def _run_own(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None) -> None:
        assert self._arguments is not None, "it is planned"
        *tables, mask = self._arguments
        scale = softmax_scale(self._how.sm_scale, q.shape[2])
        how = (*self._blocks, self._max_parts, scale, self._how.logits_soft_cap, mask)
        arguments: list[Any] = [q, k, v, *tables, *how]
        if lse is None:
            out.copy_(block_sparse_attention(*arguments))
        else:
            found, found_lse = block_sparse_attention_lse(*arguments)
            out.copy_(found)
            lse.copy_(found_lse)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale_q: Tensor | None = None,
        scale_k: Tensor | None = None,
        scale_v: Tensor | None = None,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor:
        """Attend with other logits than were planned, of the same positions; FlashInfer has it for old code."""
        self._plan_again(pos_encoding_mode, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        out = self.run(q, k, v, scale_q, scale_k, scale_v)
        assert isinstance(out, Tensor)
        return out


class VariableBlockSparseAttentionWrapper(SparseWrapper):
    """Blocks of any sizes, of each kv head its own."""

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
        """Say which blocks there are, and decide on the host how they are divided; ``non_blocking`` is not read.

        Args:
            block_mask_map: ``[K, MB, NB]`` bool, whether a row of blocks reads a column.
            block_row_sz: ``[K, MB]``, queries of each row; of each kv head M in all.
            block_col_sz: ``[K, NB]``, keys of each column; of each kv head N in all.
            causal: whether the last queries of a row see no keys after their own place among its blocks.
            pos_encoding_mode: by places among the blocks of a row; slopes of "ALIBI" are by the number of a query head
                in the group of its kv head.
        """
        if len(block_mask_map) != num_kv_heads:
            raise ValueError(
                f"block_mask_map must be [{num_kv_heads}, MB, NB], one a kv head; got {tuple(block_mask_map.shape)}"
            )
        types, group = data_types(q_data_type, kv_data_type, None), num_qo_heads // num_kv_heads
        how = logits(
            group, self.device, causal=causal, pos_encoding_mode=pos_encoding_mode, window_left=-1,
            logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta,
        )  # fmt: skip
        blocks = (block_mask_map.bool(), block_row_sz.int(), block_col_sz.int())
        host = on_host(blocks[0]), on_host(blocks[1]), on_host(blocks[2])
        entries, room = self._max_entries, self._room_for_items(int(host[1].sum()))
        plain = not causal and pos_encoding_mode == "NONE"
        own = plain and self._has_own_kernel(head_dim, types.query, types.states)
        most = most_pieces(host[0], host[2]) if entries is None or not own else entries
        sizes = (num_qo_heads, head_dim, self._processors)
        made = variable_block_sparse_tables(*host, *sizes, room, self._max_parts, most)
        if own:
            tables = {"work_items": self._items(made.work_items), "pieces": (torch.from_numpy(made.pieces), entries)}
            placed = self._write(**tables)
            self._arguments = (*(states.to(self.device) for states in blocks), *placed)
            self._table = None
        else:
            starts, begins, keys = tokens_of(*(torch.from_numpy(states) for states in host))
            placed = self._write(
                qo_indptr=(starts, len(starts)), kv_indptr=(begins, len(begins)), kv_indices=(keys, entries)
            )
            self._arguments = None
            self._table = BatchTable(*placed)
        self._how = how
        self._mode = pos_encoding_mode
        self._kv_heads = num_kv_heads
        self._shape = (int(host[1][0].sum()), num_qo_heads, head_dim)

    begin_forward = plan

    @property
    def _heads(self) -> int:
        return self._shape[1] // self._kv_heads

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
        """Attend as planned, with ``q`` and ``out`` ``[H, M, D]``, ``k`` and ``v`` ``[K, N, D]``, ``lse`` ``[H, M]``.

        ``enable_pdl`` is not read.
        """
        self._check_run("q, its first two axes exchanged,", q.transpose(0, 1))
        result, result_lse = results_like(out, lse, return_lse, tuple(q.shape), q.dtype, q)
        wants_lse = result_lse is not None
        found = self._own(q, k, v, wants_lse) if self._table is None else self._strided(q, k, v, self._table)
        result.copy_(found[0])
        if result_lse is not None:
            result_lse.copy_(found[1])
        return (result, result_lse) if return_lse and result_lse is not None else result

    def _own(self, q: Tensor, k: Tensor, v: Tensor, wants_lse: bool) -> tuple[Tensor, ...]:
        assert self._arguments is not None, "it is planned"
        by_token = (states.transpose(0, 1) for states in (q, k, v))
        scale = softmax_scale(self._how.sm_scale, q.shape[2])
        arguments: list[Any] = [*by_token, *self._arguments, self._max_parts, scale, self._how.logits_soft_cap]
        if wants_lse:
            return tuple(found.transpose(0, 1) for found in variable_block_sparse_attention_lse(*arguments))
        return (variable_block_sparse_attention(*arguments).transpose(0, 1),)

    def _strided(self, q: Tensor, k: Tensor, v: Tensor, table: BatchTable) -> tuple[Tensor, ...]:
        """Attend with the queries of a kv head as tokens of their own, over keys of one head."""
        grouped = q.unflatten(0, (self._kv_heads, -1)).transpose(1, 2).flatten(0, 1)
        out, lse = torch.empty_like(grouped), torch.empty(grouped.shape[:2], dtype=torch.float32, device=q.device)
        keys, values = (states.reshape(-1, 1, 1, states.shape[2]) for states in (k, v))
        attend(grouped, keys, values, out, lse, table, self._how, logit_scales={}, value_scales={})
        back = (found.unflatten(0, (self._kv_heads, -1)).transpose(1, 2).flatten(0, 1) for found in (out, lse))
        return tuple(back)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor:
        """Attend with other logits than were planned, of the same positions; FlashInfer has it for old code."""
        self._plan_again(pos_encoding_mode, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        out = self.run(q, k, v)
        assert isinstance(out, Tensor)
        return out
