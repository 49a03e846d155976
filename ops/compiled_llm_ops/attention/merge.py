"""Results of attention over parts of the keys, merged by their log-sum-exps into that over all of them."""

# Shapes: T tokens, N states, H heads, D head dimension.

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm_ops.contracts.merge import MergeState, MergeStateInPlace, MergeStates
from compiled_llm_ops.library import define_op, kernel_of


@define_op(MergeState)
def merge_state(args: MergeState) -> tuple[Tensor, Tensor]:
    """Merge two results of attention over different keys.

    Args:
        v_a: ``[T, H, D]``, the outputs over the first keys, of any float dtype.
        s_a: ``[T, H]`` float32, their log-sum-exps in base 2; minus infinity where a token has seen no key, whose
            outputs are then not read.
        v_b: ``[T, H, D]``, of the same dtype, the outputs over the other keys.
        s_b: ``[T, H]`` float32, likewise.

    Returns:
        ``[T, H, D]``, the outputs over all keys, and ``[T, H]`` float32, their log-sum-exps. A token that has seen no
        key has zeros, and minus infinity.

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source:
        FlashInfer's ``merge_state``, https://docs.flashinfer.ai/tutorials/recursive_attention.html. On CUDA a Triton
        kernel of our own; sums are float32.
    """
    return args.v_a.new_empty(args.v_a.shape), args.s_a.new_empty(args.s_a.shape)


@define_op(MergeStates)
def merge_states(args: MergeStates) -> tuple[Tensor, Tensor]:
    """Merge any number of results of attention over different keys.

    Args:
        v: ``[T, N, H, D]``, the outputs, of any float dtype.
        s: ``[T, N, H]`` float32, their log-sum-exps in base 2; as of ``merge_state``.

    Returns:
        ``[T, H, D]`` and ``[T, H]`` float32, as of ``merge_state``.

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source:
        FlashInfer's ``merge_states``, https://docs.flashinfer.ai/tutorials/recursive_attention.html. On CUDA a Triton
        kernel of our own, which merges in the order of the states; sums are float32.
    """
    tokens, _, heads, dim = args.v.shape
    return args.v.new_empty((tokens, heads, dim)), args.s.new_empty((tokens, heads))


@define_op(MergeStateInPlace, writes=("v", "s"))
def merge_state_in_place(args: MergeStateInPlace) -> None:
    """Merge a second result of attention, over other keys, into the first.

    Args:
        v: ``[T, H, D]``, contiguous, written: the outputs, of any float dtype.
        s: ``[T, H]`` float32, contiguous, written: their log-sum-exps in base 2; as of ``merge_state``.
        v_other: ``[T, H, D]``, of the same dtype.
        s_other: ``[T, H]`` float32.
        mask: ``[T]`` of dtype bool: the tokens that are merged, all if None. Others stay, and are not read.

    Raises:
        ValueError: shapes or dtypes do not fit together; nothing is written.

    Source:
        FlashInfer's ``merge_state_in_place``, https://docs.flashinfer.ai/tutorials/recursive_attention.html. On CUDA a
        Triton kernel of our own; sums are float32.
    """


def _check(op: str, outputs: Tensor, lses: Tensor, name: str, dim: int) -> None:
    shape = ", ".join("TNHD" if dim == 4 else "THD")
    if outputs.dim() != dim or not outputs.is_floating_point():
        raise ValueError(f"{op}: {name} must be [{shape}], floats; got {tuple(outputs.shape)} {outputs.dtype}")
    if lses.shape != outputs.shape[:-1] or lses.dtype != torch.float32:
        raise ValueError(
            f"{op}: the log-sum-exps of {name} must be {tuple(outputs.shape[:-1])} float32; got {tuple(lses.shape)} "
            f"{lses.dtype}"
        )


def _check_two(op: str, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], names: tuple[str, str]) -> None:
    for state, name in zip((first, second), names, strict=True):
        _check(op, *state, name, 3)
    outputs, others = first[0], second[0]
    if outputs.shape != others.shape or outputs.dtype != others.dtype:
        raise ValueError(
            f"{op}: {names[0]} and {names[1]} must be alike; got {tuple(outputs.shape)} {outputs.dtype} and "
            f"{tuple(others.shape)} {others.dtype}"
        )


