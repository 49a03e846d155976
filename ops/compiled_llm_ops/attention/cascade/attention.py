"""Cascade attention: decode where pages that several rows begin with, such as a system prompt's, are read once."""

# Queries of all rows that share a run of pages attend over it together. The result of each over its own keys, and those
# over the runs that it begins with, are then merged by their log-sum-exps.
# Shapes: B rows, H query heads, K kv heads, D head dimension, P pages, S page size, N page numbers of all rows, M
# members of all runs, W work items.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compiled_llm_ops.attention.cascade.contract import CASCADE_LEVELS, CascadeAttention
from compiled_llm_ops.attention.decode import attend_on_cpu, check as check_decode, prepare_on_cuda
from compiled_llm_ops.attention.lse import kernel_of_both, over_pages, with_lse
from compiled_llm_ops.attention.merge import merged
from compiled_llm_ops.attention.preparation import prepared
from compiled_llm_ops.contracts import (
    CASCADE_QUERIES,
    check_capability,
    check_even_heads,
    check_int32,
    value_size,
)
from compiled_llm_ops.contracts.devices import device_of
from compiled_llm_ops.library import define_op
from compiled_llm_ops.plain_attention import attend_lse, gather
from compiled_llm_ops.protocol import JOINT

if TYPE_CHECKING:
    from compiled_llm_ops.attention.cascade.kernels.tiling import CascadeTiling


@define_op(CascadeAttention, writes=("pages", "saturated"))
def cascade_attention(args: CascadeAttention) -> Tensor:
    """``decode_attention`` of one new token a row, which reads pages that rows share once for all of them.

    ``cascade_tables`` makes the tables that say which runs of pages are shared, by whom, and how they are divided.
    They change only when rows come or go: a captured launch may be replayed with any tables of the same shapes, and
    with any lengths.

    A work item is a piece of a run, and members that read it together. Member i of an item writes part
    ``first part + i``: the result of its row's query over the item's keys, and its log-sum-exp.

    Args:
        query: ``[B, H, D]``, as of ``decode_attention``.
        key: ``[B, K, D]``, of the query's dtype.
        value: ``[B, K, D]``, like ``key``, or ``[B, K, E]``.
        pages: ``[P, 2, K, S, D']`` or, on a CPU, ``[P, K, S, D + E]``, written in place, as of ``decode_attention``.
        starts: ``[B]`` int32, where each row's pages begin in ``indices``.
        lengths: ``[B]`` int32, tokens of each row, the new one included.
        indices: ``[N]`` int32, page numbers; those of a run stand in each of its rows.
        shared_lengths: ``[B]`` int32, so many of each row's first keys lie in shared runs: a multiple of S, less than
            the row's length; 0 for a row in no run.
        members: ``[M]`` int32, row numbers, those of an item next to each other.
        work_items: ``[W, 6]`` int32: where the item's first page stands in ``indices``; the position of its first key
            in the rows, and how many keys it has, both multiples of S; its first entry in ``members``, and how many
            members it has, at most 64 divided by G, where G is H / K rounded up to a power of two; its first part.
            Items without members are unused, and come last.
        merge_parts: ``[B, 3, 3]`` int32: for each of up to three runs that a row begins with, the first of the row's
            parts, how many they are, and their distance; 0 parts if there is none.
        max_parts: parts that there is memory for.
        scale: factor on the logits before the softmax.
        window_left: tokens visible to the left of each query, in shared runs as well; -1 for all.
        logits_soft_cap: ``cap * tanh(logits / cap)`` after scaling; 0.0 for none.
        query_norm: ``[D]``, as of ``decode_attention``.
        key_norm: ``[D]``, the same for the key.
        epsilon: added to both mean squares.
        cos: ``[B, D]`` of the query's dtype, as of ``decode_attention``.
        sin: ``[B, D]``, belongs to ``cos``.
        overlap: as of ``decode_attention``; the previous kernel must not write the tables either.
        key_scale: ``[K]`` float32, for pages of ``torch.float8_e4m3fn`` only, as of ``decode_attention``.
        value_scale: ``[K]`` float32, the same for values.
        saturated: ``[1]`` int64, written, as of ``decode_attention``.

    Returns:
        ``[B, H, D]``, contiguous, of the query's dtype; ``[B, H, E]`` for values of another size.

    Raises:
        ValueError: shapes or dtypes do not fit together, or rows have several new tokens.

    Source:
        Hydragen (https://arxiv.org/abs/2402.05099) and FlashInfer's cascade inference
        (https://flashinfer.ai/2024/02/02/cascade-inference.html). On CUDA the kernel of ``decode_attention`` for what
        a row has alone, and Triton kernels of our own for runs and for the merge; parts are float32.
    """
    return over_pages(args.query, args.pages)


cascade_attention_lse = with_lse(cascade_attention)
JOINT += [torch.ops.compiled_llm.cascade_attention.default, torch.ops.compiled_llm.cascade_attention_lse.default]


def _check(args: CascadeAttention) -> None:
    op = "cascade_attention"
    check_decode(op, args.whole_rows)
    rows = len(args.starts)
    if len(args.query) != rows:
        raise ValueError(
            f"{op}: each row must have exactly one new token; got {len(args.query)} tokens for {rows} rows"
        )
    shapes = {"shared_lengths": (rows,), "merge_parts": (rows, CASCADE_LEVELS, 3)}
    shapes |= {"members": (args.members.numel(),), "work_items": (args.work_items.shape[0], 6)}
    for name, shape in shapes.items():
        if getattr(args, name).shape != shape:
            raise ValueError(f"{op}: {name} must be {shape} for {rows} rows; got {tuple(getattr(args, name).shape)}")
    check_int32(op, **{name: getattr(args, name) for name in shapes})
    gqa = args.query.shape[1] // args.pages.shape[-3]
    if gqa > CASCADE_QUERIES:
        raise ValueError(f"{op}: a kv head may have at most {CASCADE_QUERIES} query heads; got {gqa}")
    if args.max_parts < 0:
        raise ValueError(f"{op}: max_parts={args.max_parts} must not be negative")


