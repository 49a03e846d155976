"""Decode: one new token a row, whose keys and values are written into the pages, and whose query attends over them.

Queries and keys may come as the layer's product made them: the op norms them and turns them by their position
(rotary embedding), if it is given what for.

Two ops rather than an optional output: ``decode_attention``, and ``decode_attention_lse`` which also returns the
log-sum-exp.

Shapes: B rows, H query heads, K kv heads, D head dimension, P pages, S page size, N entries of the page table,
L tokens of one row in the cache, the new one included.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from compiled_llm_ops.attention.prefill import gather, paged_attention, paged_attention_lse
from compiled_llm_ops.kernels import attention_tiling
from compiled_llm_ops.kernels.overlap import possible
from compiled_llm_ops.library import check_int32, define

_SIGNATURE = (
    "(Tensor query, Tensor key, Tensor value, Tensor(a!) pages, Tensor indptr, Tensor indices, Tensor last_page_len, "
    "float scale, int window_left=-1, float logits_soft_cap=0.0, Tensor? query_norm=None, Tensor? key_norm=None, "
    "float epsilon=0.0, Tensor? cos=None, Tensor? sin=None, bool overlap=False)"
)


class Arguments(NamedTuple):
    """What both ops take; see ``decode_attention``."""

    query: Tensor
    key: Tensor
    value: Tensor
    pages: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    scale: float
    window_left: int = -1
    logits_soft_cap: float = 0.0
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    epsilon: float = 0.0
    cos: Tensor | None = None
    sin: Tensor | None = None
    overlap: bool = False


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    scale: float,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    epsilon: float = 0.0,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    overlap: bool = False,
) -> Tensor:
    """Write each row's newest key and value into its pages, then attend with its query over all of them.

    The newest token of row b goes to page ``indices[indptr[b + 1] - 1]``, slot ``last_page_len[b] - 1``: the table says
    how the rows are with it. Nothing has to be planned, and a recorded launch may be replayed with any lengths.

    Args:
        query: ``[B, H, D]``, any strides; H a multiple of K.
        key: ``[B, K, D]``, any strides, of the query's dtype.
        value: ``[B, K, D]``, like ``key``.
        pages: ``[P, 2, K, S, D']`` with D' >= D, written in place; columns past D are zero, and left alone.
        indptr: ``[B + 1]`` int32, where each row's pages begin in ``indices``.
        indices: ``[N]`` int32, page numbers.
        last_page_len: ``[B]`` int32, tokens in each row's last page, 1 to S.
        scale: factor on the logits before the softmax.
        window_left: tokens visible to the left of each query; -1 for all.
        logits_soft_cap: ``cap * tanh(logits / cap)`` after scaling; 0.0 for none.
        query_norm: ``[D]`` of the query's dtype: each head of the query is divided by its root mean square, and
            multiplied with this, first. None where it comes as it is to be.
        key_norm: ``[D]``, the same for the key.
        epsilon: is added to both mean squares.
        cos: ``[B, D]`` of the query's dtype: query and key are turned by their position, after their norm. None where
            they come turned, or are not turned at all.
        sin: ``[B, D]``, belongs to ``cos``.
        overlap: whether CUDA may run it while the kernels in front and behind run, under the rules of
            ``compiled_llm_ops.kernels.overlap``; what is in front of it must not write ``indptr``, ``indices`` or
            ``last_page_len`` then.

    Returns:
        ``[B, H, D]``, contiguous, of the query's dtype.

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source:
        On CUDA a Triton kernel of our own after Flash-Decoding (https://pytorch.org/blog/flash-decoding/). Norm and
        rotary embedding as in Llama and Qwen3 (https://arxiv.org/abs/2104.09864), in float32 on CUDA.
    """
    given = (query, key, value, pages, indptr, indices, last_page_len, scale, window_left, logits_soft_cap)
    out: Tensor = _decode_attention(*given, query_norm, key_norm, epsilon, cos, sin, overlap)
    return out


def decode_attention_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    scale: float,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    epsilon: float = 0.0,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    overlap: bool = False,
) -> tuple[Tensor, Tensor]:
    """``decode_attention`` that also returns the log-sum-exp of each query's logits.

    Args:
        query: ``[B, H, D]``, any strides; H a multiple of K.
        key: ``[B, K, D]``, any strides, of the query's dtype.
        value: ``[B, K, D]``, like ``key``.
        pages: ``[P, 2, K, S, D']`` with D' >= D, written in place; columns past D are zero, and left alone.
        indptr: ``[B + 1]`` int32, where each row's pages begin in ``indices``.
        indices: ``[N]`` int32, page numbers.
        last_page_len: ``[B]`` int32, tokens in each row's last page, 1 to S.
        scale: factor on the logits before the softmax.
        window_left: tokens visible to the left of each query; -1 for all.
        logits_soft_cap: ``cap * tanh(logits / cap)`` after scaling; 0.0 for none.
        query_norm: ``[D]`` of the query's dtype: each head of the query is divided by its root mean square, and
            multiplied with this, first. None where it comes as it is to be.
        key_norm: ``[D]``, the same for the key.
        epsilon: is added to both mean squares.
        cos: ``[B, D]`` of the query's dtype: query and key are turned by their position, after their norm. None where
            they come turned, or are not turned at all.
        sin: ``[B, D]``, belongs to ``cos``.
        overlap: whether CUDA may run it while the kernels in front and behind run, under the rules of
            ``compiled_llm_ops.kernels.overlap``; what is in front of it must not write ``indptr``, ``indices`` or
            ``last_page_len`` then.

    Returns:
        ``[B, H, D]`` of the query's dtype, and ``[B, H]`` float32: the log-sum-exp in base 2 (multiply by ln 2 for
        the natural one). Both contiguous.

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source:
        On CUDA the Triton kernel of ``decode_attention``, after Flash-Decoding
        (https://pytorch.org/blog/flash-decoding/).
    """
    given = (query, key, value, pages, indptr, indices, last_page_len, scale, window_left, logits_soft_cap)
    out, lse = _decode_attention_lse(*given, query_norm, key_norm, epsilon, cos, sin, overlap)
    return out, lse


def _check(given: Arguments) -> None:
    query, key, value, pages, indptr, indices, last_page_len = given[:7]
    if query.dim() != 3 or pages.dim() != 5 or pages.shape[1] != 2:
        raise ValueError(
            "decode_attention: query must be [B, H, D] and pages [P, 2, K, S, D]; got "
            f"{tuple(query.shape)} and {tuple(pages.shape)}"
        )
    (rows, heads, head_dim), (kv_heads, _, stored) = query.shape, pages.shape[2:]
    if heads % kv_heads or head_dim > stored:
        raise ValueError(
            f"decode_attention: {heads} query heads of size {head_dim} do not fit pages with {kv_heads} kv heads of "
            f"size {stored}"
        )
    expected = (rows, kv_heads, head_dim)
    if key.shape != expected or value.shape != expected or key.dtype != value.dtype:
        raise ValueError(
            f"decode_attention: key and value must be {expected} of one dtype for {rows} rows; got "
            f"{tuple(key.shape)} {key.dtype} and {tuple(value.shape)} {value.dtype}"
        )
    if indptr.shape != (rows + 1,) or last_page_len.shape != (rows,):
        raise ValueError(
            f"decode_attention: indptr must be [{rows + 1}] and last_page_len [{rows}] for {rows} rows; got "
            f"{tuple(indptr.shape)} and {tuple(last_page_len.shape)}"
        )
    check_int32("decode_attention", indptr=indptr, indices=indices, last_page_len=last_page_len)
    _check_preparation(given)


def _check_preparation(given: Arguments) -> None:
    """Check what queries and keys are normed and turned with."""
    rows, _, head_dim = given.query.shape
    if (given.cos is None) is not (given.sin is None):
        raise ValueError("decode_attention: cos and sin must be given together")
    if given.cos is not None and head_dim % 2:
        raise ValueError(f"decode_attention: heads of size {head_dim} cannot be turned: the size is odd")
    sizes = {"query_norm": (head_dim,), "key_norm": (head_dim,), "cos": (rows, head_dim), "sin": (rows, head_dim)}
    for name, size in sizes.items():
        tensor = getattr(given, name)
        if tensor is not None and (tensor.shape != size or tensor.dtype != given.query.dtype):
            raise ValueError(
                f"decode_attention: {name} must be {size} {given.query.dtype}; got {tuple(tensor.shape)} {tensor.dtype}"
            )


# ---- CPU: in plain PyTorch


def _prepared(states: Tensor, norm: Tensor | None, given: Arguments) -> Tensor:
    """Return ``[B, heads, D]`` queries or keys, normed and turned as HuggingFace's models do it."""
    if norm is not None:
        numbers = states.float()
        numbers = numbers * torch.rsqrt(numbers.pow(2).mean(-1, keepdim=True) + given.epsilon)
        states = norm * numbers.to(states.dtype)
    if given.cos is not None and given.sin is not None:
        first, second = states.chunk(2, -1)
        states = states * given.cos[:, None] + torch.cat([-second, first], -1) * given.sin[:, None]
    return states


def _append(given: Arguments) -> None:
    pages, key = given.pages, _prepared(given.key, given.key_norm, given)
    page = given.indices[given.indptr[1:] - 1]
    newest = torch.stack([key, given.value], dim=1).to(pages.dtype)
    pages[page, :, :, given.last_page_len - 1, : key.shape[2]] = newest


def _one_each(rows: int) -> Tensor:
    """Return the ``qo_indptr`` of one query a row."""
    return torch.arange(rows + 1, dtype=torch.int32)


def _cpu(*arguments: Any) -> Tensor:
    given = Arguments(*arguments)
    _check(given)
    _append(given)
    query = _prepared(given.query, given.query_norm, given)
    starts = given.indptr.tolist()
    counts = [end - start for start, end in pairwise(starts)]
    if given.logits_soft_cap > 0 or len(counts) * max(counts) > 2 * sum(counts):
        return paged_attention(query, given.pages, _one_each(len(query)), *given[4:10])
    lengths = given.last_page_len.tolist()
    return _attend(query, given.pages, starts, given.indices, lengths, given.scale, given.window_left)


def _cpu_lse(*arguments: Any) -> tuple[Tensor, Tensor]:
    given = Arguments(*arguments)
    _check(given)
    _append(given)
    query = _prepared(given.query, given.query_norm, given)
    return paged_attention_lse(query, given.pages, _one_each(len(query)), *given[4:10])


def _attend(
    query: Tensor,
    pages: Tensor,
    indptr: list[int],
    indices: Tensor,
    last_page_len: list[int],
    scale: float,
    window_left: int,
) -> Tensor:
    """Attend with one query a row, all rows padded to the longest."""
    rows, heads, head_dim = query.shape
    kv_heads, page_size = pages.shape[2:4]
    own = [indices[start:end] for start, end in pairwise(indptr)]
    lengths = [(len(row) - 1) * page_size + last for row, last in zip(own, last_page_len, strict=True)]
    longest = max(lengths)
    keys, values = gather(pages, pad_sequence(own, batch_first=True), head_dim, query.dtype)
    first = 0
    visible = None
    if rows > 1 and (window_left >= 0 or min(lengths) < longest):
        position, length = torch.arange(longest), torch.tensor(lengths)[:, None]
        visible = position < length
        if window_left >= 0:
            visible &= position >= length - 1 - window_left
        visible = visible[:, None, None, :]
    elif window_left >= 0:
        first = max(0, longest - 1 - window_left)
    out: Tensor = torch.nn.functional.scaled_dot_product_attention(
        query.view(rows, kv_heads, heads // kv_heads, head_dim),  # a group of heads as if it were so many queries
        keys[..., first:longest, :],
        values[..., first:longest, :],
        attn_mask=visible,
        scale=scale,
    )
    return out.reshape(query.shape)


# ---- CUDA


class _Device(NamedTuple):
    processors: int
    shared_memory: int


@functools.cache
def _device(device: torch.device) -> _Device:
    properties = torch.cuda.get_device_properties(device)
    return _Device(
        properties.multi_processor_count,
        properties.shared_memory_per_multiprocessor,
    )


def _launch(given: Arguments, lse: Tensor | None) -> Tensor:
    from compiled_llm_ops.kernels import attention as triton_attention

    _, _, kv_heads, page_size, padded = given.pages.shape
    rows, heads, _ = given.query.shape
    device = _device(given.query.device)
    # Nothing that changes from step to step: a recorded launch is replayed with rows of other lengths.
    most_keys = given.indices.shape[0] * page_size
    most_keys = most_keys if given.window_left < 0 else min(most_keys, given.window_left + 1)
    tiling = attention_tiling.choose(
        rows, kv_heads, heads // kv_heads, padded, most_keys, device.processors, device.shared_memory
    )
    with torch.cuda.device(given.query.device):  # Triton launches on the current one
        pdl = given.overlap and possible(given.query.device)
        return triton_attention.decode(given, lse, tiling=tiling, pdl=pdl)


def _cuda(*arguments: Any) -> Tensor:
    given = Arguments(*arguments)
    _check(given)
    return _launch(given, None)


def _cuda_lse(*arguments: Any) -> tuple[Tensor, Tensor]:
    given = Arguments(*arguments)
    _check(given)
    lse = torch.empty(given.query.shape[:2], dtype=torch.float32, device=given.query.device)
    return _launch(given, lse), lse


# ---- fakes


def _fake(query: Tensor, *_: Any) -> Tensor:
    return query.new_empty(query.shape)


def _fake_lse(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32)


_decode_attention = define(f"decode_attention{_SIGNATURE} -> Tensor", fake=_fake, cpu=_cpu, cuda=_cuda)
_decode_attention_lse = define(
    f"decode_attention_lse{_SIGNATURE} -> (Tensor, Tensor)", fake=_fake_lse, cpu=_cpu_lse, cuda=_cuda_lse
)
