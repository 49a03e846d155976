"""Triton kernels that multiply rows with the weights of the experts that they chose."""

# In a step each program takes one expert and some outputs, looks for the rows that chose it, and reads these weights
# once for all of them. With many rows, pairs of a row and an expert are sorted first, and a program takes some that
# follow one another. Grids follow from shapes: programs of which there are too many end at once.
# Shapes: T rows, k experts of each, P = T * k pairs of a row and one of its experts, E experts, I inputs, O outputs.

# Kernels are Triton's objects, not the functions that a type checker sees.
# mypy: disable-error-code="assignment, var-annotated"
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm_ops.kernels.experts.experts_tiling import (
    FEW,
    MAX_STEP_ROWS,
    most_tiles,
    packed_tiling,
    step_tiling,
)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # 0.5 * (1 + tanh(y)) is the sigmoid of 2 * y
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "relu":
        x = tl.maximum(x, 0.0)
    elif ACTIVATION == "relu2":
        x = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    return x


@triton.jit
def _members(ids, pairs, expert, begin, place, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """Return ROWS pairs that chose an expert, from its ``begin``-th on, how many it has, and those before ``place``."""
    # Pairs that it does not have are 0.
    wanted = begin + tl.arange(0, ROWS)
    found = tl.zeros([ROWS], tl.int32)
    count = tl.sum(tl.zeros([CHUNK], tl.int32), 0)
    earlier = count
    for start in tl.range(0, pairs, CHUNK):
        offs = start + tl.arange(0, CHUNK)
        mine = (tl.load(ids + offs, mask=offs < pairs, other=-1).to(tl.int32) == expert).to(tl.int32)
        ranks = count + tl.cumsum(mine, 0) - 1
        hits = (ranks[None, :] == wanted[:, None]) & (mine[None, :] > 0)
        found += tl.sum(tl.where(hits, offs[None, :], 0), 1)
        count += tl.sum(mine, 0)
        earlier += tl.sum(tl.where(offs < place, mine, 0), 0)
    return found, count, earlier


@triton.jit
def _added(total, x, w, SWAPPED: tl.constexpr):
    if SWAPPED:
        total = tl.dot(tl.trans(w), tl.trans(x), total, input_precision="ieee")
    else:
        total = tl.dot(x, w, total, input_precision="ieee")
    return total


@triton.jit
def _multiply_tile(
    rows, weight, bias, out, pairs, live, expert, tile, inputs, outputs,
    expert_stride, output_stride, input_stride, bias_stride,
    SHARING: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Compute one tile of outputs of an expert for some pairs, over all inputs."""
    # A row stands for SHARING pairs. If GATED, there are twice as many weights, for the gate and for what it
    # multiplies.
    # Tensor cores take 64 rows of their first operand at a time, and as few as 8 columns of the second.
    SWAPPED: tl.constexpr = (ROWS < 64) & (OUTPUTS >= 64)
    offs_k = tl.arange(0, INPUTS)
    offs_n = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    inside_n = offs_n < outputs
    x_ptrs = rows + (pairs // SHARING).to(tl.int64)[:, None] * inputs + offs_k[None, :]
    w_ptrs = weight + expert.to(tl.int64) * expert_stride
    w_ptrs = w_ptrs + offs_n.to(tl.int64)[None, :] * output_stride + offs_k.to(tl.int64)[:, None] * input_stride
    total = tl.zeros([OUTPUTS, ROWS] if SWAPPED else [ROWS, OUTPUTS], tl.float32)
    second = total
    for k in tl.range(0, inputs, INPUTS, num_stages=STAGES):
        inside_k = k + offs_k < inputs
        x = tl.load(x_ptrs + k, mask=live[:, None] & inside_k[None, :], other=0.0)
        mask = inside_k[:, None] & inside_n[None, :]
        w = tl.load(w_ptrs, mask=mask, other=0.0)
        total = _added(total, x, w, SWAPPED)
        if GATED:
            v = tl.load(w_ptrs + outputs * output_stride, mask=mask, other=0.0)
            second = _added(second, x, v, SWAPPED)
        w_ptrs += INPUTS * input_stride
    if SWAPPED:
        total, second = tl.trans(total), tl.trans(second)
    if bias is not None:
        own = bias + expert.to(tl.int64) * bias_stride
        total += tl.load(own + offs_n, mask=inside_n, other=0.0).to(tl.float32)[None, :]
        if GATED:
            second += tl.load(own + outputs + offs_n, mask=inside_n, other=0.0).to(tl.float32)[None, :]
    total = _activated(total, ACTIVATION)
    if GATED:
        total = total * second
    at = out + pairs.to(tl.int64)[:, None] * outputs + offs_n[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=live[:, None] & inside_n[None, :])


@triton.jit(do_not_specialize=["pairs", "experts"])  # Triton would compile again for 1 and for multiples of 16
def _experts_step(
    rows, ids, weight, bias, out, pairs, experts, inputs, outputs,
    expert_stride, output_stride, input_stride, bias_stride,
    SHARING: tl.constexpr, BY_EXPERT: tl.constexpr, ROWS: tl.constexpr, FEW: tl.constexpr, CHUNK: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Compute one tile of outputs for all pairs that chose one expert."""
    # Axes of the grid: tiles of outputs, and experts, or, if there are fewer pairs, these; then the first of an
    # expert's pairs computes all of them.
    tile, place = tl.program_id(0), tl.program_id(1)
    expert = place if BY_EXPERT else tl.load(ids + place).to(tl.int32)
    found, count, earlier = _members(ids, pairs, expert, 0, 0 if BY_EXPERT else place, FEW, CHUNK)
    if (earlier == 0) & (count > 0) & (expert >= 0) & (expert < experts):
        if count <= FEW:
            _multiply_tile(
                rows, weight, bias, out, found, tl.arange(0, FEW) < count, expert, tile, inputs, outputs,
                expert_stride, output_stride, input_stride, bias_stride,
                SHARING, FEW, OUTPUTS, INPUTS, STAGES, GATED, ACTIVATION,
            )  # fmt: skip
        else:
            for begin in tl.range(0, count, ROWS):
                many, _, _ = _members(ids, pairs, expert, begin, 0, ROWS, CHUNK * FEW // ROWS)
                _multiply_tile(
                    rows, weight, bias, out, many, begin + tl.arange(0, ROWS) < count, expert, tile, inputs, outputs,
                    expert_stride, output_stride, input_stride, bias_stride,
                    SHARING, ROWS, OUTPUTS, INPUTS, 2, GATED, ACTIVATION,
                )  # fmt: skip


@triton.jit(do_not_specialize=["experts"])
def _experts_packed(
    rows, order, offsets, weight, bias, out, experts, inputs, outputs,
    expert_stride, output_stride, input_stride, bias_stride,
    SHARING: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Compute one tile of outputs for up to ROWS pairs of one expert, which follow one another in ``order``."""
    # Axes of the grid: tiles of outputs, and tiles of pairs, which begin anew with each expert.
    tile, number = tl.program_id(0), tl.program_id(1)
    offs = tl.arange(0, EXPERTS)
    begins = tl.load(offsets + offs, mask=offs < experts, other=0)
    counts = tl.load(offsets + offs + 1, mask=offs < experts, other=0) - begins
    tiles = (counts + ROWS - 1) // ROWS
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= number).to(tl.int32), 0)
    if expert < experts:
        first = tl.sum(tl.where(offs < expert, tiles, 0), 0)
        places = tl.load(offsets + expert) + (number - first) * ROWS + tl.arange(0, ROWS)
        live = places < tl.load(offsets + expert + 1)
        pairs = tl.load(order + places, mask=live, other=0)
        _multiply_tile(
            rows, weight, bias, out, pairs, live, expert, tile, inputs, outputs,
            expert_stride, output_stride, input_stride, bias_stride,
            SHARING, ROWS, OUTPUTS, INPUTS, STAGES, GATED, ACTIVATION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["experts"])
def _add_by_weight(answers, ids, weights, out, experts, size, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    """Add what the experts of one row answer, each by its weight, in the row's order."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(CHOSEN):
        pair = row * CHOSEN + place
        expert = tl.load(ids + pair)
        live = (expert >= 0) & (expert < experts) & (offs < size)
        answer = tl.load(answers + pair * size + offs, mask=live, other=0.0).to(tl.float32)
        total += answer * tl.load(weights + pair).to(tl.float32)
    tl.store(out + row * size + offs, total.to(out.dtype.element_ty), mask=offs < size)


class Epilogue(NamedTuple):
    """What follows a product."""

    activation: str = "none"  # one of ``EXPERT_ACTIVATIONS``
    # whether the activation is that of a gate, the first half of the outputs, which multiplies the other
    gated: bool = False


NO_EPILOGUE = Epilogue()


class RoutedRows(NamedTuple):
    """The experts that rows chose."""

    ids: Tensor  # ``[T, k]``, contiguous
    experts: int
    order: Tensor | None = None  # ``[P]`` int64, pairs by expert, those without one first or last; None in a step
    offsets: Tensor | None = None  # ``[E + 1]`` int32, where each expert's begin; None in a step


def routed(ids: Tensor, experts: int) -> RoutedRows:
    """Sort pairs by expert, unless they are few, on the current device, whatever was chosen; ``ids`` are ``[T, k]``."""
    if ids.shape[0] <= MAX_STEP_ROWS:
        return RoutedRows(ids, experts)
    keys = ids.flatten()
    if experts < 2**15:  # numbers of two bytes are sorted in fewer passes
        keys = keys.clamp(-1, experts).to(torch.int16)
    sorted_keys, order = keys.sort(stable=True)
    numbers = torch.arange(experts + 1, dtype=keys.dtype, device=ids.device)
    return RoutedRows(ids, experts, order, torch.searchsorted(sorted_keys, numbers, out_int32=True))


def multiply(
    rows: Tensor, routing: RoutedRows, weight: Tensor, bias: Tensor | None, out: Tensor, gate: Epilogue = NO_EPILOGUE
) -> None:
    """Multiply rows ``[T, I]`` or ``[P, I]`` with the experts that they chose, into ``out`` ``[P, O]``, contiguous."""
    # ``weight`` is ``[E, O, I]``, any strides, with twice as many outputs if gated; nothing is written for no expert.
    (pairs, outputs), inputs, (activation, gated) = out.shape, rows.shape[1], gate
    count, sharing = routing.ids.shape[0], routing.ids.shape[1] if len(rows) == routing.ids.shape[0] else 1
    if not pairs or not outputs:
        return
    bias = None if bias is None else bias.contiguous()
    sizes = inputs, outputs, *weight.stride(), outputs * (2 if gated else 1)
    if routing.order is None or routing.offsets is None:
        places = min(pairs, routing.experts)
        tiling = step_tiling(count, places, outputs, inputs, rows.element_size(), gated)
        _experts_step[(triton.cdiv(outputs, tiling.outputs), places)](
            rows, routing.ids, weight, bias, out, pairs, routing.experts, *sizes,
            SHARING=sharing, BY_EXPERT=routing.experts <= pairs, ROWS=tiling.rows, FEW=FEW, CHUNK=tiling.chunk,
            OUTPUTS=tiling.outputs, INPUTS=tiling.inputs, STAGES=tiling.stages, GATED=gated, ACTIVATION=activation,
            num_warps=tiling.warps,
        )  # fmt: skip
        return
    tiling = packed_tiling(pairs, routing.experts, rows.element_size(), gated)
    tiles = most_tiles(pairs, routing.experts, tiling.rows)
    _experts_packed[(triton.cdiv(outputs, tiling.outputs), tiles)](
        rows, routing.order, routing.offsets, weight, bias, out, routing.experts, *sizes,
        SHARING=sharing, EXPERTS=triton.next_power_of_2(routing.experts), ROWS=tiling.rows,
        OUTPUTS=tiling.outputs, INPUTS=tiling.inputs, STAGES=tiling.stages, GATED=gated, ACTIVATION=activation,
        num_warps=tiling.warps,
    )  # fmt: skip


def add_by_weight(answers: Tensor, ids: Tensor, weights: Tensor, out: Tensor, experts: int) -> None:
    """Write the sums ``[T, H]`` of answers ``[P, H]``, by weights ``[T, k]``; all is contiguous."""
    (rows, size), block = out.shape, min(1024, triton.next_power_of_2(max(1, out.shape[1])))
    if rows and size:
        _add_by_weight[(rows, triton.cdiv(size, block))](
            answers, ids, weights, out, experts, size, CHOSEN=ids.shape[1], BLOCK=block
        )