def merged(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Merge states ``[T, N, H, D]`` in plain PyTorch."""
    largest = s.amax(1, keepdim=True) if s.shape[1] else s.new_full((s.shape[0], 1, s.shape[2]), -torch.inf)
    base = torch.where(largest.isinf(), torch.zeros_like(largest), largest)
    weights = torch.exp2(s - base)
    total = weights.sum(1)
    seen = torch.where((weights > 0)[..., None], v.float(), torch.zeros((), device=v.device))
    values = (seen * weights[..., None]).sum(1) / torch.where(total == 0, 1.0, total)[..., None]
    return values.to(v.dtype), base[:, 0] + torch.log2(total)


def _check_in_place(args: MergeStateInPlace) -> None:
    op, mask = "merge_state_in_place", args.mask
    _check_two(op, (args.v, args.s), (args.v_other, args.s_other), ("v", "v_other"))
    if mask is not None and (mask.shape != args.v.shape[:1] or mask.dtype != torch.bool):
        raise ValueError(f"{op}: mask must be [{args.v.shape[0]}] bool; got {tuple(mask.shape)} {mask.dtype}")
    if not (args.v.is_contiguous() and args.s.is_contiguous()):
        raise ValueError(f"{op}: v and s, which are written, must be contiguous")


@kernel_of(merge_state, "CPU")
def _state_cpu(args: MergeState) -> tuple[Tensor, Tensor]:
    _check_two("merge_state", (args.v_a, args.s_a), (args.v_b, args.s_b), ("v_a", "v_b"))
    return merged(torch.stack((args.v_a, args.v_b), 1), torch.stack((args.s_a, args.s_b), 1))


@kernel_of(merge_state, "CUDA")
def _state_cuda(args: MergeState) -> tuple[Tensor, Tensor]:
    from compiled_llm_ops.kernels.attention.merge import merge_two

    _check_two("merge_state", (args.v_a, args.s_a), (args.v_b, args.s_b), ("v_a", "v_b"))
    v, s = args.v_a.new_empty(args.v_a.shape), args.s_a.new_empty(args.s_a.shape)
    with torch.cuda.device(v.device):  # Triton launches on the current one
        v_a, s_a, v_b, s_b = (tensor.contiguous() for tensor in args)
        merge_two(v_a, s_a, v_b, s_b, None, v, s)
    return v, s


@kernel_of(merge_states, "CPU")
def _states_cpu(args: MergeStates) -> tuple[Tensor, Tensor]:
    _check("merge_states", args.v, args.s, "v", 4)
    return merged(args.v, args.s)


@kernel_of(merge_states, "CUDA")
def _states_cuda(args: MergeStates) -> tuple[Tensor, Tensor]:
    from compiled_llm_ops.kernels.attention.merge import merge_many

    _check("merge_states", args.v, args.s, "v", 4)
    (tokens, _, heads, dim) = args.v.shape
    v, s = args.v.new_empty((tokens, heads, dim)), args.s.new_empty((tokens, heads))
    with torch.cuda.device(v.device):  # Triton launches on the current one
        merge_many(args.v.contiguous(), args.s.contiguous(), v, s)
    return v, s


@kernel_of(merge_state_in_place, "CPU")
def _in_place_cpu(args: MergeStateInPlace) -> None:
    _check_in_place(args)
    v, s = merged(torch.stack((args.v, args.v_other), 1), torch.stack((args.s, args.s_other), 1))
    merges = torch.ones(len(v), dtype=torch.bool, device=v.device) if args.mask is None else args.mask
    args.v.copy_(torch.where(merges[:, None, None], v, args.v))
    args.s.copy_(torch.where(merges[:, None], s, args.s))


@kernel_of(merge_state_in_place, "CUDA")
def _in_place_cuda(args: MergeStateInPlace) -> None:
    from compiled_llm_ops.kernels.attention.merge import merge_two

    _check_in_place(args)
    with torch.cuda.device(args.v.device):  # Triton launches on the current one
        others = args.v_other.contiguous(), args.s_other.contiguous()
        merge_two(args.v, args.s, *others, args.mask, args.v, args.s)
