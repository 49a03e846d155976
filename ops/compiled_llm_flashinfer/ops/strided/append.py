"""Writing new keys and values into pages where they lie apart, in any layout."""

# Shapes: T packed tokens, B rows, K kv heads, D head dimension of keys, E that of values, P pages, S page size, N
# entries of the page table.

from __future__ import annotations

import torch

from compiled_llm_flashinfer.ops.contracts import StridedAppend
from compiled_llm_flashinfer.ops.library import LIBRARY
from compiled_llm_flashinfer.ops.strided.plain import as_bytes
from compiled_llm_ops.contracts import FP8, FP8_LARGEST
from compiled_llm_ops.library import define_op, kernel_of


@define_op(StridedAppend, writes=("keys", "values"), library=LIBRARY)
def strided_append(args: StridedAppend) -> None:
    """Write keys and values into their slots of pages, two tensors of any strides.

    Token t goes to page ``indices[indptr[token_rows[t]] + token_positions[t] // S]``.

    Args:
        key: ``[T, K, D]``, any strides and float dtype.
        value: ``[T, K, E]``, likewise.
        keys: ``[P, K, S, D]``, any strides, written in place; those of ``torch.float8_e4m3fn`` hold what is clamped to
            -448 to 448.
        values: ``[P, K, S, E]``, likewise.
        token_rows: ``[T]`` int32 or int64, the row of each token; tokens of negative ones are left out.
        token_positions: ``[T]`` int32 or int64, the position of each token in its row.
        indptr: ``[B + 1]`` int32 or int64, where each row's pages begin in ``indices``.
        indices: ``[N]`` int32 or int64, page numbers.

    Raises:
        ValueError: shapes or dtypes do not fit together; nothing is written.

    Source:
        FlashInfer's ``append_paged_kv_cache`` (https://arxiv.org/abs/2501.01005). On CUDA a Triton kernel of our own.
    """


def check(args: StridedAppend) -> None:
    """Raise ValueError if shapes or dtypes do not fit together."""
    tokens = args.key.shape[0]
    for new, pages, name in ((args.key, args.keys, "key"), (args.value, args.values, "value")):
        if new.dim() != 3 or pages.dim() != 4 or new.shape != (tokens, pages.shape[1], pages.shape[3]):
            raise ValueError(
                f"strided_append: {name} must be [T, K, D], and {name}s [P, K, S, D] in T = {tokens} tokens; got "
                f"{tuple(new.shape)} and {tuple(pages.shape)}"
            )
    if args.keys.shape[:3] != args.values.shape[:3]:
        raise ValueError(
            f"strided_append: keys and values must have the same pages; got {tuple(args.keys.shape)} and "
            f"{tuple(args.values.shape)}"
        )
    for name in ("token_rows", "token_positions", "indptr", "indices"):
        column = getattr(args, name)
        if column.dim() != 1 or column.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"strided_append: {name} must have one axis, int32 or int64; got {tuple(column.shape)} {column.dtype}"
            )
        if name.startswith("token") and column.shape[0] != tokens:
            raise ValueError(f"strided_append: {name} must be [{tokens}], one entry a token; got {tuple(column.shape)}")


@kernel_of(strided_append, "CPU")
def _on_cpu(args: StridedAppend) -> None:
    check(args)
    kept, page_size = args.token_rows >= 0, args.keys.shape[2]
    rows, places = args.token_rows[kept], args.token_positions[kept]
    numbers = args.indices[args.indptr[rows] + places // page_size]
    for new, pages in ((args.key, args.keys), (args.value, args.values)):
        own = new[kept]
        if pages.dtype == FP8:
            own = own.float().clamp(-FP8_LARGEST, FP8_LARGEST)
        as_bytes(pages)[numbers, :, places % page_size] = as_bytes(own.to(pages.dtype))


@kernel_of(strided_append, "CUDA")
def _on_cuda(args: StridedAppend) -> None:
    from compiled_llm_flashinfer.ops.kernels.strided.append import append

    check(args)
    with torch.cuda.device(args.keys.device):  # Triton launches on the current one
        append(args)
