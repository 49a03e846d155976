"""The op that attends as a variant says in decode steps, and writes the newest tokens."""

# Shapes: B rows, T packed tokens, H query heads, K kv heads, D head dimension, P pages, S page size, N page numbers of
# all rows.

from __future__ import annotations

from torch import Tensor

from compiled_llm_ops.attention import decode
from compiled_llm_ops.attention.lse import kernel_of_both, over_pages, with_lse
from compiled_llm_ops.attention.preparation import prepared
from compiled_llm_ops.contracts import check_capability, check_even_heads
from compiled_llm_ops.library import define_op
from compiled_llm_ops.variants.contracts import DecodeAttentionVariant
from compiled_llm_ops.variants.plain import PlainRow, attend
from compiled_llm_ops.variants.registry import Variant, variant_named
from compiled_llm_ops.variants.triton_source import logits_transform


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


def _check(args: DecodeAttentionVariant, wants_lse: bool) -> Variant:
    op = "decode_attention_variant"
    decode.check(op, args.without_variant)
    return variant_named(op, args.name).checked(op, args.tensors, args.query, len(args.starts), wants_lse)


@kernel_of_both(decode_attention_variant, "CPU")
def _cpu(args: DecodeAttentionVariant, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    variant, plain = _check(args, wants_lse), args.without_variant
    decode.append(plain, decode.RowPlaces(plain))
    query, new = prepared(args.query, args.query_norm, plain), plain.new_tokens
    rows = [
        PlainRow(row, slice(row * new, row * new + new), length, numbers)
        for row, (length, numbers) in enumerate(zip(args.lengths.tolist(), decode.pages_of_rows(plain), strict=True))
    ]
    how = (args.scale, args.window_left, args.key_scale, args.value_scale)
    return attend(variant, args.tensors, query, args.pages, rows, *how)


@kernel_of_both(decode_attention_variant, "CUDA")
def _cuda(args: DecodeAttentionVariant, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    variant = _check(args, wants_lse)
    check_even_heads("decode_attention_variant", args.pages)
    check_capability("decode_attention_variant", args.pages)
    return decode.attend_on_cuda(args.without_variant, wants_lse, logits_transform(variant, args.tensors))
