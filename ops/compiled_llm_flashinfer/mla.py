"""FlashInfer's attention over latents (multi-head latent attention), with absorbed queries."""

# Shapes: B rows, T packed tokens, H query heads, R latent size, E size of the rotated part, P pages, S page size, N
# entries of the page table.

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm_flashinfer.arguments import DataTypes, as_dtype, check_backend, refuse, results_like
from compiled_llm_flashinfer.ops.strided.latents import strided_latent_attention
from compiled_llm_flashinfer.workspace import Planned, as_index

CUTLASS_SCALE = 192**-0.5
"""Factor on logits with ``backend="cutlass"``, which has no plan: that of DeepSeek-V3, heads of 128 + 64."""


class _Table(NamedTuple):
    """Where rows lie, as ``strided_latent_attention`` takes it."""

    qo_indptr: Tensor
    indptr: Tensor
    indices: Tensor
    lengths: Tensor


class BatchMLAPagedAttentionWrapper(Planned):
    """Decode and prefill over pages of latents: ``plan`` says where they lie, ``run`` attends."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        """Make a wrapper for a device; with CUDA graphs, tables ``[B + 1]``, ``[B + 1]``, ``[N]`` and ``[B]`` int32.

        With ``backend="cutlass"`` there is no plan: ``run`` takes lengths and page numbers.
        """
        check_backend(backend)
        super().__init__(float_workspace_buffer, use_cuda_graph)
        self._without_plan = backend == "cutlass"
        buffers = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": kv_indices, "kv_len_arr": kv_len_arr}
        self._buffers = {name: self._buffer(name, buffer) for name, buffer in buffers.items()}
        self._table: _Table | None = None
        self._causal = False
        self._scale = CUTLASS_SCALE
        self._page_size = 0
        self._sizes = (0, 0, 0)
        self._tokens = 0
        self._types: DataTypes | None = None

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        """Say where rows lie.

        Args:
            kv_indptr: ``[B + 1]`` int32, where each row's pages begin in ``kv_indices``; more are not read.
            kv_len_arr: ``[B]`` int32, tokens of each row.
            sm_scale: factor on the logits: that of heads before absorption.
            use_profiler: must be False.
        """
        refuse(use_profiler=use_profiler or None)
        rows = len(kv_len_arr)
        for name, table in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
            if len(table) <= rows:
                raise ValueError(f"{name} must be [{rows + 1}] for {rows} rows of kv_len_arr; got [{len(table)}]")
        qo_indptr, kv_indptr = qo_indptr[: rows + 1], kv_indptr[: rows + 1]
        tables = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": kv_indices, "kv_len_arr": kv_len_arr}
        for name in ("qo_indptr", "kv_indptr", "kv_len_arr"):
            buffer = self._buffers[name]
            if buffer is not None and len(buffer) != len(tables[name]):
                raise ValueError(f"with CUDA graphs {name} must be [{len(buffer)}], as its buffer; got {rows} rows")
        placed = {name: (as_index(table), self._buffers[name]) for name, table in tables.items()}
        self._table = _Table(*self._place(True, **placed))
        self._tokens = int(qo_indptr[-1])
        self._causal = causal
        self._scale = sm_scale
        self._page_size = page_size
        self._sizes = (num_heads, head_dim_ckv, head_dim_kpe)
        query, states = as_dtype(q_data_type), as_dtype(kv_data_type)
        self._types = DataTypes(query, states, query)

    def run(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: Tensor | None = None,
        kv_len: Tensor | None = None,
        page_table: Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend as planned; ``profiler_buffer`` and ``o_scale`` must be None.

        Args:
            q_nope: ``[T, H, R]``, the part of queries that is not rotated, absorbed.
            q_pe: ``[T, H, E]``, the rotated part.
            ckv_cache: ``[P, S, R]``, latents, any strides.
            kpe_cache: ``[P, S, E]``, their rotated parts, any strides.
            kv_len: ``[B]``, tokens of each row, with ``backend="cutlass"``: one query a row.
            page_table: ``[B, n]``, page numbers of each row, likewise.
            return_lse_base_on_e: whether the log-sum-exp is the natural one; else it has base 2.

        Returns:
            ``[T, H, R]`` and, if wanted, ``[T, H]`` float32.
        """
        refuse(profiler_buffer=profiler_buffer, o_scale=o_scale)
        if self._without_plan:
            table = _table_of(q_nope, kv_len, page_table)
        else:
            table = self._checked(q_nope, q_pe, ckv_cache, kpe_cache)
        out, lse = results_like(out, lse, return_lse, tuple(q_nope.shape), q_nope.dtype, q_nope)
        states = (q_nope, q_pe, ckv_cache, kpe_cache)
        strided_latent_attention(*states, out, lse, *table, self._scale, self._causal)
        if lse is not None and return_lse_base_on_e:
            lse.mul_(math.log(2))
        return (out, lse) if return_lse and lse is not None else out

    def _checked(self, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor) -> _Table:
        if self._table is None or self._types is None:
            raise RuntimeError("call plan() before run()")
        self._types.check(q_nope, ckv_cache)
        # A graph has one shape for all batches: it is not to have another for each number of tokens.
        if not torch.compiler.is_dynamo_compiling() and q_nope.shape[0] != self._tokens:
            raise ValueError(f"q_nope must have {self._tokens} tokens, as planned; got {tuple(q_nope.shape)}")
        heads, rank, rope = self._sizes
        wanted = {
            "q_nope": (q_nope, (heads, rank)),
            "q_pe": (q_pe, (heads, rope)),
            "ckv_cache": (ckv_cache, (self._page_size, rank)),
            "kpe_cache": (kpe_cache, (self._page_size, rope)),
        }
        for name, (states, sizes) in wanted.items():
            if states.dim() != 3 or states.shape[1:] != sizes:
                axis = "T" if name.startswith("q") else "P"
                raise ValueError(
                    f"{name} must be [{axis}, {sizes[0]}, {sizes[1]}], as planned; got {tuple(states.shape)}"
                )
        return self._table


def _table_of(query: Tensor, kv_len: Tensor | None, page_table: Tensor | None) -> _Table:
    """Return where rows of one query lie, by a table with as many pages for each."""
    rows = query.shape[0]
    if kv_len is None or page_table is None or kv_len.shape != (rows,) or page_table.shape[:1] != (rows,):
        found = [None if own is None else tuple(own.shape) for own in (kv_len, page_table)]
        raise ValueError(f'kv_len must be [{rows}], and page_table [{rows}, n], with backend="cutlass"; got {found}')
    begins = torch.arange(rows + 1, dtype=torch.int32, device=query.device)
    return _Table(begins, begins * page_table.shape[1], as_index(page_table).flatten(), as_index(kv_len))
