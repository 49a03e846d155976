"""Between prefill's projections and its attention: norm, rotary embedding, and the way of keys and values to pages."""

# Shapes: T packed tokens, H query heads, K kv heads, D head dimension, P pages, S page size, B rows, N entries of the
# page table.

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm_ops.attention.preparation import check_preparation, prepared
from compiled_llm_ops.contracts import (
    RopeAppendPagedKv,
    check_capability,
    check_even_heads,
    check_pages,
    check_scales,
    check_token_places,
)
from compiled_llm_ops.library import define_op, kernel_of
from compiled_llm_ops.plain_attention import store


@define_op(RopeAppendPagedKv, writes=("pages", "saturated"))
def rope_append_paged_kv(args: RopeAppendPagedKv) -> Tensor:
    """Norm queries and keys and rotate them by their position, and write keys and values into the pages of their rows.

    Token t goes to page ``indices[indptr[token_rows[t]] + token_positions[t] // S]``, slot ``token_positions[t] % S``,
    as with ``append_paged_kv``; positions are not checked here, either.

    Args:
        query: ``[T, H, D]``, any strides.
        key: ``[T, K, D]``, any strides, of the query's dtype.
        value: ``[T, K, D]``, like ``key``; it is written as it is.
        pages: ``[P, 2, K, S, D']`` with D' >= D, written in place; columns past D are left alone (and stay zero).
        token_rows: ``[T]`` int32, the row each token belongs to.
        token_positions: ``[T]`` int32, each token's index in its row's cache, in tokens.
        indptr: ``[B + 1]`` int32, where each row's pages begin in ``indices``.
        indices: ``[N]`` int32, page numbers.
        query_norm: ``[D]`` of the query's dtype: first, each head of the query is divided by its root mean square and
            multiplied with this. None if the query needs no norm.
        key_norm: ``[D]``, the same for the key.
        epsilon: added to both mean squares.
        cos: ``[T, D]`` of the query's dtype: after their norm, query and key are rotated by their position. None if
            they need no rotation.
        sin: ``[T, D]``, belongs to ``cos``.
        overlap: whether it may run at the same time as the previous and the next kernel on CUDA, by the rules of
            ``compiled_llm_ops.kernels.pdl``; the previous kernel must not write ``token_rows``, ``token_positions``,
            ``indptr`` or ``indices`` then.
        key_scale: ``[K]`` float32, by kv head, for pages of ``torch.float8_e4m3fn`` only: they hold each key divided by
            it, clamped to -448 to 448 and rounded. None for 1.
        value_scale: ``[K]`` float32, the same for values.
        saturated: ``[1]`` int64, written: to it is added how many numbers had to be clamped. None to count nothing.

    Returns:
        ``[T, H, D]``, the queries that attend, contiguous, of the query's dtype.

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source:
        On CUDA a Triton kernel of our own. Norm and rotary embedding as in Llama and Qwen3
        (https://arxiv.org/abs/2104.09864), in float32 on CUDA; paged KV caches after vLLM's PagedAttention
        (https://arxiv.org/abs/2309.06180).
    """
    return args.query.new_empty(args.query.shape)


def _check(args: RopeAppendPagedKv) -> None:
    query, key, value = args.query, args.key, args.value
    check_even_heads("rope_append_paged_kv", args.pages)
    check_pages("rope_append_paged_kv", query, args.pages)
    tokens, kv_heads, head_dim = query.shape[0], args.pages.shape[2], query.shape[2]
    expected = (tokens, kv_heads, head_dim)
    if key.shape != expected or value.shape != expected or not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"rope_append_paged_kv: key and value must be {expected} {query.dtype} for {tokens} tokens; got "
            f"{tuple(key.shape)} {key.dtype} and {tuple(value.shape)} {value.dtype}"
        )
    check_token_places("rope_append_paged_kv", tokens, args)
    check_preparation("rope_append_paged_kv", args)
    check_scales("rope_append_paged_kv", args.pages, args.key_scale, args.value_scale, args.saturated)


@kernel_of(rope_append_paged_kv, "CPU")
def _cpu(args: RopeAppendPagedKv) -> Tensor:
    _check(args)
    page_size = args.pages.shape[3]
    page = args.indices[args.indptr[args.token_rows] + args.token_positions // page_size]
    store(args, page, args.token_positions % page_size, prepared(args.key, args.key_norm, args))
    out = prepared(args.query, args.query_norm, args)
    return out.clone(memory_format=torch.contiguous_format) if out is args.query else out.contiguous()


@kernel_of(rope_append_paged_kv, "CUDA")
def _cuda(args: RopeAppendPagedKv) -> Tensor:
    from compiled_llm_ops.kernels.attention.rope_append import rope_append
    from compiled_llm_ops.kernels.pdl import has_pdl

    _check(args)
    check_capability("rope_append_paged_kv", args.pages)
    with torch.cuda.device(args.query.device):  # Triton launches on the current one
        return rope_append(args, pdl=args.overlap and has_pdl(args.query.device))
