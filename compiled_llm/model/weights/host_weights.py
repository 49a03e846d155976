"""Weights that wait in host memory, and come back to their device."""

# Whole storages move: what shares memory goes on sharing it, tied weights and those that are multiplied as one
# included. The ``Parameter`` objects stay the same, so that an optimizer's are still the model's.

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from compiled_llm.compat.torch.gate import wait_for_device
from compiled_llm.compat.torch.tensors import is_wrapper
from compiled_llm.model.version.tensors import tensors_in_dataclass, tensors_inside

_HOST = torch.device("cpu")
_MOVABLE = ("Params4bit", "Int8Params")
"""Classes of bitsandbytes' weights, which are plain tensors with others beside them."""


class HostWeights:
    """The parameters and buffers of a model while they are in host memory."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Move all that lies on ``device`` to the host; if that fails, with a ValueError, nothing has moved."""
        self._device = device
        wait_for_device(device)
        moving = _named_on(model, device)
        _check_movable(moving)
        self._stayed = frozenset(name for name in _named(model) if name not in moving)
        _move([*moving.values()], _HOST)

    def come_back(self, model: nn.Module) -> None:
        """Move them back, tensors that have taken their places included; if that fails, nothing has moved."""
        coming = {name: tensor for name, tensor in _named_on(model, _HOST).items() if name not in self._stayed}
        _check_movable(coming)
        _move([*coming.values()], self._device)
        wait_for_device(self._device)  # other streams may read them from now on


def _named(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, what those of other libraries are made of, and their scales."""
    found: dict[str, Tensor] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        inside = {f"{name}: {number}": inner for number, inner in enumerate(tensors_inside(tensor))}
        found |= inside if inside and is_wrapper(tensor) else {name: tensor, **inside}
    for name, module in model.named_modules():
        held = chain.from_iterable(map(tensors_in_dataclass, vars(module).values()))
        found |= {f"{name}: {number}": tensor for number, tensor in enumerate(held)}
    return found


def _named_on(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in _named(model).items() if tensor.device == device}


def _check_movable(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        movable = type(tensor) in (Tensor, nn.Parameter) or type(tensor).__name__ in _MOVABLE
        plain = movable and tensor.layout == torch.strided
        if not plain or tensor.is_inference():
            kind = "tensor of inference mode" if plain else type(tensor).__name__
            raise ValueError(
                f"weights=True: {name} is a {kind}, which cannot change its place in memory; leave weights=True out"
            )


def _move(tensors: Sequence[Tensor], device: torch.device) -> None:
    """Give tensors copies of their storages, once all copies are made."""
    with torch.inference_mode(False), torch.no_grad():
        copies: dict[int, torch.UntypedStorage] = {}
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage.data_ptr() not in copies:
                copies[storage.data_ptr()] = _copied(storage, device)
        views = [_view_like(tensor, copies[tensor.untyped_storage().data_ptr()], device) for tensor in tensors]
        for tensor, view in zip(tensors, views, strict=True):
            tensor.data = view


def _copied(storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
    copy.copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
    return copy.untyped_storage()


def _view_like(tensor: Tensor, storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    empty = torch.empty(0, dtype=tensor.dtype, device=device)
    view: Tensor = empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    return view
