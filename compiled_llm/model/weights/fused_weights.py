"""Weights that multiply the same input, laid out in one storage, so that one matmul can read them all."""

# They stay the user's: the same ``Parameter`` objects, each now a view of its part. Whatever takes one out of the
# storage (``model.to``, a new parameter, ``.data = ...``) is noticed before anything is computed with it, by
# ``ModelVersion``. Shapes: I inputs, O outputs of one layer.

from __future__ import annotations

import logging
import weakref
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from compiled_llm.compat.torch.gate import wait_for_device
from compiled_llm.compat.torch.tensors import fake_linear, storage_owners, version_of

logger = logging.getLogger("compiled_llm.graphs")

# Bytes. Inductor takes addresses as aligned to this: it copies an input that is not at each call.
_ALIGNMENT = 16


class FusedGroup(NamedTuple):
    """Linear layers that read one input."""

    weights: tuple[str, ...]  # names of their weights, ``[O, I]`` each, in the order in which they are used
    biases: tuple[str, ...]  # names of their biases, ``[O]`` each; empty if they have none


_OURS = "compiled_llm"  # the namespace of our ops
_MATMULS = frozenset({"matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "baddbmm", "einsum", "mv", "bilinear"})
_MATMULS |= {"conv1d", "conv2d", "conv3d", "scaled_dot_product_attention", "_grouped_mm", "grouped_mm", "_scaled_mm"}


def _is_outer(arguments: Sequence[Any]) -> bool:
    """Whether a product adds nothing up: its inner size is 1, as that of rotary embeddings' angles."""
    first = arguments[0] if arguments else None
    return isinstance(first, Tensor) and first.dim() > 1 and first.shape[-1] == 1


class LinearRecorder(TorchFunctionMode):
    """A recorder of the linear layers of a forward, which tells which of them read one input."""

    def __init__(self) -> None:
        super().__init__()
        # The inputs are kept, so that no id is used twice; a new version is another input.
        self._calls: list[tuple[Tensor, int, Tensor, Tensor | None]] = []
        # calls of ops of ours with two tensors first: an input, its version, and a weight
        self.of_ours: list[tuple[Tensor, int, Tensor]] = []
        # names of functions that multiply matrices, which are no linear layers with plain weights
        self.other_matmuls: dict[str, None] = {}

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            self._note(*args, **(kwargs or {}))
            if (made := fake_linear(*args, **(kwargs or {}))) is not None:
                return made
        elif (name := getattr(func, "__name__", "")) in _MATMULS and not _is_outer(args):
            self.other_matmuls[name] = None
        elif isinstance(func, torch._ops.OpOverload) and func.namespace == _OURS:
            self._note_of_ours(*args[:2])
        return func(*args, **(kwargs or {}))

    def _note(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        if not input.is_inference():  # those have no versions
            self._calls.append((input, version_of(input), weight, bias))

    def _note_of_ours(self, input: object = None, weight: object = None) -> None:
        if isinstance(input, Tensor) and isinstance(weight, Tensor) and not input.is_inference():
            self.of_ours.append((input, version_of(input), weight))

    def groups(self, model: nn.Module) -> list[FusedGroup]:
        """Return the groups among the plain ``nn.Linear`` modules of ``model``; no weight is in two."""
        names = {
            id(parameter): name
            for name, parameter in model.named_parameters()
            if type(model.get_submodule(name.rpartition(".")[0])) is nn.Linear
        }
        readers: dict[tuple[int, int, bool], dict[str, str | None]] = defaultdict(dict)
        for input, version, weight, bias in self._calls:
            if id(weight) in names and (bias is None or id(bias) in names):
                layers = readers[id(input), version, bias is None]
                layers[names[id(weight)]] = None if bias is None else names[id(bias)]
        groups: list[FusedGroup] = []
        taken: set[str] = set()
        for layers in readers.values():
            if len(layers) > 1 and taken.isdisjoint(layers):
                taken.update(layers)
                groups.append(FusedGroup(tuple(layers), tuple(bias for bias in layers.values() if bias is not None)))
        return groups


class FusedWeights:
    """Groups of weights, each in one storage."""

    def __init__(self, model: nn.Module, groups: Sequence[FusedGroup]) -> None:
        """Lay the groups out, one after the other, so that at most one is in memory twice."""
        # Only a weak reference to the model is kept. Groups that share memory with other tensors are left alone.
        # those in one storage. One that no longer can be leaves for good: a model whose weights are swapped back and
        # forth is compiled once more, not at each swap
        self.groups = list(groups)
        self._model = weakref.ref(model)
        self.restore()

    @property
    def laid_out(self) -> bool:
        """Whether all groups lie in one storage each (a millisecond): ask when ``ModelVersion.tensors`` changed."""
        stacks = [self.stacks(group) for group in self.groups]
        return all(map(bool, stacks)) and all(map(is_one, chain.from_iterable(stacks)))

    def restore(self) -> bool:
        """Lay out groups that no longer lie in one storage; return whether no group had to leave."""
        before = self.groups
        self.groups = [group for group in before if self._lay_out(group)]
        logger.debug("%d of %d groups of weights lie in one storage each", len(self.groups), len(before))
        return self.groups == before

    def separate(self) -> None:
        """Give each weight a storage of its own again; there are no groups afterwards."""
        for stack in (stack for group in self.groups for stack in self.stacks(group)):
            if is_one(stack) and _owns_storage(stack):
                wait_for_device(stack[0].device)
                for parameter in stack:
                    parameter.data = parameter.data.clone()
        self.groups = []

    def stacks(self, group: FusedGroup) -> list[list[nn.Parameter]]:
        """Return a group's weights, and its biases if there are any; nothing if the model no longer has them all."""
        model = self._model()
        if model is None:
            return []
        try:
            return [[model.get_parameter(name) for name in names] for names in group if names]
        except AttributeError:
            return []

    def _lay_out(self, group: FusedGroup) -> bool:
        stacks = self.stacks(group)
        if not stacks or not all(is_one(stack) or _can_move(stack) for stack in stacks):
            return False
        for stack in stacks:
            if not is_one(stack):
                _move_together(stack)
        return True


def is_one(stack: Sequence[Tensor]) -> bool:
    """Whether parameters lie one after the other in one storage."""
    return (
        all(map(_is_plain, stack))
        and all(entry.data_ptr() % _ALIGNMENT == 0 for entry in stack)
        and len({(entry.untyped_storage().data_ptr(), entry.dtype, entry.shape[1:]) for entry in stack}) == 1
        and all(first.data_ptr() + first.nbytes == second.data_ptr() for first, second in pairwise(stack))
    )


def _can_move(stack: Sequence[Tensor]) -> bool:
    """Whether the parameters can be moved into one storage, and no other tensor uses their old ones."""
    return (
        all(map(_is_plain, stack))
        and len({(entry.device, entry.dtype, entry.shape[1:]) for entry in stack}) == 1
        and all(entry.nbytes % _ALIGNMENT == 0 for entry in stack)
        and not any(entry.device.type == "cpu" and entry.is_shared() for entry in stack)
        and _owns_storage(stack)
    )


def _is_plain(entry: Tensor) -> bool:
    return type(entry) is nn.Parameter and entry.is_contiguous() and not entry.is_inference()


def _owns_storage(stack: Sequence[Tensor]) -> bool:
    """Whether no other tensor has these storages, such as ``alias = weight.data``."""
    storages = {entry.untyped_storage().data_ptr(): entry.untyped_storage() for entry in stack}
    users = Counter(entry.untyped_storage().data_ptr() for entry in stack)
    return all(storage_owners(storage) == users[address] for address, storage in storages.items())


def _move_together(stack: Sequence[Tensor]) -> None:
    with torch.no_grad():
        whole = torch.cat([parameter.data for parameter in stack])
    wait_for_device(whole.device)  # all reads of the old storage, on any stream, are done before it is freed
    for parameter, part in zip(stack, whole.split([len(parameter) for parameter in stack]), strict=True):
        parameter.data = part
    if whole.is_cuda:
        torch.cuda.empty_cache()  # the allocator would keep what the next group, being larger, cannot use
