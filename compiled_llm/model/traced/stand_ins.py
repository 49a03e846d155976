"""Modules that programs run in the place of some of a model's: its own stay what they are for everybody else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypeAlias

from torch import Tensor, fx
from transformers import PreTrainedModel

from compiled_llm.features import Seam, feature

Change: TypeAlias = Literal["code", "tensors"] | None
"""What is others now: the modules, or where their tensors are; None if nothing is."""

Product: TypeAlias = tuple[Tensor, int, Tensor]
"""A product by an op of ours in a trial forward: its input, that one's version, and the weight."""

Groups: TypeAlias = tuple[tuple[str, ...], ...]
"""The names of modules whose products read one input."""


class StandIns(Protocol):
    """The modules that stand for some of one model's."""

    groups: Groups  # those that can be one product

    @property
    def counted(self) -> Mapping[str, int]:
        """Modules by what they are in words, those that nothing stands for, too."""
        ...

    @property
    def copied(self) -> int:
        """Bytes that were made for them."""
        ...

    def standing_in(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return a copy of the model in which they stand, made again: a kept one would keep the model alive."""
        ...

    def refresh(self, model: PreTrainedModel, values: int) -> Change:
        """Make them of the model as it is now, unless its ``ModelVersion.values`` are those of the last time."""
        ...

    def drop(self) -> None:
        """Drop their tensors, until they are next asked for."""
        ...

    def note(self, products: Sequence[Product]) -> None:
        """Learn the groups of a trial."""
        ...

    @property
    def laid_out(self) -> bool:
        """Whether the weights of all groups lie as ``lay_out`` left them; also if it was never called."""
        ...

    def lay_out(self, model: PreTrainedModel) -> bool:
        """Lay the weights of groups side by side, which nobody may read meanwhile; whether no group had to leave."""
        ...

    def separate(self) -> None:
        """Give each weight memory of its own again."""
        ...

    def rewrite(self, graph: fx.Graph) -> None:
        """Make one product of each group's in a program's graph, as Dynamo made it, if they were laid out."""
        ...


class PackedPart(Protocol):
    """The part that computes by weights as libraries have packed them."""

    def stand_ins(self, model: PreTrainedModel, required: bool) -> StandIns | None: ...
    def formats_of(self, model: PreTrainedModel) -> dict[str, int]: ...


PACKED = Seam[PackedPart]("packed", "model")


def stand_ins_for(model: PreTrainedModel, packed: bool | Literal["auto"], groups: Groups = ()) -> StandIns | None:
    """Return those of a model, by the option ``packed`` of ``wrap``; None if it needs none, errors as of the part."""
    # ``groups`` are those of the model that it is a copy of.
    part = None if packed is False else feature(PACKED)
    made = None if part is None else part.stand_ins(model, packed is True)
    if made is not None:
        made.groups = groups
    return made


def packed_formats(model: PreTrainedModel, packed: bool | Literal["auto"]) -> dict[str, int]:
    """Return how many weights are packed in which format, of those that programs have stand-ins for."""
    part = None if packed is False else feature(PACKED)
    return {} if part is None else part.formats_of(model)
