"""Attention over keys and values that lie apart and in any layout: pages of another library, ragged rows, one row."""

# Shapes: T packed tokens, B rows, H query heads, K kv heads, D head dimension of queries and keys, E that of values, P
# pages, S page size, N entries of the page table.

from __future__ import annotations

import torch

from compiled_llm_flashinfer.ops.contracts import StridedAttention, check_columns
from compiled_llm_flashinfer.ops.library import LIBRARY
from compiled_llm_flashinfer.ops.strided.plain import attend_row_by_row
from compiled_llm_ops.library import define_op, kernel_of


@define_op(StridedAttention, writes=("out", "lse"), library=LIBRARY)
def strided_attention(args: StridedAttention) -> None:
    """Attend with packed queries over the pages of their rows, and write the results to ``out`` and ``lse``.

    Keys and values are two tensors of any strides, such as views of one; neither is copied. Rows without pages, whose
    tokens lie next to each other, are pages of one token. The op needs no plan. The last query of a row is at its last
    key. A query that sees no key has zeros, and minus infinity.

    Args:
        query: ``[T, H, D]`` float16, bfloat16, float32 or fp8, any strides; H a multiple of K.
        keys: ``[P, K, S, D]``, any strides, of those dtypes.
        values: ``[P, K, S, E]``, any strides, like ``keys``.
        out: ``[T, H, E]`` of any of those dtypes, written.
        lse: ``[T, H]`` float32, written: the log-sum-exp of logits in base 2 (multiply by ln 2 for the natural one).
            None to skip it.
        qo_indptr: ``[B + 1]`` int32 or int64, where each row's queries begin. None if rows have equally many.
        indptr: ``[B + 1]`` int32 or int64, where each row's pages begin in ``indices``. None for one row of all pages.
        indices: ``[N]`` int32 or int64, page numbers. None if pages lie in their order.
        last_page_len: ``[B]`` int32 or int64, tokens in each row's last page, 1 to S; not read for a row without pages.
            None if all pages are full.
        scale: factor on the logits before the softmax.
        causal: whether queries see no keys after their own position.
        window_left: tokens visible to the left of each query; -1 for all.
        logits_soft_cap: ``cap * tanh(logits / cap)`` after scaling; 0.0 for none.
        value_scale: factor on the results.
        logit_factors: ``[H]`` float32, further factors on logits, by query head. None for 1.
        value_factors: ``[H]`` float32, the same for results.
        mask: uint8: of each row, a bit for each pair of query and key, lowest bits first, in place of ``causal``. None
            if there is no mask.
        mask_indptr: ``[B + 1]`` int32 or int64, where each row's bytes begin in ``mask``. None if there is one row.
        slopes: ``[H]`` float32 of ALiBi: to each logit is added slope times (the key's position minus the query's
            number in its row). None for none.
        rope_scale: if not 0, queries and keys are rotated by their position divided by this.
        rope_theta: base of the rotation's frequencies; the second half of a head is rotated against the first.
        one_order: whether keys of a row are summed in one order, whatever the batch is; slower for few long rows.

    Raises:
        ValueError: shapes or dtypes do not fit together; nothing is written.

    Source:
        The arguments are those of FlashInfer (https://arxiv.org/abs/2501.01005). On CUDA a Triton kernel of our own,
        after FlashAttention-2 (https://arxiv.org/abs/2307.08691) and Flash-Decoding
        (https://pytorch.org/blog/flash-decoding/).
    """


FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, *FP8_DTYPES)  # of queries, keys, values and results


def check(args: StridedAttention) -> None:
    """Raise ValueError if shapes or dtypes do not fit together."""
    _check_states(args)
    _check_table(args)
    heads = args.query.shape[1]
    for name in ("logit_factors", "value_factors", "slopes"):
        factors = getattr(args, name)
        if factors is not None and (factors.shape != (heads,) or factors.dtype != torch.float32):
            raise ValueError(
                f"strided_attention: {name} must be [{heads}] float32; got {tuple(factors.shape)} {factors.dtype}"
            )
    if args.rope_scale and (args.query.shape[2] % 2 or args.rope_theta <= 0):
        raise ValueError(
            f"strided_attention: rotations need an even head size and rope_theta > 0; got {args.query.shape[2]} and "
            f"{args.rope_theta}"
        )


def _check_states(args: StridedAttention) -> None:
    query, keys, values = args.query, args.keys, args.values
    if query.dim() != 3 or keys.dim() != 4 or values.dim() != 4 or keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            "strided_attention: query must be [T, H, D], keys [P, K, S, D] and values [P, K, S, E]; got "
            f"{tuple(query.shape)}, {tuple(keys.shape)} and {tuple(values.shape)}"
        )
    (tokens, heads, head_dim), kv_heads = query.shape, keys.shape[1]
    if heads % kv_heads or keys.shape[3] != head_dim:
        raise ValueError(
            f"strided_attention: {heads} query heads of size {head_dim} do not fit {kv_heads} kv heads of size "
            f"{keys.shape[3]}"
        )
    results = {"out": (args.out, (tokens, heads, values.shape[3])), "lse": (args.lse, (tokens, heads))}
    for name, (result, shape) in results.items():
        if result is not None and result.shape != shape:
            raise ValueError(f"strided_attention: {name} must be {shape}; got {tuple(result.shape)}")
    if args.lse is not None and args.lse.dtype != torch.float32:
        raise ValueError(f"strided_attention: lse must be float32; got {args.lse.dtype}")
    for name in ("query", "keys", "values", "out"):
        if getattr(args, name).dtype not in DTYPES:
            raise ValueError(
                f"strided_attention: {name} must be one of {', '.join(map(str, DTYPES))}; got "
                f"{getattr(args, name).dtype}"
            )


def _check_table(args: StridedAttention) -> None:
    rows = args.rows
    sizes = {"qo_indptr": rows + 1, "indptr": rows + 1, "last_page_len": rows, "mask_indptr": rows + 1, "indices": None}
    check_columns("strided_attention", args, sizes)
    if args.indptr is None and (args.indices is not None or args.last_page_len is not None):
        raise ValueError("strided_attention: indices and last_page_len need indptr; give [0, N] for one row")
    if args.qo_indptr is None and args.query.shape[0] % max(1, rows):
        raise ValueError(
            f"strided_attention: {args.query.shape[0]} queries are not equally many for each of {rows} rows; give "
            "qo_indptr"
        )
    if args.mask is not None and (args.mask.dim() != 1 or args.mask.dtype != torch.uint8):
        raise ValueError(
            f"strided_attention: mask must be [bytes] uint8; got {tuple(args.mask.shape)} {args.mask.dtype}"
        )
    if args.mask is not None and args.mask_indptr is None and rows != 1:
        raise ValueError(f"strided_attention: a mask of {rows} rows needs mask_indptr")


@kernel_of(strided_attention, "CPU")
def _on_cpu(args: StridedAttention) -> None:
    check(args)
    attend_row_by_row(args)


@kernel_of(strided_attention, "CUDA")
def _on_cuda(args: StridedAttention) -> None:
    from compiled_llm_flashinfer.ops.kernels.strided.attention import attend

    check(args)
    with torch.cuda.device(args.out.device):  # Triton launches on the current one
        attend(args)
