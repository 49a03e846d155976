"""Decode: new tokens of each row, mostly one, whose keys and values are written into pages, and which attend."""

# Queries and keys may come straight from their projections: the op norms them and rotates them by their position
# (rotary embedding), if it is given the weights and angles.
# Shapes: B rows, T = B * q new tokens, q of each row, H query heads, K kv heads, D head dimension, P pages, S page
# size, N page numbers of all rows.

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from compiled_llm_ops.attention.lse import kernel_of_both, over_pages, with_lse
from compiled_llm_ops.attention.preparation import check_preparation, prepared
from compiled_llm_ops.contracts import (
    DecodeAttention,
    PageTable,
    check_capability,
    check_even_heads,
    check_int32,
    check_pages,
    check_scales,
    newest_pages,
    value_size,
)
from compiled_llm_ops.contracts.devices import device_of
from compiled_llm_ops.library import define_op
from compiled_llm_ops.plain_attention import as_arrays, attend_row_by_row, attend_to_listed, gather, store

if TYPE_CHECKING:
    from compiled_llm_ops.kernels.logits import LogitsTransform


@define_op(DecodeAttention, writes=("pages", "saturated"))
def decode_attention(args: DecodeAttention) -> Tensor:
    """Write the keys and values of each row's q newest tokens into its pages, then attend with their queries.

    Token t of row b lies in page ``indices[starts[b] + t // S]``, slot ``t % S``; the newest is number
    ``lengths[b] - 1``. Each query sees its own token and those before it. Page numbers that a row will need may stand
    behind those that it has, so that it enters a page by its length alone. The op needs no plan, and a captured launch
    may be replayed with any lengths.

    Args:
        query: ``[T, H, D]``, any strides, the tokens of a row next to each other; T a multiple of B, H one of K.
        key: ``[T, K, D]``, any strides, of the query's dtype.
        value: ``[T, K, D]``, like ``key``, or ``[T, K, E]``.
        pages: ``[P, 2, K, S, D']`` with D' >= D, written in place; columns past D are zero, and left alone. For values
            of another size ``[P, K, S, D + E]``, each key followed by its value, on a CPU only.
        starts: ``[B]`` int32, where each row's pages begin in ``indices``.
        lengths: ``[B]`` int32, tokens of each row, the new ones included; at least q.
        indices: ``[N]`` int32, page numbers.
        scale: factor on the logits before the softmax.
        window_left: tokens visible to the left of each query; -1 for all.
        logits_soft_cap: ``cap * tanh(logits / cap)`` after scaling; 0.0 for none.
        query_norm: ``[D]`` of the query's dtype: first, each head of the query is divided by its root mean square and
            multiplied with this. None if the query needs no norm.
        key_norm: ``[D]``, the same for the key.
        epsilon: added to both mean squares.
        cos: ``[T, D]`` of the query's dtype: after their norm, query and key are rotated by their position. None if
            they need no rotation.
        sin: ``[T, D]``, belongs to ``cos``.
        overlap: whether it may run at the same time as the previous and the next kernel on CUDA, by the rules of
            ``compiled_llm_ops.kernels.pdl``; the previous kernel must not write ``starts``, ``lengths`` or ``indices``
            then.
        key_scale: ``[K]`` float32, by kv head, for pages of ``torch.float8_e4m3fn`` only: they hold each key divided by
            it, clamped to -448 to 448 and rounded, and are read times it. None for 1.
        value_scale: ``[K]`` float32, the same for values.
        saturated: ``[1]`` int64, written: to it is added how many numbers had to be clamped. None to count nothing.
        visible: ``[B, K, n]`` int32, any strides, n at most P: which of its pages each row and kv head reads, as
            numbers among the row's own pages (page p has its tokens ``p * S`` to ``p * S + S - 1``), each once, in any
            order, and -1 for none. Pages in which new tokens lie are read in any case, and may be listed; pages that
            the row does not have are left out. A window or the tokens' own order hides keys of these pages as it does
            without a list. None to read all pages.

    Returns:
        ``[T, H, D]``, contiguous, of the query's dtype; ``[T, H, E]`` for values of another size.

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source:
        On CUDA a Triton kernel of our own after Flash-Decoding (https://pytorch.org/blog/flash-decoding/). Norm and
        rotary embedding as in Llama and Qwen3 (https://arxiv.org/abs/2104.09864), in float32 on CUDA. Lists of pages
        as in Quest (https://arxiv.org/abs/2406.10774).
    """
    return over_pages(args.query, args.pages)


decode_attention_lse = with_lse(decode_attention)