# ---- CPU: in plain PyTorch, by the same tables


def _parts(args: CascadeAttention) -> tuple[Tensor, Tensor]:
    """Return the parts ``[max_parts, H, D]`` and their log-sum-exps; NaN where no item writes."""
    query = prepared(args.query, args.query_norm, args.whole_rows)
    sizes, page_size = (args.max_parts, query.shape[1]), args.pages.shape[-2]
    parts = torch.full((*sizes, value_size(query, args.pages)), torch.nan, dtype=torch.float32, device=query.device)
    lses = torch.full(sizes, torch.nan, dtype=torch.float32, device=query.device)
    for first_page, position, count, first_member, member_count, first_part in args.work_items.tolist():
        if not member_count:
            break
        rows = args.members[first_member : first_member + member_count]
        numbers = args.indices[first_page : first_page + count // page_size]
        keys, values = gather(args.pages, numbers, query.shape[2], query.dtype)
        visible, first = None, 0
        if args.window_left >= 0:
            nearest = args.lengths[rows] - 1 - args.window_left - position
            first = max(0, int(nearest.min()))  # pages before all windows may be free, and hold anything
            visible = torch.arange(first, max(first, count), device=query.device) >= nearest[:, None]
        seen = keys[:, first:], values[:, first:]
        written = slice(first_part, first_part + member_count)
        scales = args.key_scale, args.value_scale
        parts[written], lses[written] = attend_lse(
            query[rows], *seen, args.scale, visible, args.logits_soft_cap, *scales
        )
    return parts, lses


@kernel_of_both(cascade_attention, "CPU")
def _cpu(args: CascadeAttention, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    _check(args)
    tails = args.whole_rows._replace(
        starts=args.starts + args.shared_lengths // args.pages.shape[-2], lengths=args.lengths - args.shared_lengths
    )
    out, lse = attend_on_cpu(tails, True)
    assert lse is not None
    _merge_on_cpu(out, lse, *_parts(args), args.merge_parts)
    return out, lse if wants_lse else None


def _merge_on_cpu(out: Tensor, lse: Tensor, parts: Tensor, lses: Tensor, table: Tensor) -> None:
    """Merge parts ``[P, H, D]`` and ``[P, H]`` into the states of rows, by ``merge_parts`` of ``cascade_attention``."""
    for row, levels in enumerate(table.tolist()):
        own = [first + part * distance for first, count, distance in levels for part in range(count)]
        if own:
            states = torch.cat([out[row][None].float(), parts[own].float()]), torch.cat([lse[row][None], lses[own]])
            out[row], lse[row] = (state[0] for state in merged(*(state[None] for state in states)))


# ---- CUDA


@kernel_of_both(cascade_attention, "CUDA")
def _cuda(args: CascadeAttention, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    from compiled_llm_ops.attention.cascade.kernels.tiling import choose_cascade_tiling

    _check(args)
    check_even_heads("cascade_attention", args.pages)
    check_capability("cascade_attention", args.pages)
    properties, (_, _, kv_heads, _, stored) = device_of(args.query.device), args.pages.shape
    tiling = choose_cascade_tiling(
        kv_heads, stored, len(args.work_items), properties.processors, properties.shared_memory
    )
    out, lse = attend_by_kernels(_contiguous(args), tiling)
    return out, lse if wants_lse else None


def attend_by_kernels(args: CascadeAttention, tiling: CascadeTiling) -> tuple[Tensor, Tensor]:
    """Launch the kernels with a tiling of the one that reads runs; arguments, contiguous, are not checked."""
    from compiled_llm_ops.attention.cascade.kernels.shared_prefix import attend_over_runs, merge_parts
    from compiled_llm_ops.kernels.pdl import has_pdl

    device = args.query.device
    with torch.cuda.device(device):  # Triton launches on the current one
        pdl = args.overlap and has_pdl(device)
        out, lse, attend_over_tails = prepare_on_cuda(args.whole_rows, True, args.shared_lengths)
        assert lse is not None
        # Nothing may be launched between the two, which run side by side. Runs come first: their programs are few and
        # long, and those of the rows' own keys fill the room that they leave.
        parts, lses = attend_over_runs(args, tiling=tiling, pdl=pdl)
        attend_over_tails()
        merge_parts(out, lse, parts, lses, args.merge_parts, pdl=pdl)
    return out, lse


def _contiguous(args: CascadeAttention) -> CascadeAttention:
    """Return the arguments with all that kernels read in order, so that preparing a launch copies nothing."""
    states: dict[str, Any] = {name: getattr(args, name) for name in ("query", "key", "value")}
    tables = ("shared_lengths", "members", "work_items", "merge_parts")
    others = (*tables, "query_norm", "key_norm", "cos", "sin", "key_scale", "value_scale")
    whole: dict[str, Any] = {name: getattr(args, name) for name in others}
    states = {name: each if each.stride(2) == 1 else each.contiguous() for name, each in states.items()}
    whole = {name: each if each is None else each.contiguous() for name, each in whole.items()}
    return args._replace(**states, **whole)
