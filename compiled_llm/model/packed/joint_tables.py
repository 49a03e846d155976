"""Scales and zeros of packed weights that multiply one input, copied into one table for one product."""

# Where tables lie by groups of inputs, one table of several layers has their parts in turn for each group, so that no
# library could keep its part contiguous: it keeps its own, and we read a copy. In the copy scales and zeros alternate,
# as torchao has them.
# Shapes: N outputs, K inputs, G groups of inputs with a scale of their own.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_llm.compat.torch.gate import wait_for_device
from compiled_llm.model.packed.stand_in_linear import StandInLinear

_TABLES = ("scales", "zeros")


def lie_by_groups(group: Sequence[StandInLinear]) -> bool:
    """Whether the tables of layers lie by groups of inputs, the library's or copies of these, and are of one type."""
    each = [table for own in group for table in _tables_of(own)]
    return (
        len({(table.dtype, table.device, table.shape[1:]) for table in each}) == 1
        and len({len(_tables_of(own)) for own in group}) == 1
        and all(table.shape[1] > 1 and table.stride(0) < table.stride(1) for table in each)
    )


def are_joint(group: Sequence[StandInLinear]) -> bool:
    """Whether the tables of layers are parts of one copy."""
    outputs, first = sum(own.out_features for own in group), _tables_of(group[0])
    storage, strides, start = first[0].untyped_storage().data_ptr(), (len(first), len(first) * outputs), 0
    for own in group:
        for number, table in enumerate(_tables_of(own)):
            place = storage + (start * len(first) + number) * table.element_size()
            if (table.untyped_storage().data_ptr(), table.data_ptr(), table.stride()) != (storage, place, strides):
                return False
        start += own.out_features
    return True


def join(group: Sequence[StandInLinear]) -> None:
    """Have layers read parts of one copy of their tables from now on, ``[G, N, 1 or 2]``; ``lie_by_groups`` holds."""
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.cat([torch.stack([table.t() for table in _tables_of(own)], -1) for own in group], 1)
        start = 0
        for own in group:
            part = whole.narrow(1, start, own.out_features)
            for number, table in enumerate(_tables_of(own)):
                bare = torch.empty(0, dtype=table.dtype, device=table.device)
                place, size = part.select(-1, number).t(), table.size()
                table.data = bare.set_(whole.untyped_storage(), place.storage_offset(), size, place.stride())
            start += own.out_features
        wait_for_device(whole.device)  # other streams may read it from now on


def bytes_of(group: Sequence[StandInLinear]) -> int:
    """Return how many bytes the tables of layers have."""
    return sum(table.nbytes for own in group for table in _tables_of(own))


def _tables_of(own: StandInLinear) -> list[Tensor]:
    return [table for name in _TABLES if (table := own._parameters[name]) is not None]
