"""Packed weights that multiply one input, side by side in memory, so that one product can read them all."""

# As plain weights are (``model.weights.fused_weights``): the tensors stay their library's, the same objects, each now a
# view of its part of one storage. Codes lie by outputs. Tables that lie otherwise are copied.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from compiled_llm.compat.torch.gate import wait_for_device
from compiled_llm.compat.torch.tensors import is_wrapper, storage_owners
from compiled_llm.model.packed import joint_tables
from compiled_llm.model.packed.stand_in_linear import Member, StandInLinear
from compiled_llm.model.version.tensors import tensors_of
from compiled_llm_ops.packed.formats import TILE_OUTPUTS

_LAYOUTS = ("rows", "high_first", "tiles")
_STACKED = {"codes": 16, "scales": 1, "zeros": 1}
"""The tensors that lie side by side, and the alignment of each part in bytes; TMA reads codes alone."""


def can_be_one(group: Sequence[Member]) -> bool:
    """Whether layers have one format, whose codes lie by outputs."""
    first = group[0].stand_in
    format, outputs = first.format, [member.stand_in.out_features for member in group[:-1]]
    if format.layout not in _LAYOUTS or not format.outputs or any(count % format.outputs for count in outputs):
        return False
    if format.layout == "tiles" and any(map(_is_padded, group[:-1])):
        return False
    return first.nested is None and all(
        (own.format, own.in_features, own.bias is None) == (format, first.in_features, first.bias is None)
        and own.nested is None
        for own in (member.stand_in for member in group)
    )


def _is_padded(member: Member) -> bool:
    """Whether a layer's tiles have more outputs than the layer."""
    codes, outputs = member.stand_in._parameters["codes"], member.stand_in.out_features
    return outputs % TILE_OUTPUTS != 0 or (codes is not None and len(codes) * TILE_OUTPUTS != outputs)


def are_one(group: Sequence[Member]) -> bool:
    """Whether all tensors of a group lie side by side, or are copied so."""
    return all(_is_one(*stack) for stack in _stacks(group)) and not _tables_to_join(group)


def lay_out(group: Sequence[Member]) -> bool:
    """Lay a group's tensors side by side, one kind after the other; False if a tensor cannot move."""
    # Nobody may read them meanwhile, and ``can_be_one``.
    apart = [stack for stack in _stacks(group) if not _is_one(*stack)]
    stacks = [(stack, alignment, _holders(stack, group)) for stack, alignment in apart]
    if not all(_can_move(*those) for those in stacks):
        return False
    for stack, _, holders in stacks:
        _move(stack, holders)
    if tables := _tables_to_join(group):
        joint_tables.join(tables)
    return True


def separate(group: Sequence[Member]) -> None:
    """Give each tensor a storage of its own again."""
    for stack in (stack for stack, alignment in _stacks(group) if _is_one(stack, alignment)):
        for tensor, holders in zip(stack, _holders(stack, group), strict=True):
            _move([tensor], [holders])
    if copied_bytes(group):
        for own in _stand_ins(group):
            joint_tables.join([own])


def copied_bytes(group: Sequence[Member]) -> int:
    """Return how many bytes of a group's tables are copied where it lies side by side."""
    own = _stand_ins(group)
    return joint_tables.bytes_of(own) if joint_tables.lie_by_groups(own) else 0


def _tables_to_join(group: Sequence[Member]) -> list[StandInLinear]:
    """Return the stand-ins of a group if their tables have to be copied into one; none if they need not, or are."""
    own = _stand_ins(group)
    return own if joint_tables.lie_by_groups(own) and not joint_tables.are_joint(own) else []


def _stand_ins(group: Sequence[Member]) -> list[StandInLinear]:
    return [member.stand_in for member in group]


def _stacks(group: Sequence[Member]) -> Iterator[tuple[list[Tensor], int]]:
    """Yield codes, scales and zeros, unless these are copied, of each layer in turn, and where each may begin."""
    copied = joint_tables.lie_by_groups(_stand_ins(group))
    for name in ("codes",) if copied else _STACKED:
        stack = [member.stand_in._parameters[name] for member in group]
        if stack[0] is not None:
            yield [entry for entry in stack if entry is not None], _STACKED[name]


