"""Ops that attend as a variant says: over packed queries, and in decode steps, where they write the newest tokens."""

# Shapes: B rows, T packed tokens, H query heads, K kv heads, D head dimension, P pages, S page size, N page numbers of
# all rows.

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm_ops.attention import decode, prefill
from compiled_llm_ops.attention.lse import kernel_of_both, over_pages, with_lse
from compiled_llm_ops.attention.preparation import prepared
from compiled_llm_ops.contracts import check_capability, check_even_heads
from compiled_llm_ops.contracts.variants import DecodeAttentionVariant, PagedAttentionVariant, PlannedAttentionVariant
from compiled_llm_ops.library import define_op
from compiled_llm_ops.protocol import owner_of, plan_of
from compiled_llm_ops.variants.plain import PlainRow, attend, attend_packed
from compiled_llm_ops.variants.registry import Variant, variant_named
from compiled_llm_ops.variants.triton_source import kernel_variant


@define_op(PagedAttentionVariant)
def paged_attention_variant(args: PagedAttentionVariant) -> Tensor:
    """Causal attention of packed queries over the pages of their rows, with the logits of a variant.

    Row b's queries are ``query[qo_indptr[b]:qo_indptr[b + 1]]``; they are the last tokens of the row, whose keys and
    values already lie in the pages. The op needs no plan. A query that sees no key has zeros.

    Args:
        query: ``[T, H, D]``, any strides; H a multiple of K.
        pages: ``[P, 2, K, S, D']`` with D' >= D; columns past D are zero. For values of another size E
            ``[P, K, S, D + E]``, each key followed by its value, on a CPU only.
        qo_indptr: ``[B + 1]`` int32, where each row's queries begin.
        indptr: ``[B + 1]`` int32, where each row's pages begin in ``indices``.
        indices: ``[N]`` int32, page numbers.
        last_page_len: ``[B]`` int32, tokens in each row's last page, 1 to S.
        name: of a variant that ``register_variant`` has registered, or its ``key``.
        tensors: those of the variant, in its order: ``[B]`` by row, ``[T]`` by query, ``[H]`` by head, of any size by
            position; of the dtype that it was registered with.
        scale: factor on the logits, before the variant has them.
        window_left: tokens visible to the left of each query, of which the variant may hide some; -1 for all.
        key_scale: ``[K]`` float32, by kv head, for pages of ``torch.float8_e4m3fn`` only: what keys in the pages are to
            be multiplied with. None for 1.
        value_scale: ``[K]`` float32, the same for values.

    Returns:
        ``[T, H, D]``, contiguous, of the query's dtype; ``[T, H, E]`` for values of another size.

    Raises:
        ValueError: shapes or dtypes do not fit together, or the variant is not registered.

    Source:
        On CUDA the Triton kernel of ``invariant_attention``, after FlashAttention-2
        (https://arxiv.org/abs/2307.08691), with a function that is made of the variant's trace.
    """
    variant_named("paged_attention_variant", args.name)
    return over_pages(args.query, args.pages)


paged_attention_variant_lse = with_lse(paged_attention_variant)


@define_op(PlannedAttentionVariant, writes=("workspace",))
def planned_attention_variant(args: PlannedAttentionVariant) -> Tensor:
    """``paged_attention_variant`` by the kernels of a backend that has ``functions``, which are planned.

    Args:
        query: ``[T, H, D]``, any strides; H a multiple of K.
        pages: ``[P, 2, K, S, D']`` with D' >= D; columns past D are zero. For values of another size E
            ``[P, K, S, D + E]``, each key followed by its value, on a CPU only.
        qo_indptr: ``[B + 1]`` int32, where each row's queries begin.
        indptr: ``[B + 1]`` int32, where each row's pages begin in ``indices``.
        indices: ``[N]`` int32, page numbers.
        last_page_len: ``[B]`` int32, tokens in each row's last page, 1 to S.
        plan: ``[N]`` uint8, as of ``paged_attention``, made with the variant's key as ``function``.
        workspace: ``[M]`` uint8, belongs to ``plan``, written.
        name: of a variant that ``register_variant`` has registered, or its ``key``.
        tensors: those of the variant, as of ``paged_attention_variant``.
        scale: factor on the logits, before the variant has them.
        window_left: tokens visible to the left of each query, of which the variant may hide some; -1 for all.
        key_scale: ``[K]`` float32, by kv head, for pages of ``torch.float8_e4m3fn`` only: what keys in the pages are to
            be multiplied with. None for 1.
        value_scale: ``[K]`` float32, the same for values.

    Returns:
        ``[T, H, D]``, contiguous, of the query's dtype; ``[T, H, E]`` for values of another size.

    Raises:
        ValueError: shapes or dtypes do not fit together, or the variant is not registered.
        RuntimeError: on CUDA, ``plan`` holds no plan.

    Source:
        FlashInfer's ``BatchPrefillWithPagedKVCacheWrapper`` with ``jit_args``
        (https://docs.flashinfer.ai/api/attention.html).
    """
    variant_named("planned_attention_variant", args.name)
    return over_pages(args.query, args.pages)


