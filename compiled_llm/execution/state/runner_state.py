"""Tensors of a model runner at fixed addresses: pages, page tables, columns of decode steps and sampling settings."""

# Shapes: B rows, C columns of a cache, K kv heads, D head dimension.

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.graphs.step_table import Budget, StepTable
from compiled_llm.config import WrapConfig
from compiled_llm.execution.state.arena import Arena
from compiled_llm.execution.state.prefill_room import compiled_length
from compiled_llm.execution.state.runner_tap import RunnerTap
from compiled_llm.execution.state.score_room import ScoreRoom
from compiled_llm.execution.state.slots import SLOTS_FOR_A_ROW, Slots
from compiled_llm.execution.state.staging import Staging
from compiled_llm.features import Seam, feature
from compiled_llm.kinds.registry import CODECS
from compiled_llm.kinds.rows import NO_ENTRY, JointAttention
from compiled_llm.kinds.scales import allocate_scales
from compiled_llm.kinds.spec import TokenPlaces
from compiled_llm.kvcache.memory import (
    ended_marker,
    mark_for_any_room,
    mark_static,
    pages_to_allocate,
    states_to_allocate,
    wait_for,
)
from compiled_llm.kvcache.pool import ENTRIES_OF_A_ROW, PagePool, StatePool
from compiled_llm.kvcache.releasable_memory import ReleasableMemory
from compiled_llm.kvcache.row import PageCopy, Row
from compiled_llm.kvcache.specs import allocate_pages, kv_cache_specs, page_bytes
from compiled_llm.kvcache.step_validity import StepValidity
from compiled_llm.model.facts import ModelFacts
from compiled_llm.model.sizes import logits_width
from compiled_llm_ops.plain_attention import as_bytes
from compiled_llm_ops.protocol import DecodeOps

_SPARE_STATES = 2
_KEPT_STATES_FOR_A_ROW, _MOST_KEPT_STATES = 2, 32
"""Entries for states after beginnings of texts, which a prefix tree keeps: for each row of a batch, and at most."""


class SharedTables(Protocol):
    """The tables by which decode steps read pages that several rows share."""

    @property
    def nbytes(self) -> int: ...
    def of(self, step: StepKey) -> JointAttention: ...
    def of_padding(self, step: StepKey) -> JointAttention:
        """Return tables of padding alone, made anew."""
        ...

    def lay_out(self, runs: Sequence[Any], rows: Sequence[Row], step: StepKey) -> None:
        """Write which pages of ``rows``, which have slots, are read together: the ``runs`` of a ``RunsOfLoop``."""
        ...


class RunsOfLoop(Protocol):
    """The runs of pages that rows of one loop share."""

    def runs(self, rows: Sequence[Row]) -> Sequence[Any]:
        """Return those that are read once."""
        ...


class PageSharing(Protocol):
    """When decode steps read pages that rows share once."""

    def tables(self, state: RunnerState) -> SharedTables: ...
    def of_loop(self) -> RunsOfLoop: ...
    def may_pay(self, rows: int) -> bool:
        """Return whether a step of so many rows reads shared pages once if all of them share as much as they can."""
        ...


class CascadePart(Protocol):
    """The part that reads shared pages once."""

    def sharing_of(self, state: RunnerState, ops: DecodeOps | None) -> PageSharing | None: ...


_CASCADE = Seam[CascadePart]("cascade", "execution")


