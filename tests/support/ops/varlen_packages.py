"""Stand-ins for the functions of flash-attn 2, flash-attn 3 and torch 2.13 that attend to packed queries over pages.

They have the signatures of the real ones, in flash-attn's repository at 0251105 and in torch 2.13, check what their C++
checks, and compute in float32, one row after the other. A CPU runs none of the real ones.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from compiled_llm_ops.backends import backend_named
from compiled_llm_ops.contracts import PagedAttention
from compiled_llm_ops.varlen.flash_attn import backend as flash_attn
from compiled_llm_ops.varlen.rows import BlockTables
from compiled_llm_ops.varlen.torch import backend as torch_varlen

PACKAGES = {"flash-attn 2": "flash-attn", "flash-attn 3": "flash-attn", "torch": "torch"}
"""The backend of each."""


class Handed(NamedTuple):
    """What a call was given."""

    keys: Tensor
    values: Tensor
    most_queries: int
    most_keys: int


class AuxRequest(NamedTuple):
    """Of torch 2.13."""

    lse: bool = False


class Packages:
    """The stand-ins, and what they were given, the last call last."""

    def __init__(self) -> None:
        self.calls: list[Handed] = []

    def flash_attn_varlen_func(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
        window_size: Sequence[int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
        deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """flash-attn 2.8's."""
        assert (dropout_p, causal, alibi_slopes, deterministic) == (0.0, True, None, False)
        assert block_table is not None
        assert softmax_scale is not None
        assert cu_seqlens_k.dtype == torch.int32
        assert cu_seqlens_k.is_contiguous()
        assert cu_seqlens_k[0] == 0
        _check_of_version_2(k, max_seqlen_q, window_size)
        self.calls.append(Handed(k, v, max_seqlen_q, max_seqlen_k))
        how = (softmax_scale, window_size, softcap)
        out, lse = _attend(q, k, v, cu_seqlens_q, cu_seqlens_k.diff(), block_table, max_seqlen_q, max_seqlen_k, *how)
        return (out, lse, None) if return_attn_probs else out

    def flash_attn_with_kvcache(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, k: None = None, v: None = None, qv: None = None,
        rotary_cos: None = None, rotary_sin: None = None, cache_seqlens: Tensor | None = None,
        cache_batch_idx: None = None, cache_leftpad: None = None, page_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: None = None, max_seqlen_q: int | None = None,
        rotary_seqlens: None = None, q_descale: None = None, k_descale: None = None, v_descale: None = None,
        softmax_scale: float | None = None, causal: bool = False, window_size: Sequence[int] = (-1, -1),
        attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True,
        scheduler_metadata: None = None, num_splits: int = 0, pack_gqa: None = None, sm_margin: int = 0,
        return_softmax_lse: bool = False,
    ) -> Any:  # fmt: skip
        """flash-attn 3's."""
        assert (k, v, qv, attention_chunk, causal, num_splits) == (None, None, None, 0, True, 1)
        assert cache_seqlens is not None
        assert page_table is not None
        assert softmax_scale is not None
        assert cu_seqlens_q is not None
        assert max_seqlen_q is not None
        most_keys = page_table.shape[1] * k_cache.shape[1]
        self.calls.append(Handed(k_cache, v_cache, max_seqlen_q, most_keys))
        table, how = (cache_seqlens, page_table, max_seqlen_q, most_keys), (softmax_scale, window_size, softcap)
        out, lse = _attend(q, k_cache, v_cache, cu_seqlens_q, *table, *how)
        return (out, lse, None, None) if return_softmax_lse else out

    def varlen_attn_out(
        self, out: Tensor, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None,
        max_q: int, max_k: int, *, return_aux: AuxRequest | None = None, scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False, seqused_k: Tensor | None = None,
        block_table: Tensor | None = None, num_splits: int | None = None,
    ) -> Any:  # fmt: skip
        """torch 2.13's."""
        assert seqused_k is not None
        assert block_table is not None
        assert scale is not None
        assert cu_seq_k is not None
        assert enable_gqa or query.shape[1] == key.shape[2]
        assert num_splits == 1, "parts of packed rows are not added up rightly"
        assert torch.equal(cu_seq_k.diff(), seqused_k)
        assert out.is_contiguous()
        _check_of_version_2(key, max_q, window_size)
        self.calls.append(Handed(key, value, max_q, max_k))
        table, how = (seqused_k, block_table, max_q, max_k), (scale, window_size, 0.0)
        found, lse = _attend(query, key, value, cu_seq_q, *table, *how)
        out.copy_(found)
        return (out, lse) if return_aux is not None and return_aux.lse else out


