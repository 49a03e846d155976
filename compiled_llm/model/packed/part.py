"""Reads the packed weights of a model, and makes what stands for their modules in programs."""

# The user's modules stay as they are. A program is given shallow copies of the modules around them, in which a layer
# that was read is one of ours. Copies are made again whenever the model has changed; modules of ours stay the same and
# take other tensors, since the outline of a model that was traced holds them.

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx, nn
from transformers import PreTrainedModel

from compiled_llm.compat.torch.tensors import version_of
from compiled_llm.compat.training.peft import bases_read
from compiled_llm.kinds.refusals import UnsupportedModelError
from compiled_llm.model.packed.groups import are_one, can_be_one, copied_bytes, fuse, lay_out, separate
from compiled_llm.model.packed.library_classes import LibraryClasses
from compiled_llm.model.packed.readers import (
    bitsandbytes,
    compressed_tensors,
    gptqmodel,
    others,
    torchao,
    transformers,
)
from compiled_llm.model.packed.reading import Found, ReadWeight, Stays, as_parameters
from compiled_llm.model.packed.stand_in_linear import Member, StandInLinear
from compiled_llm.model.traced.shallow_copies import ShallowCopies, with_children
from compiled_llm.model.traced.stand_ins import Change, Groups, Product
from compiled_llm.model.version.module_tree import same
from compiled_llm.model.version.tensors import tensors_of
from compiled_llm_ops.packed.formats import check_weight
from compiled_llm_ops.packed.linear import scratch_bytes, why_no_kernel

if TYPE_CHECKING:
    from compiled_llm.model.packed import part as this
    from compiled_llm.model.traced.stand_ins import PackedPart

    checked: PackedPart = this

logger = logging.getLogger("compiled_llm.weights")

_READERS = (transformers, torchao, bitsandbytes, compressed_tensors, gptqmodel, others)
"""In turn, until one knows a module."""


