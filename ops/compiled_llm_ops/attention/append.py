"""Writing new keys and values into the pages."""

# Shapes: T packed tokens, K kv heads, D head dimension, P pages, S page size, B rows, N entries of the page table.

from __future__ import annotations

import torch

from compiled_llm_ops import plain_attention
from compiled_llm_ops.backends import backend_named
from compiled_llm_ops.contracts import (
    SCALED_DTYPES,
    AppendPagedKv,
    check_capability,
    check_scales,
    check_token_places,
    has_uneven_heads,
)
from compiled_llm_ops.library import define_op, kernel_of


@define_op(AppendPagedKv, writes=("pages", "saturated"))
def append_paged_kv(args: AppendPagedKv) -> None:
    """Write the keys and values of new tokens into the pages of their rows, in place.

    Token t goes to page ``indices[indptr[token_rows[t]] + token_positions[t] // S]``, slot ``token_positions[t] % S``.
    Positions are not checked here: the planner must keep every row within the pages it owns.

    Args:
        key: ``[T, K, D]``, any strides.
        value: ``[T, K, D]``, like ``key``, or ``[T, K, E]``.
        pages: ``[P, 2, K, S, D']`` with D' >= D, written in place; columns past D are left alone (and stay zero). For
            values of another size ``[P, K, S, D + E]``, each key followed by its value, in plain PyTorch only.
        token_rows: ``[T]`` int32, the row each token belongs to.
        token_positions: ``[T]`` int32, each token's index in its row's cache, in tokens.
        indptr: ``[B + 1]`` int32, where each row's pages begin in ``indices``.
        indices: ``[N]`` int32, page numbers.
        last_page_len: ``[B]`` int32, tokens in each row's last page, 1 to S, the new ones included.
        backend: whose kernel writes on CUDA, one of ``backends.BACKENDS``; on a CPU plain PyTorch does.
        key_scale: ``[K]`` float32, by kv head, for pages of ``torch.float8_e4m3fn`` only: they hold each key divided by
            it, clamped to -448 to 448 and rounded. None for 1.
        value_scale: ``[K]`` float32, the same for values.
        saturated: ``[1]`` int64, written: to it is added how many numbers had to be clamped. None to count nothing.

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source:
        FlashInfer ``flashinfer.append_paged_kv_cache`` on CUDA, for pages with scales the Triton kernel of
        ``rope_append_paged_kv``; paged KV caches after vLLM's PagedAttention
        (https://arxiv.org/abs/2309.06180).
    """


def _check(args: AppendPagedKv) -> None:
    key, value, pages = args.key, args.value, args.pages
    alike = 2 if has_uneven_heads(pages) else 3
    if key.shape[:alike] != value.shape[:alike] or not key.dim() == value.dim() == 3 or key.dtype != value.dtype:
        raise ValueError(
            f"append_paged_kv: key and value must be [T, K, D] of one shape and dtype; got {tuple(key.shape)} "
            f"{key.dtype} and {tuple(value.shape)} {value.dtype}"
        )
    if has_uneven_heads(pages):
        if (pages.shape[1], pages.shape[3]) != (key.shape[1], key.shape[2] + value.shape[2]):
            raise ValueError(
                f"append_paged_kv: pages must be [P, {key.shape[1]}, S, {key.shape[2]} + {value.shape[2]}] for a key "
                f"of {tuple(key.shape)} and a value of {tuple(value.shape)}; got {tuple(pages.shape)}"
            )
    elif pages.dim() != 5 or pages.shape[1:3] != (2, key.shape[1]) or pages.shape[4] < key.shape[2]:
        raise ValueError(
            f"append_paged_kv: pages must be [P, 2, {key.shape[1]}, S, D >= {key.shape[2]}] for a key of "
            f"{tuple(key.shape)}; got {tuple(pages.shape)}"
        )
    check_token_places("append_paged_kv", len(key), args)
    check_scales("append_paged_kv", args.pages, args.key_scale, args.value_scale, args.saturated)


@kernel_of(append_paged_kv, "CPU")
def _cpu(args: AppendPagedKv) -> None:
    _check(args)
    plain_attention.append(args)


@kernel_of(append_paged_kv, "CUDA")
def _cuda(args: AppendPagedKv) -> None:
    _check(args)
    backend = backend_named(args.backend)
    if args.pages.dtype in SCALED_DTYPES and backend.rope_append:  # other kernels that append only copy
        from compiled_llm_ops.kernels.attention.rope_append import append

        check_capability("append_paged_kv", args.pages)
        append(args)
        return
    padding = 0 if has_uneven_heads(args.pages) else args.pages.shape[4] - args.key.shape[2]
    if padding:
        key, value = (torch.nn.functional.pad(states, (0, padding)) for states in (args.key, args.value))
        args = args._replace(key=key, value=value)
    backend.append(args)
