"""One product of each row with the weights of the experts that it chose."""

# Shapes: T rows, k experts of each, P = T * k pairs of a row and one of its experts, E experts, I inputs, O outputs.

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from compiled_llm_ops.contracts.experts import ExpertsLinear
from compiled_llm_ops.experts.checks import as_outputs_by_inputs, check_choices, check_weight
from compiled_llm_ops.library import define_op, kernel_of


@define_op(ExpertsLinear)
def experts_linear(args: ExpertsLinear) -> Tensor:
    """Multiply each row with the weight of each expert that it chose.

    What follows between two of them is the caller's: an activation that ``fused_experts`` does not know, a norm.

    Args:
        rows: ``[T, I]``, or ``[P, I]`` with a row for each pair; float16, bfloat16 or float32, any strides.
        topk_ids: ``[T, k]`` int32 or int64, the experts of each row. A number outside of 0 to E - 1 stands for none.
        weight: ``[E, O, I]``, or ``[E, I, O]`` if it is transposed; of the rows' dtype, any strides.
        bias: ``[E, O]``, of the rows' dtype, or None.
        transposed: whether a weight has its inputs first.

    Returns:
        ``[P, O]``, contiguous: the pairs of the first row first. Zeros for no expert.

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source:
        MegaBlocks (https://arxiv.org/abs/2211.15841): rows that chose an expert are one product. Triton kernels of our
        own on CUDA. Up to 64 rows, each expert that a row chose is read once, and the others are not; with more, rows
        are sorted by expert.
    """
    rows, chosen = args.topk_ids.shape
    return args.rows.new_empty(rows * chosen, args.weight.shape[2 if args.transposed else 1])


def rows_of_experts(topk_ids: Tensor, experts: int) -> Iterator[tuple[int, Tensor]]:
    """Yield each expert that was chosen, and the pairs ``[n]`` int64 that chose it, in their order."""
    ids, order = topk_ids.flatten().sort(stable=True)
    chosen, counts = ids.unique_consecutive(return_counts=True)
    for expert, pairs in zip(chosen.tolist(), order.split(counts.tolist()), strict=True):
        if 0 <= expert < experts:
            yield expert, pairs


def of_expert(rows: Tensor, weight: Tensor, bias: Tensor | None, expert: int) -> Tensor:
    """Return the product of some rows with one expert; ``weight`` is ``[E, O, I]``."""
    return torch.nn.functional.linear(rows, weight[expert], None if bias is None else bias[expert])


def _check(args: ExpertsLinear) -> Tensor:
    """Return the weight as ``[E, O, I]``."""
    op, rows, ids = "experts_linear", args.rows, args.topk_ids
    check_choices(op, rows, ids)
    if rows.shape[0] not in (ids.shape[0], ids.numel()):
        raise ValueError(
            f"{op}: rows must be one for each of {ids.shape[0]} rows of topk_ids, or for each of its {ids.numel()} "
            f"numbers; got {rows.shape[0]}"
        )
    weight = as_outputs_by_inputs(args.weight, args.transposed)
    check_weight(op, "weight", weight, args.bias, rows, (None, rows.shape[1]))
    return weight


@kernel_of(experts_linear, "CPU")
def _cpu(args: ExpertsLinear) -> Tensor:
    weight, ids = _check(args), args.topk_ids
    out = args.rows.new_zeros(ids.numel(), weight.shape[1])
    sharing = max(1, ids.shape[1]) if args.rows.shape[0] == ids.shape[0] else 1
    for expert, pairs in rows_of_experts(ids, len(weight)):
        out[pairs] = of_expert(args.rows[pairs // sharing], weight, args.bias, expert)
    return out


@kernel_of(experts_linear, "CUDA")
def _cuda(args: ExpertsLinear) -> Tensor:
    from compiled_llm_ops.kernels.experts.products import multiply, routed

    weight, ids = _check(args), args.topk_ids.contiguous()
    out = args.rows.new_zeros(ids.numel(), weight.shape[1])
    with torch.cuda.device(out.device):  # Triton launches on the current one
        multiply(args.rows.contiguous(), routed(ids, len(weight)), weight, args.bias, out)
    return out