def _is_one(stack: Sequence[Tensor], alignment: int) -> bool:
    return (
        len({(entry.untyped_storage().data_ptr(), entry.dtype, entry.shape[1:]) for entry in stack}) == 1
        and all(entry.is_contiguous() and entry.data_ptr() % alignment == 0 for entry in stack)
        and all(first.data_ptr() + first.nbytes == second.data_ptr() for first, second in pairwise(stack))
    )


def _holders(stack: Sequence[Tensor], group: Sequence[Member]) -> list[list[Tensor]]:
    """Return, for each tensor of a stack, all that have its memory: itself, and those of its library's module."""
    return [
        [*{id(held): held for held in (tensor, *_sharing(tensor, member.module))}.values()]
        for tensor, member in zip(stack, group, strict=True)
    ]


def _sharing(tensor: Tensor, module: nn.Module) -> Iterator[Tensor]:
    first, storage = tensor.data_ptr(), tensor.untyped_storage().data_ptr()
    for held in tensors_of(module):
        shared = not is_wrapper(held) and held.untyped_storage().data_ptr() == storage
        if shared and first <= held.data_ptr() < first + tensor.nbytes:
            yield held


def _can_move(stack: Sequence[Tensor], alignment: int, holders: Sequence[Sequence[Tensor]]) -> bool:
    """Whether tensors can be moved into one storage: they have equal rows, and share no memory with others."""
    owners: dict[int, int] = {}
    for held in chain.from_iterable(holders):
        address = held.untyped_storage().data_ptr()
        owners[address] = owners.get(address, 0) + 1
    return (
        len({(entry.device, entry.dtype, entry.shape[1:]) for entry in stack}) == 1
        and all(entry.is_contiguous() and entry.nbytes % alignment == 0 for entry in stack)
        and not any(entry.device.type == "cpu" and entry.is_shared() for entry in stack)
        and not any(held.is_inference() or held.nbytes != entry.nbytes for entry, _, held in _each(stack, holders))
        and all(
            storage_owners(entry.untyped_storage()) == owners[entry.untyped_storage().data_ptr()] for entry in stack
        )
    )


def _each(stack: Sequence[Tensor], holders: Sequence[Sequence[Tensor]]) -> Iterator[tuple[Tensor, int, Tensor]]:
    """Yield each tensor with its first byte in a storage of all, and with each that has its memory."""
    start = 0
    for entry, those in zip(stack, holders, strict=True):
        yield from ((entry, start, held) for held in those)
        start += entry.nbytes


def _move(stack: Sequence[Tensor], holders: Sequence[Sequence[Tensor]]) -> None:
    """Put tensors into one new storage, all that have their memory included."""
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.cat([entry.detach().flatten().view(torch.uint8) for entry in stack])
        views = [
            torch.empty(0, dtype=held.dtype, device=held.device).set_(
                whole.untyped_storage(), start // held.element_size(), held.size(), held.stride()
            )
            for _, start, held in _each(stack, holders)
        ]
        wait_for_device(whole.device)  # all reads of the old storages are done before these are freed
        for (_, _, held), view in zip(_each(stack, holders), views, strict=True):
            held.data = view
    if whole.is_cuda:
        torch.cuda.empty_cache()  # the allocator would keep what the next group, being larger, cannot use


def product(
    graph: fx.Graph, products: Sequence[fx.Node], group: Sequence[StandInLinear], bias: fx.Node | None
) -> fx.Node:
    """Return one product in place of those of a group, which lies side by side whenever the graph runs."""
    rows, *tensors, _, _ = cast("tuple[Any, ...]", products[0].args[:7])
    stacks = [[own._parameters[name] for own in group] for name in _STACKED]
    wholes = [
        None if node is None else _whole(graph, node, stack) for node, stack in zip(tensors[:3], stacks, strict=True)
    ]
    total = sum(own.out_features for own in group)
    given = rows, *wholes, None, bias, total, *products[0].args[7:]
    return graph.call_function(torch.ops.compiled_llm.packed_linear.default, given, products[0].kwargs)


def _whole(graph: fx.Graph, first: Any, stack: Sequence[Any]) -> fx.Node:
    """Return a view of a whole stack, made from its first entry, where it begins."""
    size = [sum(map(len, stack)), *stack[0].shape[1:]]
    return graph.call_function(torch.ops.aten.as_strided.default, (first, size, list(stack[0].stride())))