def check(op: str, args: DecodeAttention) -> None:
    """Raise ValueError, in the name of ``op``, if shapes or dtypes do not fit together."""
    query, key, value, pages = args.query, args.key, args.value, args.pages
    check_pages(op, query, pages)
    tokens, kv_heads, head_dim = query.shape[0], pages.shape[-3], query.shape[2]
    expected, of_values = (tokens, kv_heads, head_dim), (tokens, kv_heads, value_size(query, pages))
    if key.shape != expected or value.shape != of_values or key.dtype != value.dtype:
        raise ValueError(
            f"{op}: key and value must be {expected} of one dtype for {tokens} tokens; got "
            f"{tuple(key.shape)} {key.dtype} and {tuple(value.shape)} {value.dtype}"
        )
    if args.starts.dim() != 1 or args.starts.shape != args.lengths.shape or tokens % max(1, len(args.starts)):
        raise ValueError(
            f"{op}: starts and lengths must be [B], and {tokens} tokens as many for each row; got "
            f"{tuple(args.starts.shape)} and {tuple(args.lengths.shape)}"
        )
    check_int32(op, starts=args.starts, lengths=args.lengths, indices=args.indices)
    check_preparation(op, args)
    check_scales(op, args.pages, args.key_scale, args.value_scale, args.saturated)
    if args.visible is not None:
        _check_visible(op, args.visible, args)


def _check_visible(op: str, visible: Tensor, args: DecodeAttention) -> None:
    rows, pages, kv_heads = len(args.starts), len(args.pages), args.pages.shape[-3]
    fits = visible.dim() == 3 and visible.shape[:2] == (rows, kv_heads) and visible.shape[2] <= pages
    if not fits or visible.device != args.pages.device:
        raise ValueError(
            f"{op}: visible must be [{rows}, {kv_heads}, n] on {args.pages.device}, with lists no longer than the "
            f"{pages} pages; got {tuple(visible.shape)} on {visible.device}"
        )
    check_int32(op, visible=visible)


# ---- CPU: in plain PyTorch