def _check_of_version_2(key: Tensor, most_queries: int, window: Sequence[int]) -> None:
    assert key.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    assert most_queries > 1 or max(window) >= 0, "all rows have one query then"


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, query_starts: Tensor, lengths: Tensor, table: Tensor,
    most_queries: int, most_keys: int, scale: float, window: Sequence[int], soft_cap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return `[T, H, D]`, and the natural log-sum-exp `[H, T]`; NaN for tokens of no row."""
    (_, heads, head_dim), (_, page_size, kv_heads, _) = query.shape, keys.shape
    assert query.dtype == keys.dtype == values.dtype, "query and key must have the same dtype"
    assert keys.shape == values.shape == (*keys.shape[:3], head_dim)
    assert head_dim % 8 == 0
    assert head_dim <= 256, "FlashAttention forward only supports head dimension at most 256"
    for tensor in (query, keys, values, table):
        assert tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension"
    for column in (query_starts, lengths, table):
        assert column.dtype == torch.int32
    assert len(query_starts) == len(lengths) + 1 == len(table) + 1
    assert max(query_starts.diff().tolist()) <= most_queries
    assert max(lengths.tolist()) <= most_keys
    left, right = window
    assert right == 0, "a query sees no key after it"
    out, lse = torch.full_like(query, torch.nan), torch.full((heads, len(query)), torch.nan)
    for row, length in enumerate(lengths.tolist()):
        tokens = slice(*query_starts[row : row + 2].tolist())
        count = tokens.stop - tokens.start
        at = torch.arange(length, device="cpu")
        page = table[row, at // page_size].long()
        own_keys, own_values = (
            states[page, at % page_size].float().repeat_interleave(heads // kv_heads, 1) for states in (keys, values)
        )
        logits = torch.einsum("qhd,lhd->hql", query[tokens].float(), own_keys) * scale
        if soft_cap:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        distance = torch.arange(length - count, length, device="cpu")[:, None] - at
        hidden = (distance < 0) | ((distance > left) if left >= 0 else torch.tensor(False))
        logits = logits.masked_fill(hidden, -torch.inf)
        out[tokens] = torch.einsum("hql,lhd->qhd", logits.softmax(-1), own_values).to(query.dtype)
        lse[:, tokens] = logits.logsumexp(-1)
    return out, lse


def stand_in_for(package: str, monkeypatch: pytest.MonkeyPatch) -> Packages:
    """Install a stand-in, with which its backend runs on a CPU, in float32, too."""
    found = Packages()
    backend = type(backend_named(PACKAGES[package]))
    monkeypatch.setattr(backend, "devices", ("cuda", "cpu"))
    monkeypatch.setattr(backend, "dtypes", frozenset({torch.float16, torch.bfloat16, torch.float32}))
    version_2 = SimpleNamespace(__version__="2.8.4", flash_attn_varlen_func=found.flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", version_2)
    version_3 = SimpleNamespace(flash_attn_with_kvcache=found.flash_attn_with_kvcache)
    monkeypatch.setattr(flash_attn, "flash_attn_3", lambda: version_3 if package == "flash-attn 3" else None)
    of_torch = SimpleNamespace(varlen_attn_out=found.varlen_attn_out, AuxRequest=AuxRequest)
    monkeypatch.setattr(torch_varlen, "varlen", lambda: of_torch)
    return found


def random_table(rng: np.random.Generator, page_size: int = 4) -> tuple[PagedAttention, list[int]]:
    """A packed table of rows of which some have no page, and no query reads anything."""
    counts = rng.integers(0, 9, int(rng.integers(1, 40)))
    last = rng.integers(1, page_size + 1, len(counts))
    lengths = [max(0, (count - 1) * page_size + end) if count else 0 for count, end in zip(counts, last, strict=True)]
    indptr = np.concatenate([[0], counts.cumsum()])
    columns = (indptr, rng.permutation(400)[: counts.sum() + 3], last)
    numbers = [torch.tensor(column, dtype=torch.int32, device="cpu") for column in columns]
    none = torch.empty(0, device="cpu")
    pages = torch.empty(1, 2, 1, page_size, 8, device="cpu")
    return PagedAttention(none, pages, none, *numbers, none, none, 1.0), list(map(int, lengths))


def assert_block_tables(found: BlockTables, args: PagedAttention, lengths: list[int]) -> None:
    assert found.lengths.tolist() == lengths
    assert found.starts.tolist() == [0, *np.cumsum(lengths)]
    bounds = args.indptr.tolist()
    for row, (begin, end) in enumerate(itertools.pairwise(bounds)):
        assert torch.equal(found.table[row, : end - begin], args.indices[begin:end])
