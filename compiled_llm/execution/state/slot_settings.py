"""The sampling settings of the rows in the slots, on the host and in the tables that programs read."""

# Numbers go through the arena. Larger settings are written only when a row comes in that has them; all of them in one
# copy, however many rows come in.
# Shapes: X slots, V vocabulary, n slots that are written, N biases.

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.compilation.sampling.bias import from_position
from compiled_llm.compilation.sampling.sampling import GREEDY, NUMBERS, Sampling, SamplingTables, wide_tables
from compiled_llm.execution.state.arena import Arena
from compiled_llm.execution.state.staging import Staging
from compiled_llm.kvcache.memory import free, mark_for_any_room
from compiled_llm_ops import MAX_FOLLOWED

_MAX_COUNTED = (2**15 - 1) // 2
_KINDS = {name: torch.empty(0, dtype=dtype, device="cpu").numpy().dtype for name, dtype in NUMBERS.items()}
_LARGEST = {kind: math.inf if kind.kind == "f" else np.iinfo(kind).max for kind in _KINDS.values()}
_HALF_WRITTEN = Sampling()
"""Stands for settings whose writing has failed."""


class SlotSettings:
    """The settings of each slot; in the model's executor only."""

    # ``deferring`` has the slots of rows whose sampling is deferred.

    @staticmethod
    def columns(count: int) -> dict[str, tuple[int, torch.dtype]]:
        """Return the columns of an arena for this many slots."""
        numbers = {name: (count, dtype) for name, dtype in NUMBERS.items()}
        return {"next_token": (count, torch.int64), **numbers}

    def __init__(self, arena: Arena, staging: Staging, vocabulary: int) -> None:
        """All slots begin greedy."""
        self._arena = arena
        self._staging = staging
        columns = {name: arena[name] for name in ("next_token", *NUMBERS)}
        entries, device = len(columns["next_token"]), columns["next_token"].device
        self.tables = SamplingTables.of(columns, _static(wide_tables(entries, vocabulary, device)))
        self._settings = [GREEDY] * entries
        self.deferring: set[int] = set()
        self._masked: set[int] = set()
        self._write_numbers(list(range(entries)), self._settings)

    @property
    def nbytes(self) -> int:
        """Bytes of the tables outside the arena."""
        return sum(table.nbytes for table in self._wide)

    def release(self) -> None:
        """Give back the memory of the tables outside the arena."""
        for table in self._wide:
            free(table)

    @property
    def _wide(self) -> tuple[Tensor, ...]:
        tables = self.tables
        return tables.counts, tables.allowed, tables.biases, tables.recent

    def fit(self, vocabulary: int) -> None:
        """Follow a model whose vocabulary has changed."""
        old = self.tables.counts
        if old.shape[1] == vocabulary:
            return
        with torch.inference_mode(False):
            wide = wide_tables(len(old), vocabulary, old.device)
            for name, table in wide.items():
                before = getattr(self.tables, name)
                both = min(before.shape[1], table.shape[1])
                table[:, :both] = before[:, :both]
        self.tables = self.tables._replace(**_static(wide))

    def of(self, slot: int) -> Sampling:
        """Return the settings of the row in a slot, or of the last one that was there."""
        return self._settings[slot]

    def enter(self, slots: Sequence[int], settings: Sequence[Sampling]) -> None:
        """Write the settings of rows that have taken slots, unless they are there already."""
        changed = {
            slot: own
            for slot, own in zip(slots, settings, strict=True)
            if own is not self._settings[slot] or not own.forgets  # the counts that a row has left are its own
        }
        if not changed:
            return
        for slot in changed:
            self._settings[slot] = _HALF_WRITTEN
        self._write_numbers(list(changed), list(changed.values()))
        if any(sampling.adjustments for sampling in changed.values()):
            self._write_tables(changed)
        for slot, sampling in changed.items():
            self._settings[slot] = sampling
            (self.deferring.add if sampling.deferred else self.deferring.discard)(slot)
            (self._masked.discard if sampling.mask is None else self._masked.add)(slot)

    def laid_out(self, slots: Sequence[int], masks: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return masks ``[n, words]`` as the table has them; tokens that they do not know are barred."""
        # ValueError if a row in ``slots`` ``[n]`` has come in without a mask.
        if not self._masked.issuperset(slots):
            raise ValueError("masks: a row that is to get masks comes in with one; give its Sampling the first")
        return _as_wide(masks, self.tables.allowed.shape[1])

    def count_again(self, slots: Iterable[int]) -> None:
        """Forget which tokens have been sampled in these slots since rows took them."""
        self._write_tables({slot: self._settings[slot] for slot in slots if not self._settings[slot].forgets})

    def _write_numbers(self, slots: list[int], settings: list[Sampling]) -> None:
        at = np.array(slots, dtype=np.int64)
        for name, kind in _KINDS.items():
            most = _LARGEST[kind]
            values = [min(getattr(sampling, name), most) for sampling in settings]
            self._arena.write(name, at, np.array(values, dtype=kind))

    def _write_tables(self, changed: Mapping[int, Sampling]) -> None:
        """Copy all tables to the device at once: staging has room for a few copies that have not been made yet."""
        _, vocabulary = self.tables.counts.shape
        parts = {
            "counts": _counts({slot: own for slot, own in changed.items() if own.counts}, vocabulary),
            "allowed": _masks({slot: own for slot, own in changed.items() if own.mask is not None}, vocabulary),
            "biases": _biases({slot: own for slot, own in changed.items() if own.biases.size}),
            "recent": _recent({slot: own for slot, own in changed.items() if own.followed}),
        }
        flat = [array.reshape(-1) for arrays in parts.values() for array in arrays]
        there = iter(self._staging.to_device(flat) if flat else ())
        for name, arrays in parts.items():
            table, written = getattr(self.tables, name), [next(there).view(array.shape) for array in arrays]
            if name == "counts" and written:
                slots, at, values = written
                table.index_fill_(0, slots, 0).view(-1).index_copy_(0, at, values)
            elif written:
                slots, values = written
                part = table[:, : values.shape[1], : values.shape[2]] if name == "biases" else table
                part.index_copy_(0, slots, values)


def _static(tables: dict[str, Tensor]) -> dict[str, Any]:
    return {name: mark_for_any_room(table) for name, table in tables.items()}


def _slots(settings: Mapping[int, Sampling]) -> NDArray[np.int64]:
    return np.fromiter(settings, dtype=np.int64, count=len(settings))


def _counts(settings: Mapping[int, Sampling], vocabulary: int) -> tuple[NDArray[Any], ...]:
    """Return the slots, the places in the flat table ``[X * V]`` where counts are not zero, and these counts."""
    if not settings:
        return ()
    slots = _slots(settings)
    prompts = _places(slots, [own.seen for own in settings.values()], vocabulary)
    answers = _places(slots, [own.output_ids for own in settings.values()], vocabulary)
    places, which = np.unique(np.concatenate([prompts, answers]), return_inverse=True)
    prompted, times = (np.bincount(part, minlength=len(places)) for part in np.split(which, [len(prompts)]))
    counts = 2 * np.minimum(times, _MAX_COUNTED) + (prompted > 0)
    return slots, places, counts.astype(np.int16)


def _places(slots: NDArray[np.int64], tokens: Sequence[NDArray[np.int64]], vocabulary: int) -> NDArray[np.int64]:
    """Return the places in the flat table ``[X * V]`` of these tokens of each slot; unknown ones are left out."""
    each, known = np.repeat(slots, [len(some) for some in tokens]), np.concatenate(tokens)
    inside = known < vocabulary
    return each[inside] * vocabulary + known[inside]


def _masks(settings: Mapping[int, Sampling], vocabulary: int) -> tuple[NDArray[Any], ...]:
    """Return the slots, and their masks ``[n, words]``; tokens that a mask does not know are barred."""
    words = -(-vocabulary // 32)
    each = [_as_wide(own.mask, words) for own in settings.values() if own.mask is not None]
    return (_slots(settings), np.stack(each)) if each else ()


def _as_wide(masks: NDArray[np.int32], words: int) -> NDArray[np.int32]:
    """Return masks ``[..., words]``."""
    missing = words - masks.shape[-1]
    return masks[..., :words] if missing <= 0 else np.pad(masks, [(0, 0)] * (masks.ndim - 1) + [(0, missing)])


def _biases(settings: Mapping[int, Sampling]) -> tuple[NDArray[Any], ...]:
    """Return the slots, and their biases ``[n, 4 + F, N]``, as many as the one with most has."""
    if not settings:
        return ()
    same: dict[int, list[int]] = {}  # places of rows that have one array, as those of one call mostly do
    for place, own in enumerate(settings.values()):
        same.setdefault(id(own.biases), []).append(place)
    each = list(settings.values())
    followed, most = (max(sizes) for sizes in zip(*(each[at[0]].biases.shape for at in same.values()), strict=True))
    table = np.full((len(each), followed, most), -1, dtype=np.int32)
    for at in same.values():
        biases, starts = each[at[0]].biases, np.array([each[place].start for place in at], dtype=np.int64)
        table[at, : biases.shape[0], : biases.shape[1]] = from_position(biases, starts)
    return _slots(settings), table


def _recent(settings: Mapping[int, Sampling]) -> tuple[NDArray[Any], ...]:
    """Return the slots, and the latest tokens of their rows ``[n, MAX_FOLLOWED + 1]``."""
    if not settings:
        return ()
    table = np.full((len(settings), MAX_FOLLOWED + 1), -1, dtype=np.int32)
    for row, own in zip(table, settings.values(), strict=True):
        text, end = np.concatenate([own.tail, own.output_ids])[-MAX_FOLLOWED:], own.start + len(own.output_ids)
        row[np.arange(end - len(text), end) % len(row)] = text
    return _slots(settings), table
