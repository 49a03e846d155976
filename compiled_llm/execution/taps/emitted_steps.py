"""Keeps what steps of the same rows emit, on the device, with one copy in each step."""

# Shapes: S steps of a block, N tensors of one kind in each, R kept tokens, W the shape of one token's entry.

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from compiled_llm.compilation.graphs.outputs import Emitted

_LEAST_STEPS, _MOST_STEPS, _MOST_BYTES = 16, 64, 32 << 20
"""Of a block, but for the first: rows are often others after one step."""
# With less, views of many blocks would take the host time, and with more, the last one waste memory.


class EmittedSteps:
    """Copies of what each step emits: ``kept`` slices of a launch's tokens, ``count`` steps."""

    def __init__(self, kept: Sequence[slice], names: Collection[int | str]) -> None:
        """Keep the tokens in these slices of a launch's, of the tensors with these ``names``."""
        self.count = 0
        self.kept, self._names = kept, names
        self._emitted: Emitted | None = None
        self._copies: list[tuple[_Alike, list[Tensor]]] = []
        self._kinds: dict[tuple[int | str, ...], _Alike] = {}

    def append(self, emitted: Emitted) -> None:
        """Copy what a launch has emitted, before the next one overwrites it; all launches have the same names."""
        if emitted is not self._emitted:  # a CUDA graph always writes the same tensors
            self._emitted, self._copies = emitted, list(self._found(emitted))
        for kind, tensors in self._copies:
            torch.cat(tensors, out=kind.next_place(tensors, self.count))
        self.count += 1

    def _found(self, emitted: Emitted) -> Iterator[tuple[_Alike, list[Tensor]]]:
        """Yield what is copied at once: tensors of one dtype and width, mostly all of them."""
        alike: dict[tuple[torch.dtype, torch.Size], list[int | str]] = {}
        for name, tensor in emitted.items():
            if name in self._names:
                alike.setdefault((tensor.dtype, tensor.shape[1:]), []).append(name)
        for names in (tuple(sorted(names, key=str)) for names in alike.values()):
            kind = self._kinds.setdefault(names, _Alike(names))
            yield kind, [emitted[name][part] for name in names for part in self.kept]

    def by_step(self) -> list[dict[int | str, Tensor]]:
        """Return what each step has emitted, ``[R, 1, *W]`` by name: views of the blocks."""
        steps: list[dict[int | str, Tensor]] = [{} for _ in range(self.count)]
        for kind in self._kinds.values():
            size, tensors = len(kind.names), list[Tensor]()
            for block in kind.blocks:
                used = block[: self.count - len(tensors) // size]
                tensors += used.flatten(0, 1).unsqueeze(2).unbind()
            for number, step in enumerate(steps):
                step.update(zip(kind.names, tensors[number * size : (number + 1) * size], strict=True))
        return steps

    def of(
        self, names: Collection[int | str], tokens: slice, steps: range
    ) -> dict[tuple[int | str, ...], list[Tensor]]:
        """Return what consecutive steps, at least one, have emitted under some names, of n of the R tokens."""
        # By the names of tensors of one dtype and width, K of them, it is ``[K, steps * n, *W]``, in parts of some
        # steps each; tokens of one step before those of the next.
        found = {}
        for kind in self._kinds.values():
            if wanted := tuple(name for name in kind.names if name in names):
                found[wanted] = [part.flatten(1, 2) for part in kind.of(wanted, tokens, steps)]
        return found


class _Alike:
    """The tensors of one dtype and width."""

    def __init__(self, names: tuple[int | str, ...]) -> None:
        self.names = names  # N of them
        self.blocks: list[Tensor] = []  # ``[S, N, R, *W]`` each
        self._places: list[Tensor] = []  # of the last block, the next one last

    def next_place(self, tensors: Sequence[Tensor], steps: int) -> Tensor:
        """Return where the tensors, ``[N * R, *W]`` in all, of the step after so many ``steps`` go."""
        if not self._places:
            first, tokens = tensors[0], sum(map(len, tensors)) // len(self.names)
            fitting = _MOST_BYTES // max(1, sum(tensor.nbytes for tensor in tensors))
            size = max(1, min(max(steps, _LEAST_STEPS), _MOST_STEPS, fitting)) if steps else 1
            self.blocks.append(first.new_empty(size, len(self.names), tokens, *first.shape[1:]))
            self._places = [*reversed(self.blocks[-1].flatten(1, 2).unbind())]
        return self._places.pop()

    def of(self, names: tuple[int | str, ...], tokens: slice, steps: range) -> Iterator[Tensor]:
        """Yield the same as ``EmittedSteps.of`` of each block, ``[K, s, n, *W]``: views, unless others want more."""
        at = 0
        for block in self.blocks:
            inside = block[max(steps.start - at, 0) : max(steps.stop - at, 0), :, tokens]
            at += len(block)
            if len(inside):
                whole = inside.transpose(0, 1)
                yield whole if names == self.names else torch.stack([whole[self.names.index(name)] for name in names])
