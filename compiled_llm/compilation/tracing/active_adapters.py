"""The stand-in for a model with LoRA adapters: in it, layers have the active ones alone, by number."""

# PEFT keeps adapters by name, and Dynamo guards each name that it reads: a model would be compiled again for each
# adapter that becomes the active one. So a program is given shallow copies of the model's modules down to PEFT's
# layers, which have what PEFT's forward reads of the active adapters, under their numbers; a layer in which none acts
# is left out, and the one below stands in its place. Adapters of the same shapes and scales, on the same layers, are
# then one program's, and so are all that are disabled or merged.
# A CUDA graph reads weights where they were when it was captured. For it the tensors of the active adapters are copied
# into memory of the stand-in's own, at each model check, so that one graph serves all of these adapters, and sees
# each write to them. That is as much memory as the adapters have that act at once, and a launch or two in each check.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compiled_llm.compat.torch.tensors import copy_all
from compiled_llm.compat.training.peft import ACTIVE, ADAPTED, acting_adapters, by_adapter, is_lora_layer
from compiled_llm.model.traced.shallow_copies import ShallowCopies, shallow_copy, with_children
from compiled_llm.model.version.model_version import ModelVersion
from compiled_llm.model.version.module_tree import same

_Place = Callable[[Tensor], Tensor]  # returns a tensor in place of an adapter's


class ActiveAdapters:
    """The maker of the stand-in, which makes it again once the model has changed."""

    def __init__(self, version: ModelVersion) -> None:
        """``version`` tells whether the model has changed."""
        self._version = version
        self._values: int | None = None  # of the model that was taken in; 0 if no layer of PEFT's is in it
        self._children: dict[str, nn.Module] = {}  # those of the model that have LoRA layers, copied
        self._fixed = False
        self._memory = _AdapterMemory()

    def refresh(self, model: PreTrainedModel, fixed: bool) -> bool:
        """Take in the model as it is in this check; return whether memory that is ``fixed`` is where it was."""
        # CUDA graphs need it fixed: tensors of adapters are copied into memory that stays.
        before, known = self._memory.own, (self._values, self._fixed)
        self._values, self._fixed = self._version.values if self._version.adapted else 0, fixed
        if known != (self._values, self._fixed):
            self._take_in(model)
        self._memory.fill()
        return same(before, self._memory.own)

    def of(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return the stand-in as of the last check, made again, as a kept one would keep the model alive."""
        if self._values is None:
            self.refresh(model, self._fixed)
        stand_in: PreTrainedModel = with_children(model, self._children)
        return stand_in

    def drop(self) -> None:
        """Drop all modules and tensors, until the stand-in is next asked for."""
        self._values, self._children, self._memory = None, {}, _AdapterMemory()

    def _take_in(self, model: PreTrainedModel) -> None:
        self._memory = _AdapterMemory(self._memory.own)
        with torch.inference_mode(False):
            copies = _AdapterCopies(self._memory.place if self._fixed else _alias)
            self._children = copies.copy_children(model) if self._values else {}


class _AdapterMemory:
    """Memory for the tensors of adapters, one after the other."""

    def __init__(self, earlier: Sequence[Tensor] = ()) -> None:
        """Take over ``earlier`` ones that fit."""
        self.own: list[Tensor] = []  # the tensors that are read
        self._earlier, self._sources = [*earlier], list[Tensor]()

    def place(self, tensor: Tensor) -> Tensor:
        """Return the memory for the next tensor."""
        at = len(self.own)
        if at < len(self._earlier) and _kind(self._earlier[at]) == _kind(tensor):
            own = self._earlier[at]
        else:
            own = _like(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device), tensor)
        self.own.append(own)
        self._sources.append(tensor.detach())
        return own

    def fill(self) -> None:
        """Copy the tensors as they are now."""
        if not self.own:
            return
        with torch.inference_mode(False), torch.no_grad():
            copy_all(self.own, self._sources)


class _AdapterCopies(ShallowCopies):
    """A maker of shallow copies of modules with LoRA layers."""

    def __init__(self, place: _Place) -> None:
        super().__init__()
        self._place = place

    def _copied(self, module: nn.Module, children: dict[str, nn.Module | None]) -> nn.Module:
        if not is_lora_layer(module) or (names := acting_adapters(module)) is None:
            return super()._copied(module, children)
        if names == [] and (adapted := children[ADAPTED]) is not None:
            return adapted
        attributes = self._active_alone(module, names) if names else {}
        children.update({name: attributes.pop(name) for name in [*attributes] if name in children})
        copied: nn.Module = shallow_copy(module, **attributes, _modules=children)
        return copied

    def _active_alone(self, layer: nn.Module, names: Sequence[str]) -> dict[str, Any]:
        numbers = {name: str(number) for number, name in enumerate(names)}
        entries = {name: self._renamed(held, numbers) for name, held in by_adapter(layer).items() if len(held)}
        return {ACTIVE: [*numbers.values()], **entries}

    def _renamed(self, held: Mapping[str, Any], numbers: Mapping[str, str]) -> object:
        """Return a dictionary, or a module like one, with the entries of some names."""
        kind: Any = type(held)
        return kind({number: self._placed(held[name]) for name, number in numbers.items() if name in held})

    def _placed(self, value: object) -> Any:
        """Return a tensor elsewhere, or a module with its tensors elsewhere; any other value as it is."""
        if isinstance(value, Tensor):
            return self._place(value)
        if not isinstance(value, nn.Module):
            return value
        parts = {part: getattr(value, part) for part in ("_parameters", "_buffers", "_modules")}
        placed = {part: {name: self._placed(inner) for name, inner in held.items()} for part, held in parts.items()}
        return shallow_copy(value, type(value), **placed)


def _alias(tensor: Tensor) -> Tensor:
    """Return a tensor with the same memory: PEFT has active adapters need gradients, which Dynamo would guard."""
    return _like(tensor.detach(), tensor)


def _like(tensor: Tensor, other: Tensor) -> Tensor:
    """Return ``tensor`` as a parameter if ``other`` is one."""
    return nn.Parameter(tensor, requires_grad=False) if isinstance(other, nn.Parameter) else tensor


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return type(tensor), tensor.dtype, tensor.device, tensor.shape