planned_attention_variant_lse = with_lse(planned_attention_variant)


@define_op(DecodeAttentionVariant, writes=("pages", "saturated"))
def decode_attention_variant(args: DecodeAttentionVariant) -> Tensor:
    """Write the keys and values of each row's q newest tokens into its pages, then attend with a variant's logits.

    As ``decode_attention``: token t of row b lies in page ``indices[starts[b] + t // S]``, and a captured launch may
    be replayed with any lengths, and with any numbers in ``tensors``.

    Args:
        query: ``[T, H, D]``, any strides, the tokens of a row next to each other; T a multiple of B, H one of K.
        key: ``[T, K, D]``, any strides, of the query's dtype.
        value: ``[T, K, D]``, like ``key``, or ``[T, K, E]``.
        pages: ``[P, 2, K, S, D']`` with D' >= D, written in place; columns past D are zero, and left alone. For values
            of another size ``[P, K, S, D + E]``, each key followed by its value, on a CPU only.
        starts: ``[B]`` int32, where each row's pages begin in ``indices``.
        lengths: ``[B]`` int32, tokens of each row, the new ones included; at least q.
        indices: ``[N]`` int32, page numbers.
        name: of a variant that ``register_variant`` has registered, or its ``key``.
        tensors: those of the variant, in its order: ``[B]`` by row, ``[T]`` by query, ``[H]`` by head, of any size by
            position; of the dtype that it was registered with.
        scale: factor on the logits, before the variant has them.
        window_left: tokens visible to the left of each query, of which the variant may hide some; -1 for all. Keys
            before it are not read; those that the variant hides are.
        query_norm: ``[D]`` of the query's dtype: first, each head of the query is divided by its root mean square and
            multiplied with this. None if the query needs no norm.
        key_norm: ``[D]``, the same for the key.
        epsilon: added to both mean squares.
        cos: ``[T, D]`` of the query's dtype: after their norm, query and key are rotated by their position. None if
            they need no rotation.
        sin: ``[T, D]``, belongs to ``cos``.
        overlap: as of ``decode_attention``; the previous kernel may write ``tensors``.
        key_scale: ``[K]`` float32, by kv head, for pages of ``torch.float8_e4m3fn`` only: they hold each key divided by
            it, clamped to -448 to 448 and rounded, and are read times it. None for 1.
        value_scale: ``[K]`` float32, the same for values.
        saturated: ``[1]`` int64, written: to it is added how many numbers had to be clamped. None to count nothing.

    Returns:
        ``[T, H, D]``, contiguous, of the query's dtype; ``[T, H, E]`` for values of another size.

    Raises:
        ValueError: shapes or dtypes do not fit together, or the variant is not registered.

    Source:
        On CUDA the Triton kernel of ``decode_attention``, after Flash-Decoding
        (https://pytorch.org/blog/flash-decoding/), with a function that is made of the variant's trace.
    """
    variant_named("decode_attention_variant", args.name)
    return over_pages(args.query, args.pages)


decode_attention_variant_lse = with_lse(decode_attention_variant)


_Packed = PagedAttentionVariant | PlannedAttentionVariant
_Arguments = _Packed | DecodeAttentionVariant


