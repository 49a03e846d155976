"""What cases are made of: frozen data that prints as the code that makes it, to be pasted and run."""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from support.fuzzing.side import Side


class Data:
    """Prints without what is left at its default."""

    def __repr__(self) -> str:
        given = (f"{field.name}={getattr(self, field.name)!r}" for field in _given(self))
        return f"{type(self).__name__}({', '.join(given)})"


def _given(data: Any) -> list[Field[Any]]:
    return [field for field in fields(data) if getattr(data, field.name) != default_of(field)]


def default_of(field: Field[Any]) -> Any:
    """The default of a field; MISSING if it has none."""
    return field.default_factory() if field.default_factory is not MISSING else field.default


class Step(Data):
    """One thing that is done to the wrapped model and to its unwrapped twin."""

    def run(self, side: Side) -> Any:
        """Do it; what it returns, and what it writes into ``side.log``, has to be equal on both sides."""
        raise NotImplementedError

    def draws(self, side: Side) -> bool:
        """Whether we draw tokens with random numbers of our own."""
        return False

    @property
    def interrupts(self) -> bool:
        """Whether a callback of the step presses Ctrl-C."""
        return any(word in repr(self) for word in ("'interrupts'", "'signals'"))


@dataclass(frozen=True, repr=False)
class Prompt(Data):
    """Random token ids."""

    lengths: tuple[int, ...] = (5,)  # of each row
    padding: str = "left"  # the side that shorter rows are filled on
    holes: tuple[tuple[int, int], ...] = ()  # (row, column) that the mask hides as well
    period: int = 0  # if not 0, rows repeat themselves after so many tokens: prompt lookup finds something
    masked: bool = True  # whether a mask is given
    wrong: str = ""  # how the ids are not what a model takes, if they are not
    seed: int = 0  # of the ids

    @property
    def columns(self) -> int:
        return max(self.lengths)

    @property
    def even(self) -> bool:
        """Whether all rows are as long."""
        return len(set(self.lengths)) == 1

    def ids(self, vocabulary: int) -> Tensor:
        """``[B, T]``, 0 where padded."""
        generator = torch.Generator().manual_seed(self.seed)
        ids = torch.randint(3, vocabulary, (len(self.lengths), self.columns), generator=generator)
        if self.period:
            ids = ids[:, torch.arange(self.columns) % self.period]
        return _WRONG.get(self.wrong, _right)(ids * self._filled(), vocabulary)

    def mask(self) -> Tensor:
        """``[B, T]`` of 0 and 1."""
        mask = self._filled()
        for row, column in self.holes:
            if row < len(mask) and column < mask.shape[1]:
                mask[row, column] = 0
        return mask

    def _filled(self) -> Tensor:
        lengths, columns = torch.tensor(self.lengths)[:, None], torch.arange(self.columns)
        return (columns < lengths if self.padding == "right" else columns >= self.columns - lengths).long()


def _right(ids: Tensor, vocabulary: int) -> Tensor:
    return ids


def _with_last(ids: Tensor, value: int) -> Tensor:
    ids[-1, -1] = value
    return ids


_WRONG = {
    "too large": lambda ids, vocabulary: _with_last(ids, vocabulary),
    "negative": lambda ids, vocabulary: _with_last(ids, -5),
    "floats": lambda ids, vocabulary: ids.float(),
    "one row without a batch": lambda ids, vocabulary: ids[0],
    "no token": lambda ids, vocabulary: ids[:, :0],
    "no row": lambda ids, vocabulary: ids[:0],
}