class RunnerState:
    """Tensors that are allocated once, before anything is captured, and copies into and out of them.

    Attributes:
        kv_memory: of ``pages``, their tags, and ``states``, which a model that sleeps gives back.
        sharing: when decode steps read shared pages once; None for never.
        scales: of each layer's pages; empty if these are of the model's dtype.
        validity: of decode steps; whatever changes something that they are made from ends it.
        states: the memory of rows' states, a tensor for each of ``ModelFacts.states``.
        spare_states: entries for the states of a row whose prompt is cut into several launches.
        scores: what choosing tokens may take; None if layers have no indexers.
        prefill_indices: the page numbers of the prefill that runs; None with ``scores``, where each prefill has a
            tensor of as many as it scores.
    """

    def __init__(
        self,
        facts: ModelFacts,
        config: WrapConfig,
        max_positions: int,
        prefill_pages: int,
        entries: int | None = None,
    ) -> None:
        """Allocate, with room for rows of ``max_positions`` tokens and ``prefill_pages`` entries of a page table."""
        # There are ``entries`` for states of rows; as many as the config has room for if None. ValueError if not even
        # one page fits into the memory allowed.
        model, taps = facts.model, facts.taps
        self.facts = facts
        self.config = config
        self.device, self.dtype = model.device, model.dtype
        self.max_positions = max_positions
        self.validity = StepValidity()
        self.step_table = StepTable(
            Budget(*config.graph_budget),
            functools.partial(wait_for, self.device),
            mark=functools.partial(ended_marker, self.device),
            changed=self.validity.invalidate,
            captures=config.captures_on(self.device.type),
        )
        chosen = config.backend_on(self.device.type)
        with torch.inference_mode(False):
            scaled = facts.layers if config.kv_dtype else ()
            self.scales = allocate_scales(scaled, config.kv_scales, self.device)
        paging = config.page_size, model.dtype, chosen.backend, CODECS.get(config.kv_dtype)
        self.specs = kv_cache_specs(facts.layers, *paging, self.scales)
        for tensor in [tensor for spec in self.specs for tensor in spec.scales if tensor is not None]:
            mark_static(tensor)
        cascade = feature(_CASCADE)
        self.sharing = None if cascade is None else cascade.sharing_of(self, chosen.decode_ops)
        entries = self._entries_of_states() if entries is None else entries
        count, self.scores = self._room_for_pages(entries)
        with torch.inference_mode(False):
            self.kv_memory = ReleasableMemory(self.device)
            self.pages = allocate_pages(self.specs, count, self.kv_memory)
            self.states = self._allocate_states(entries)
            self.memories = [*self.pages, *self.states]
            self.staging = Staging(self.device)
            self.arena = Arena(self._columns(taps), self.device, self.staging)
            self.taps = tuple(tap(config, count, self.arena, self.staging, self.kv_memory) for tap in taps)
            carried = [column for tap in self.taps for column in tap.carried]
            width = logits_width(model)
            self.slots = Slots(self.arena, self.staging, width, self.validity, carried, bool(facts.states))
            self.prefill_indices: Tensor | None = None
            if self.scores is None:
                indices = torch.zeros(prefill_pages, dtype=torch.int32, device=self.device)
                self.prefill_indices = mark_for_any_room(indices)
        states, self.spare_states = self._pool_of_states(entries)
        self.pool = PagePool(count, config.page_size, self.validity, taps[0].row if taps else None, states)

    def _room_for_pages(self, entries: int) -> tuple[int, ScoreRoom | None]:
        """Return how many pages there are beside so many states, and the room for what an indexer scores of them."""
        beside = self._score_room()
        count = pages_to_allocate(
            self.config,
            page_bytes(self.specs),
            self.device,
            self.max_positions,
            None if beside is None else lambda pages: beside(pages).limit,
            entries * self.bytes_of_a_state,
        )
        scores = None if beside is None else beside(count)
        if scores is not None:
            scores.check_pool(count - 1)
        return count, scores

    def _columns(self, taps: Sequence[type[RunnerTap]]) -> dict[str, tuple[int, torch.dtype]]:
        """Return the columns of slots, decode buffers and taps."""
        rows, pages_each = self.config.max_batch_size, -(-self.max_positions // self.config.page_size) + 1
        columns = dict.fromkeys(("decode_slot", "decode_position"), (rows, torch.int64))
        columns |= dict.fromkeys(("decode_length", "decode_start"), (rows, torch.int32))
        columns |= Slots.columns(rows, pages_each, bool(self.facts.states))
        for tap in taps:
            columns |= tap.columns(columns["next_token"][0] + rows)
        return columns

    def _pool_of_states(self, entries: int) -> tuple[StatePool | None, tuple[int, int]]:
        """Return what hands out entries, and the spare ones; there are none if rows have no states."""
        if not self.facts.states:
            return None, (NO_ENTRY, NO_ENTRY)
        pool = StatePool(entries, self.validity)
        pool.reserve(_SPARE_STATES)
        read, written = pool.take_reserved(_SPARE_STATES)
        return pool, (read, written)

    def _allocate_states(self, entries: int) -> list[Tensor]:
        """Return the memory of rows' states."""
        states = [self.kv_memory.zeros((entries, *spec.shape), spec.dtype) for spec in self.facts.states]
        for memory in states:
            mark_static(memory)
            torch._dynamo.mark_dynamic(memory, 0)
        return states

    def _score_room(self) -> Callable[[int], ScoreRoom] | None:
        """Return what tells, for a pool of P pages, how much choosing may take; None if layers have no indexers."""
        scores = self.facts.scores
        if scores is None:
            return None
        one, most, size = page_bytes(self.specs), self.max_positions, self.config.page_size
        compiled = compiled_length(self.facts.layers, self.device, most, size)
        return lambda pages: ScoreRoom.of(scores, self.config, most, compiled, pages, pages * one)

    def _entries_of_states(self) -> int:
        """Return how many states there are: of a cut prompt, of rows with slots, of beginnings that a tree keeps."""
        # The tree has all that no row needs: of many rows, seldom all run.
        if not self.facts.states:
            return 0
        rows, least = self.config.max_batch_size, _SPARE_STATES + ENTRIES_OF_A_ROW
        kept = min(_MOST_KEPT_STATES, _KEPT_STATES_FOR_A_ROW * rows)
        wanted = _SPARE_STATES + ENTRIES_OF_A_ROW * SLOTS_FOR_A_ROW * rows + kept
        return states_to_allocate(self.config, self.bytes_of_a_state, self.device, wanted, least)

    @property
    def states_of_rows(self) -> int:
        """How many states rows and the prefix tree may have: all but the spare ones."""
        return 0 if self.pool.states is None else self.pool.states.total - _SPARE_STATES

    @property
    def bytes_of_a_state(self) -> int:
        """Bytes of an entry over all layers; 0 if rows have no states."""
        return sum(spec.nbytes for spec in self.facts.states)

    @property
    def state_bytes(self) -> int:
        """Bytes of rows' states; 0 while they are given back."""
        return 0 if self.kv_memory.given_back else sum(memory.nbytes for memory in self.states)

    def fit_vocabulary(self) -> None:
        """Follow a model whose vocabulary has changed."""
        self.slots.fit(logits_width(self.facts.model))

    @property
    def page_bytes(self) -> int:
        """Bytes of the pages; 0 while they are given back."""
        return 0 if self.kv_memory.given_back else sum(memory.nbytes for memory in self.pages)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all tensors but the pages, and what steps have outside the arena."""
        parts = (self.arena, self.slots)
        return sum(part.nbytes for part in (*parts, *self.taps, self.prefill_indices) if part is not None)

    def release(self) -> None:
        """Give most of the memory back; nothing may be run afterwards."""
        self.kv_memory.free()
        self.pages.clear()
        self.states.clear()
        self.memories.clear()
        self.slots.release()

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy whole pages in all layers, in stream order."""
        columns = [np.array(column, dtype=np.int64) for column in zip(*copies, strict=True)]
        source, target = self.staging.to_device(columns)
        for memory in map(as_bytes, self.pages):
            memory.index_copy_(0, target, memory.index_select(0, source))
        for tap in self.taps:
            tap.copied(source, target)

    def write(
        self,
        rows: Sequence[Row],
        stored: NDArray[np.bool_],
        keys_and_values: Sequence[tuple[Tensor, Tensor] | None],
        states: Sequence[Tensor] = (),
        ids: Sequence[NDArray[np.int64]] | None = None,
    ) -> None:
        """Write what was computed elsewhere to the ends of rows, already grown by it.

        Args:
            stored: ``[B, C]``, which columns each row takes.
            keys_and_values: of each layer, ``[B, K, C', D]``, whose last column is the last of ``stored``; zeros are
                written for columns that a layer lacks. None of a layer that keeps none.
            states: the rows' states after the last column, ``[B, ...]``, in the order of ``ModelFacts.states``.
            ids: the tokens of each row, if they are known.
        """
        batch_indices, columns = np.nonzero(stored)
        counts = stored.sum(axis=1).tolist()
        at = [np.arange(row.exact_length - count, row.exact_length) for row, count in zip(rows, counts, strict=True)]
        size = self.config.page_size
        numbers = [np.array(row.pages, dtype=np.int64)[own // size] for row, own in zip(rows, at, strict=True)]
        entries = [np.concatenate(numbers), np.concatenate(at) % size, batch_indices, columns]
        pages, slots, of_rows, of_columns = self.staging.to_device(entries)
        places = TokenPlaces(stored.shape[1], pages, slots, of_rows, of_columns, whole=bool(stored.all()))
        for spec, memory, both in zip(self.specs, self.pages, keys_and_values, strict=True):
            if both is not None:
                spec.write(memory, places, *both)
        self._write_states(rows, counts, states)
        for tap in self.taps:
            known = [np.zeros(count, dtype=np.int64) for count in counts] if ids is None else ids
            tap.imported(rows, self.slots.places(rows), known)

    def _write_states(self, rows: Sequence[Row], counts: Sequence[int], states: Sequence[Tensor]) -> None:
        """Write states into the entries that rows have entered by ``counts`` tokens; without any, they keep theirs."""
        grown = [number for number, count in enumerate(counts) if count]
        if not (self.states and grown):
            return
        entries = [np.array(own, dtype=np.int64) for own in (grown, [rows[number].entry for number in grown])]
        given, at = self.staging.to_device(entries)
        for memory, own in zip(self.states, states, strict=True):
            memory[at] = own[given].to(memory.dtype)

    def read_states(self, rows: Sequence[Row]) -> list[Tensor]:
        """Return copies of rows' states, ``[B, ...]``; the rows hold tokens."""
        if not self.states:
            return []
        (at,) = self.staging.to_device([np.array([row.entry for row in rows], dtype=np.int64)])
        return [memory.index_select(0, at) for memory in self.states]

    def read(self, layer: int, row: Row) -> tuple[Tensor, Tensor]:
        """Return copies of a row's keys and values in one layer, each ``[K, length, D]``."""
        spec = self.specs[layer]
        (pages,) = self.staging.to_device([np.array(row.pages, dtype=np.int64)])
        return spec.read(self.pages[layer], pages, row.exact_length)
