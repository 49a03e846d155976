"""The op that attends as a variant says over packed queries, without a plan."""

# Shapes: B rows, T packed tokens, H query heads, K kv heads, D head dimension, P pages, S page size, N page numbers of
# all rows.

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm_ops.attention import prefill
from compiled_llm_ops.attention.lse import kernel_of_both, new_lse, over_pages, with_lse
from compiled_llm_ops.contracts import check_capability, check_even_heads, table_of
from compiled_llm_ops.library import define_op
from compiled_llm_ops.variants.contracts import PagedAttentionVariant, PlannedAttentionVariant
from compiled_llm_ops.variants.plain import attend_packed
from compiled_llm_ops.variants.registry import Variant, variant_named
from compiled_llm_ops.variants.triton_source import logits_transform


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


def check(op: str, args: PagedAttentionVariant | PlannedAttentionVariant, wants_lse: bool) -> Variant:
    """Return the variant of packed queries; ValueError, in the name of ``op``, if they do not fit together."""
    prefill.check(op, args.query, args.pages, table_of(args), args.key_scale, args.value_scale)
    return variant_named(op, args.name).checked(op, args.tensors, args.query, len(args.last_page_len), wants_lse)


@kernel_of_both(paged_attention_variant, "CPU")
def _cpu(args: PagedAttentionVariant, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    return attend_packed(check("paged_attention_variant", args, wants_lse), args)


def missing_kernel(head_dim: int) -> str | None:
    """Return why there is no kernel on CUDA for heads of this size; None if there is one."""
    from compiled_llm_ops.kernels.attention.packed_tiling import LARGEST_HEAD

    if head_dim <= LARGEST_HEAD:
        return None
    return f"there is no kernel for heads of size {head_dim}: the largest is {LARGEST_HEAD}"


@kernel_of_both(paged_attention_variant, "CUDA")
def _cuda(args: PagedAttentionVariant, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    from compiled_llm_ops.kernels.attention.packed import PackedQueries, attend

    variant = check("paged_attention_variant", args, wants_lse)
    check_even_heads("paged_attention_variant", args.pages)
    check_capability("paged_attention_variant", args.pages)
    if (reason := missing_kernel(args.pages.shape[-1])) is not None:
        raise ValueError(f"paged_attention_variant: {reason}")
    out = args.query.new_empty(args.query.shape)
    lse = new_lse(out) if wants_lse else None
    queries = PackedQueries(
        args.query, args.pages, args.qo_indptr, args.indptr, None, args.indices, args.scale, args.window_left, 0.0,
        args.key_scale, args.value_scale, args.last_page_len,
    )  # fmt: skip
    with torch.cuda.device(out.device):  # Triton launches on the current one
        attend(queries, out, lse, transform=logits_transform(variant, args.tensors))
    return out, lse