class PackedStandIns:
    """The modules that stand in programs for linear layers with packed weights."""

    def __init__(self, model: PreTrainedModel, required: bool) -> None:
        """Read a model; errors as of ``stand_ins``."""
        self._required = required
        self._readings = _Readings()
        self.groups: Groups = ()
        self._named: dict[str, Member] = {}
        self._laid_out = False
        self._modules: dict[nn.Module, StandInLinear] = {}
        self._children: dict[str, nn.Module] = {}  # those of the model that have such layers, copied
        self._values: int | None = None  # of the model when it was last refreshed
        self._dropped = False
        self.counted: Mapping[str, int] = {}
        self._copied_by_readers = self.scratch = 0
        self._take_in(model)

    def standing_in(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return a copy of a model in which they stand; made again: it keeps the model alive."""
        if self._dropped:
            self._take_in(model)
        copied: PreTrainedModel = with_children(model, self._children)
        return copied

    def refresh(self, model: PreTrainedModel, values: int) -> Change:
        """Read the model again if it has other ``values``; say what has to be made anew because of it."""
        if values == self._values:
            return None
        before, addresses = [*self._modules.values()], self._addresses()
        self._take_in(model)
        self._values = values
        if not same(before, [*self._modules.values()]):
            return "code"
        return None if addresses == self._addresses() else "tensors"

    def note(self, products: Sequence[Product]) -> None:
        """Learn of a trial's products which of them read one input, so that these can be one product."""
        names = {id(member.stand_in.codes): name for name, member in self._named.items()}
        readers: dict[tuple[int, int], dict[str, None]] = {}
        for input, version, weight in products:
            if id(weight) in names:
                readers.setdefault((id(input), version), {})[names[id(weight)]] = None
        groups = [tuple(layers) for layers in readers.values() if len(layers) > 1]
        self.groups = self._with_room([group for group in groups if can_be_one(self._members(group))])

    def lay_out(self, model: PreTrainedModel) -> bool:
        """Lay the weights of each group side by side, from now on; return whether no group had to leave."""
        # Nobody may read them meanwhile. A group that no longer can be leaves for good, as those of plain weights.
        if self._dropped:
            self._take_in(model)
        before, self._laid_out = self.groups, True
        self.groups = tuple(group for group in before if self._can_lie(group) and lay_out(self._members(group)))
        self._readings.moved()
        return self.groups == before

    @property
    def laid_out(self) -> bool:
        """Whether all groups lie as they were laid; also if they never were."""
        return not self._laid_out or all(
            self._can_lie(group) and are_one(self._members(group)) for group in self.groups
        )

    @property
    def copied(self) -> int:
        """Bytes of tables that were made of the library's."""
        groups = self.groups if self._laid_out and not self._dropped else ()
        return self._copied_by_readers + sum(
            copied_bytes(self._members(group)) for group in filter(self._can_lie, groups)
        )

    def separate(self) -> None:
        """Give each weight memory of its own again; groups lie apart from now on."""
        if self._laid_out and not self._dropped:
            for group in filter(self._can_lie, self.groups):
                separate(self._members(group))
        self._laid_out = False
        self._readings.moved()

    def rewrite(self, graph: fx.Graph) -> None:
        """Make one product of each group's in a program's graph, as Dynamo made it, if they were laid out."""
        if self._laid_out:
            fuse(graph, [[member.stand_in for member in self._members(group)] for group in self.groups])

    def _with_room(self, groups: Sequence[tuple[str, ...]]) -> Groups:
        """Return the groups that can be unpacked as one, which products of many rows need; others stay apart."""
        weights = {group: [member.stand_in.weight for member in self._members(group)] for group in groups}
        free = free_bytes(weights[groups[0]][0].codes.device) if groups else None
        if free is None:
            return tuple(groups)
        needed = {group: sum(scratch_bytes(own, self._dtype) for own in of) for group, of in weights.items()}
        apart = [group for group in groups if needed[group] > free]
        if apart:
            logger.warning(
                "compiled_llm: %d groups of packed layers, %s among them, stay apart: to unpack one takes %d bytes, "
                "and %d are free",
                len(apart), ", ".join(apart[0]), needed[apart[0]], free,
            )  # fmt: skip
        return tuple(group for group in groups if group not in apart)

    def _can_lie(self, group: tuple[str, ...]) -> bool:
        return all(name in self._named for name in group) and can_be_one(self._members(group))

    def _members(self, group: tuple[str, ...]) -> list[Member]:
        return [self._named[name] for name in group]

    def drop(self) -> None:
        """Drop all tensors, until the next refresh."""
        self._values, self._dropped = None, True
        self._readings.forget()
        for module in self._modules.values():
            module.drop()

    def _addresses(self) -> list[list[int]]:
        return [module.addresses() for module in self._modules.values()]

    def _take_in(self, model: PreTrainedModel) -> None:
        found, self._dropped, self._dtype = self._readings.of(model), False, model.dtype
        if self._required:
            _check_all_read(found)
        read = {module: said for module, (_, said) in found.items() if isinstance(said, ReadWeight)}
        self._modules = {module: self._standing_for(module, said) for module, said in read.items()}
        self._named = {found[module][0]: Member(module, own) for module, own in self._modules.items()}
        self._children = ShallowCopies(self._modules).copy_children(model)
        counted = _counted(said for _, said in found.values())
        self._copied_by_readers = sum(said.copied for said in read.values())
        self.scratch = max((scratch_bytes(said.weight, model.dtype) for said in read.values()), default=0)
        if counted != self.counted:
            self.counted = counted
            _log(model, counted)

    def _standing_for(self, module: nn.Module, read: ReadWeight) -> StandInLinear:
        known = self._modules.get(module)
        if known is None or not known.fits(read):
            return StandInLinear(module, read)
        known.take(read)
        return known


class _Readings:
    """Remembers what readers said of each module, until one of its tensors changes."""

    # Tables that were made of the library's stay where they are then, and CUDA graphs that read them.

    def __init__(self) -> None:
        self._known: dict[nn.Module, tuple[list[tuple[object, ...]], Found]] = {}

    def forget(self) -> None:
        self._known = {}

    def moved(self) -> None:
        """Take note that tensors of modules, and what was read of them, are elsewhere."""
        self._known = {module: (_state(module), said) for module, (_, said) in self._known.items()}

    def of(self, model: PreTrainedModel) -> dict[nn.Module, tuple[str, ReadWeight | Stays]]:
        """Return what they say of each module, with its name; UnsupportedModelError if a scale is not finite."""
        before, self._known = self._known, {}
        found, new = dict[nn.Module, tuple[str, ReadWeight | Stays]](), list[tuple[str, Tensor]]()
        with torch.inference_mode(False), torch.no_grad():
            for name, module in model.named_modules():
                known, said = before.get(module, (None, None))
                if known is None or known != _state(module):
                    said = _read(module, model.dtype)
                    new += [(name, table) for table in _tables(said)]
                if said is not None:  # to read another module again takes no longer than to look at its tensors
                    self._known[module], found[module] = (_state(module), said), (name, said)
            for base, adapter in bases_read(model):
                if base in found and isinstance(said := found[base][1], ReadWeight):
                    why = f"{torch.typename(adapter)} around it may read its weight"
                    found[base] = found[base][0], Stays(str(said.weight.format), why)
            try:
                _check_finite(model, new)
            except UnsupportedModelError:
                self._known = before
                raise
        return found


def stand_ins(model: PreTrainedModel, required: bool) -> PackedStandIns | None:
    """Return what stands in programs for a model's modules; None if it has no packed weights.

    Raises:
        UnsupportedModelError: a scale is not finite; there is too little memory to unpack a layer; or all are
            ``required`` to be read, and one is not.
    """
    made = PackedStandIns(model, required)
    if not made.counted:
        return None
    _check_room(model, made.scratch)
    return made


def formats_of(model: PreTrainedModel) -> dict[str, int]:
    """Count the weights that are read, by format: compiled code is of no use to others."""
    found = _Readings().of(model).values()
    return dict(Counter(str(said.weight.format) for _, said in found if isinstance(said, ReadWeight)))


def _state(module: nn.Module) -> list[tuple[object, ...]]:
    """Return what a write to a module's tensors changes, another place of theirs, and another ``forward``."""
    kind = type(module)
    return [
        (kind, kind.forward, vars(module).get("forward")),
        *((Tensor.data_ptr(own), 0 if own.is_inference() else version_of(own)) for own in tensors_of(module)),
    ]


def _read(module: nn.Module, dtype: torch.dtype) -> Found:
    """Return what the first reader says that knows a module; one that it cannot make out stays with its library."""
    try:
        said, plain = _first_said(module)
        if isinstance(said, ReadWeight):
            check_weight("wrap", said.weight)
            said = as_parameters(said)
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # the library may be another version
        return Stays(torch.typename(module), f"it is not as its reader knows it: {error}")
    if not isinstance(said, ReadWeight):
        return said
    why = plain.why_another(module) or why_no_kernel(said.weight, dtype, said.weight.codes.device)
    return said if why is None else Stays(str(said.weight.format), why)


def _first_said(module: nn.Module) -> tuple[Found, LibraryClasses]:
    """Return what the first reader says that knows a module, and the classes whose products it stands for."""
    for reader in _READERS:
        if (said := reader.read(module)) is not None:
            return said, reader.PLAIN
    return None, others.PLAIN


def _check_all_read(found: Mapping[nn.Module, tuple[str, ReadWeight | Stays]]) -> None:
    for module, (name, said) in found.items():
        if isinstance(said, Stays):
            raise UnsupportedModelError(
                f"wrap: packed=True: {name}, a {torch.typename(module)}, is left to its library: {said.format}, "
                f"{said.reason}; wrap with packed='auto', which leaves it there"
            )


def free_bytes(device: torch.device) -> int | None:
    """Return a device's free bytes, with those that PyTorch's allocator caches; None on a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _check_room(model: PreTrainedModel, scratch: int) -> None:
    """Raise UnsupportedModelError if the largest layer cannot be unpacked, as products of many rows need it."""
    free = free_bytes(model.device)
    if free is not None and free < scratch:
        raise UnsupportedModelError(
            f"wrap: the largest packed weight of {type(model).__name__} takes {scratch} bytes to unpack, and {free} "
            "are free; free some, or wrap with packed=False, which leaves it to its library"
        )


def _check_finite(model: PreTrainedModel, tables: Sequence[tuple[str, Tensor]]) -> None:
    """Raise UnsupportedModelError if a named table has numbers that are not finite: so would be all products."""
    if not tables:
        return
    finite = torch.stack([table.isfinite().all() for _, table in tables]).tolist()
    if not all(finite):
        raise UnsupportedModelError(
            f"wrap: {tables[finite.index(False)][0]} of {type(model).__name__} has a scale that is not finite; load "
            "the model again, or wrap with packed=False, which leaves it to its library"
        )


def _tables(said: Found) -> Iterator[Tensor]:
    """Yield the tables of numbers that codes are multiplied by."""
    weight = said.weight if isinstance(said, ReadWeight) else None
    for table in (weight.scales, weight.zeros, weight.nested) if weight is not None else ():
        if table is not None and table.is_floating_point():
            yield table


def _counted(all_said: Iterator[ReadWeight | Stays]) -> dict[str, int]:
    """Count modules by format, and by whose kernels run, as ``Stats.weights`` has them."""
    return dict(Counter(_in_words(said) for said in all_said))


def _in_words(said: ReadWeight | Stays) -> str:
    if isinstance(said, ReadWeight):
        return f"{said.weight.format}: compiled_llm"
    return f"{said.format}: its library ({said.reason})"


def _log(model: PreTrainedModel, counted: Mapping[str, int]) -> None:
    said = ", ".join(f"{count} x {words}" for words, count in counted.items())
    level = logging.WARNING if any(": its library" in words for words in counted) else logging.INFO
    logger.log(level, "compiled_llm: who multiplies the packed weights of %s: %s", type(model).__name__, said)