class RowPlaces:
    """Places of the tokens of a step's rows, the same in all layers that follow the same page numbers."""

    # ``pages`` and ``slots`` are ``[T]`` int64, of each new token; ``lengths`` count the new ones, too, and ``longest``
    # is the most.

    def __init__(self, args: DecodeAttention) -> None:
        page_size, new = args.pages.shape[-2], args.new_tokens
        starts, lengths, indices = as_arrays(args.starts, args.lengths, args.indices)
        starts, lengths = starts[:, None], lengths[:, None]
        pages, slots = np.divmod(lengths + np.arange(-new, 0), page_size)
        written = indices[starts + pages].astype(np.int64)  # PyTorch indexes by 64 bits in less time
        self.pages = torch.from_numpy(written.ravel())
        self.slots = torch.from_numpy(slots.ravel())
        self.lengths: list[int] = args.lengths.tolist()
        self.longest = max(self.lengths)
        self._visible: dict[int, Tensor | None] = {}
        self._page_size = page_size
        self._starts = starts
        self._indices = indices
        self._last = pages[:, -1:]

    @cached_property
    def numbers(self) -> Tensor:
        """``[B, n]``, the numbers of each row's pages, and again that of its last; n for the longest row."""
        own = np.minimum(np.arange(-(-self.longest // self._page_size)), self._last)
        return torch.from_numpy(self._indices[self._starts + own])

    @property
    def uneven(self) -> bool:
        """Whether to pad all rows to the longest would more than double their tokens."""
        return len(self.lengths) * self.longest > 2 * sum(self.lengths)

    def visible(self, window_left: int) -> Tensor | None:
        """Return ``[B, 1, 1, L]`` bool, which tokens the newest one of a row sees; None if it sees all."""
        if window_left not in self._visible:
            self._visible[window_left] = self._find_visible(window_left)
        return self._visible[window_left]

    def _find_visible(self, window_left: int) -> Tensor | None:
        if len(self.lengths) == 1 or (window_left < 0 and min(self.lengths) == self.longest):
            return None
        position, length = np.arange(self.longest), np.array(self.lengths)[:, None]
        seen = position < length
        if window_left >= 0:
            seen &= position >= length - 1 - window_left
        return torch.from_numpy(seen)[:, None, None, :]


class SharedPlaces:
    """The attention of a step that runs uncompiled on a CPU: the first layer to attend finds the places for all."""

    # The ops find them in each layer, and check their arguments: for few rows that takes longer than to attend.

    def __init__(self) -> None:
        self._places: RowPlaces | None = None

    def attend(self, args: DecodeAttention, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
        """Return what ``decode_attention`` and ``decode_attention_lse`` do, of arguments that fit."""
        if self._places is None:
            self._places = RowPlaces(args)
        return attend_on_cpu(args, wants_lse, self._places)


def append(args: DecodeAttention, places: RowPlaces) -> None:
    """Write the new keys and values; arguments are not checked."""
    store(args, places.pages, places.slots, prepared(args.key, args.key_norm, args))


def attend_on_cpu(
    args: DecodeAttention, wants_lse: bool, places: RowPlaces | None = None
) -> tuple[Tensor, Tensor | None]:
    """Write the new keys and values, then attend; arguments are not checked. ``places`` are found if None."""
    places = places or RowPlaces(args)
    append(args, places)
    query = prepared(args.query, args.query_norm, args)
    scales = args.key_scale, args.value_scale
    if args.visible is not None:
        out, lse = attend_to_listed(query, args, args.visible, pages_of_rows(args))
        return out, lse if wants_lse else None
    if wants_lse or args.logits_soft_cap > 0 or args.new_tokens > 1 or scales != (None, None) or places.uneven:
        how = (args.scale, args.window_left, args.logits_soft_cap)
        return attend_row_by_row(query, args.pages, _as_table(args), *how, wants_lse, *scales)
    return _attend(query, args, places), None


def pages_of_rows(args: DecodeAttention) -> list[Tensor]:
    """Return the numbers of each row's pages."""
    counts = [-(-length // args.pages.shape[-2]) for length in args.lengths.tolist()]
    return [args.indices[start : start + count] for start, count in zip(args.starts.tolist(), counts, strict=True)]


def _as_table(args: DecodeAttention) -> PageTable:
    """Return the page table of the rows, which has no other pages than theirs."""
    own = pages_of_rows(args)
    counts = torch.tensor([0, *map(len, own)], dtype=torch.int32, device="cpu")
    qo_indptr = torch.arange(len(own) + 1, dtype=torch.int32, device="cpu") * args.new_tokens
    last_page_len = (args.lengths - 1) % args.pages.shape[-2] + 1
    return PageTable(qo_indptr, counts.cumsum(0).int(), torch.cat(own), last_page_len)


def _attend(query: Tensor, args: DecodeAttention, places: RowPlaces) -> Tensor:
    """Attend with one query a row over its pages, all rows padded to the longest."""
    rows, heads, head_dim = query.shape
    kv_heads, longest = args.pages.shape[-3], places.longest
    keys, values = gather(args.pages, places.numbers, head_dim, query.dtype)
    first = max(0, longest - 1 - args.window_left) if rows == 1 and args.window_left >= 0 else 0
    out: Tensor = torch.nn.functional.scaled_dot_product_attention(
        query.view(rows, kv_heads, heads // kv_heads, head_dim),  # the query heads of a kv head as if they were queries
        keys[..., first:longest, :],
        values[..., first:longest, :],
        attn_mask=places.visible(args.window_left),
        scale=args.scale,
    )
    return out.reshape(rows, heads, -1)


# ---- CUDA


def attend_on_cuda(
    args: DecodeAttention, wants_lse: bool, transform: LogitsTransform | None = None
) -> tuple[Tensor, Tensor | None]:
    """Launch the kernel. Arguments are not checked."""
    out, lse, launch = prepare_on_cuda(args, wants_lse, transform=transform)
    with torch.cuda.device(args.query.device):  # Triton launches on the current one
        launch()
    return out, lse


def prepare_on_cuda(
    args: DecodeAttention,
    wants_lse: bool,
    shared_lengths: Tensor | None = None,
    transform: LogitsTransform | None = None,
) -> tuple[Tensor, Tensor | None, Callable[[], None]]:
    """Return the results, and what launches the kernel that writes them; arguments are not checked."""
    # The kernel leaves out as many of each row's first keys as ``shared_lengths`` says.
    from compiled_llm_ops.kernels.attention import decode_tiling
    from compiled_llm_ops.kernels.attention.decode import prepare_decode
    from compiled_llm_ops.kernels.pdl import has_pdl

    (tokens, heads, _), (_, _, kv_heads, page_size, padded) = args.query.shape, args.pages.shape
    device, queries = device_of(args.query.device), args.new_tokens * (heads // kv_heads)
    # Nothing that changes from step to step: a captured launch is replayed with rows of other lengths.
    max_keys = args.indices.shape[0] * page_size
    max_keys = max_keys if args.window_left < 0 else min(max_keys, args.window_left + args.new_tokens)
    choose = decode_tiling.choose_attention_tiling
    if args.visible is not None:
        max_keys = (args.visible.shape[2] + newest_pages(args.new_tokens, page_size)) * page_size
        choose = decode_tiling.choose_listed_tiling
    tiling = choose(
        len(args.starts), kv_heads, queries, padded, max_keys, device.processors, device.shared_memory,
        args.pages.element_size(), args.query.element_size(),
    )  # fmt: skip
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=args.query.device) if wants_lse else None
    pdl = args.overlap and has_pdl(args.query.device)
    out, launch = prepare_decode(args, lse, tiling=tiling, pdl=pdl, shared_lengths=shared_lengths, transform=transform)
    return out, lse, launch


@kernel_of_both(decode_attention, "CPU")
def _cpu(args: DecodeAttention, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    check("decode_attention", args)
    return attend_on_cpu(args, wants_lse)


@kernel_of_both(decode_attention, "CUDA")
def _cuda(args: DecodeAttention, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    check("decode_attention", args)
    check_even_heads("decode_attention", args.pages)
    check_capability("decode_attention", args.pages)
    return attend_on_cuda(args, wants_lse)
