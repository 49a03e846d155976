"""flash-attn as a backend of prefill; see ``protocol.Backend``."""

from __future__ import annotations

from torch import Tensor

from compiled_llm_ops.contracts import Geometry
from compiled_llm_ops.protocol import Installation
from compiled_llm_ops.varlen.flash_attn.install import FlashAttnInstallation, flash_attn_2, flash_attn_3
from compiled_llm_ops.varlen.rows import PackedRows, VarlenKernels, wrong_page_size


class FlashAttn(VarlenKernels):
    """``flash_attn_varlen_func`` of version 2, or ``flash_attn_with_kvcache`` of version 3, for any page size."""

    # Neither waits for the device, so that a CUDA graph may capture them. Rows are not split: version 2 does not split
    # packed queries over pages (``num_splits > 1 is not supported for varlen paged KV``), and what version 3 would
    # decide by the bound of ``most_keys`` fits long rows alone.

    installation: Installation = FlashAttnInstallation()

    def missing_kernel(self, geometry: Geometry) -> str | None:
        reason = super().missing_kernel(geometry)
        return reason or (wrong_page_size(geometry) if flash_attn_3() is None else _missing_in_version_3(geometry))

    def attend(self, rows: PackedRows, out: Tensor, wants_lse: bool) -> Tensor | None:
        return _attend_by_3(rows, out, wants_lse) if flash_attn_3() else _attend_by_2(rows, out, wants_lse)


def _missing_in_version_3(geometry: Geometry) -> str | None:
    """Return why version 3 is not trusted with a layer; None if it is."""
    # As vLLM 0.24 builds it, on an H200, 50 queries of a row of 400 lost keys of a window of 200: with 4 query heads of
    # 128, whatever the page size, the splits and ``pack_gqa``, and with heads of 256. Windows of 100, 255 and 500 were
    # right. ``tests/ops/varlen/test_varlen_gpu.py`` has the case.
    if geometry.window_left < 0:
        return None
    return (
        f"flash-attn 3 loses keys of some sliding windows, and this layer has one of {geometry.window_left + 1} tokens"
    )


def _attend_by_2(rows: PackedRows, out: Tensor, wants_lse: bool) -> Tensor | None:
    found = flash_attn_2().flash_attn_varlen_func(
        rows.query,
        rows.keys,
        rows.values,
        cu_seqlens_q=rows.query_starts,
        cu_seqlens_k=rows.keys_of.starts,  # with a block table, only their differences are read: the rows' lengths
        max_seqlen_q=rows.most_queries,
        max_seqlen_k=rows.most_keys,
        softmax_scale=rows.scale,
        causal=True,
        window_size=rows.window,
        softcap=rows.soft_cap,
        return_attn_probs=wants_lse,  # without dropout, the log-sum-exp and no probabilities
        block_table=rows.keys_of.table,
    )
    return _kept(found, out, wants_lse)


def _attend_by_3(rows: PackedRows, out: Tensor, wants_lse: bool) -> Tensor | None:
    found = flash_attn_3().flash_attn_with_kvcache(
        rows.query,
        rows.keys,
        rows.values,
        cache_seqlens=rows.keys_of.lengths,
        page_table=rows.keys_of.table,
        cu_seqlens_q=rows.query_starts,
        max_seqlen_q=rows.most_queries,
        softmax_scale=rows.scale,
        causal=True,
        window_size=rows.window,
        softcap=rows.soft_cap,
        num_splits=1,
        return_softmax_lse=wants_lse,
    )
    return _kept(found, out, wants_lse)


def _kept(found: Tensor | tuple[Tensor, ...], out: Tensor, wants_lse: bool) -> Tensor | None:
    """Copy the results, which neither function writes to a tensor that it is given; return the log-sum-exp."""
    if wants_lse:
        out.copy_(found[0])
        return found[1]
    assert isinstance(found, Tensor)
    out.copy_(found)
    return None


BACKEND = FlashAttn()