def _variant(op: str, args: _Arguments, rows: int, wants_lse: bool) -> Variant:
    variant = variant_named(op, args.name)
    if wants_lse and not variant.softmax:
        raise ValueError(f"{op}_lse: variant {variant.name!r} has no softmax, and no log-sum-exp; call {op}")
    variant.check_tensors(op, args.tensors, rows, args.query.shape[0], args.query.shape[1])
    return variant


# ---- packed queries


def _check_packed(op: str, args: _Packed, wants_lse: bool) -> Variant:
    prefill.check(op, args)
    return _variant(op, args, args.last_page_len.shape[0], wants_lse)


@kernel_of_both(paged_attention_variant, "CPU")
def _paged_on_cpu(args: PagedAttentionVariant, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    out, lse = attend_packed(_check_packed("paged_attention_variant", args, wants_lse), args)
    return out, lse if wants_lse else None


@kernel_of_both(planned_attention_variant, "CPU")
def _planned_on_cpu(args: PlannedAttentionVariant, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    if plan_of(args.plan) is not None:
        return _as_planned(args, wants_lse)
    out, lse = attend_packed(_check_packed("planned_attention_variant", args, wants_lse), args)
    return out, lse if wants_lse else None


@kernel_of_both(planned_attention_variant, "CUDA")
def _as_planned(args: PlannedAttentionVariant, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    variant = _check_packed("planned_attention_variant", args, wants_lse)
    tensors = [tensor.contiguous() for tensor in args.tensors]
    return prefill.launch(
        owner_of(args.plan).launch_variant, args._replace(name=variant.key, tensors=tensors), wants_lse
    )


def missing_kernel(head_dim: int) -> str | None:
    """Return why there is no kernel on CUDA for heads of this size; None if there is one."""
    from compiled_llm_ops.kernels.attention.packed_tiling import LARGEST_HEAD

    if head_dim <= LARGEST_HEAD:
        return None
    return f"there is no kernel for heads of size {head_dim}: the largest is {LARGEST_HEAD}"


@kernel_of_both(paged_attention_variant, "CUDA")
def _paged_on_cuda(args: PagedAttentionVariant, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    from compiled_llm_ops.kernels.attention.packed import PackedQueries, attend as attend_on_cuda

    variant = _check_packed("paged_attention_variant", args, wants_lse)
    check_even_heads("paged_attention_variant", args.pages)
    check_capability("paged_attention_variant", args.pages)
    tokens, heads, _ = args.query.shape
    if (reason := missing_kernel(args.pages.shape[-1])) is not None:
        raise ValueError(f"paged_attention_variant: {reason}")
    out = torch.empty(args.query.shape, dtype=args.query.dtype, device=args.query.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=out.device) if wants_lse else None
    how = kernel_variant(variant, args.tensors)
    with torch.cuda.device(out.device):  # Triton launches on the current one
        attend_on_cuda(PackedQueries.of(args, 0.0), out, lse, variant=how)
    return out, lse


# ---- decode


def _check_decode(args: DecodeAttentionVariant, wants_lse: bool) -> Variant:
    decode.check("decode_attention_variant", args.without_variant)
    return _variant("decode_attention_variant", args, args.starts.shape[0], wants_lse)


@kernel_of_both(decode_attention_variant, "CPU")
def _decode_on_cpu(args: DecodeAttentionVariant, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    variant, plain = _check_decode(args, wants_lse), args.without_variant
    decode.append(plain, decode.RowPlaces(plain))
    query = prepared(args.query, args.query_norm, plain)
    page_size, new = args.pages.shape[-2], plain.new_tokens
    rows = [
        PlainRow(row, slice(row * new, row * new + new), length, args.indices[start : start - (-length // page_size)])
        for row, (start, length) in enumerate(zip(args.starts.tolist(), args.lengths.tolist(), strict=True))
    ]
    how = (args.scale, args.window_left, args.key_scale, args.value_scale)
    out, lse = attend(variant, args.tensors, query, args.pages, rows, *how)
    return out, lse if wants_lse else None


@kernel_of_both(decode_attention_variant, "CUDA")
def _decode_on_cuda(args: DecodeAttentionVariant, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    variant = _check_decode(args, wants_lse)
    check_even_heads("decode_attention_variant", args.pages)
    check_capability("decode_attention_variant", args.pages)
    return decode.attend_on_cuda(args.without_variant, wants_lse, kernel_variant(variant, args.tensors))
