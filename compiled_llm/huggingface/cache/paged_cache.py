"""The cache of a wrapped model in HuggingFace's loops: it owns rows, not tensors."""

# Shapes: B rows, C tokens a row has been given, Q new ones, V vocabulary, K kv heads, D head dimension.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache, DynamicCache, PretrainedConfig

from compiled_llm.compat.huggingface import add_index_keys
from compiled_llm.execution.generate_loop import GenerateLoop
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.prefill.unpaged import KeysAndValues
from compiled_llm.execution.reporting.slow_paths import Reason
from compiled_llm.execution.threads.interrupts import deferred
from compiled_llm.huggingface.cache.cache_columns import (
    LogitsToKeep,
    RowUpdate,
    ascend,
    counted_positions,
    kept_columns,
    on_host,
    row_updates,
    same_rows,
    with_only_kept,
    with_updates,
)
from compiled_llm.huggingface.cache.extra_columns import ExtraColumns
from compiled_llm.huggingface.cache.hidden_columns import check_blocks, check_windows
from compiled_llm.huggingface.cache.more_outputs import GivenOutputs, MoreOutputs
from compiled_llm.huggingface.cache.paged_layer import PagedLayer
from compiled_llm.kinds.kind import places_beside
from compiled_llm.kinds.registry import add_states
from compiled_llm.kinds.support import refusal, runs_original
from compiled_llm.kvcache.errors import OutOfPagesError
from compiled_llm.kvcache.row import Row
from compiled_llm.model.inputs import check_range


class PendingPrompt(NamedTuple):
    """A prompt that HuggingFace's own forward computes before our steps."""

    reason: Reason
    over: Cache  # a cache of HuggingFace's, with what the pages hold


class PagedCache(Cache):
    """The rows of one ``generate`` call, or of one conversation; dropping it gives their pages back.

    Attributes:
        stored: ``[B, C]`` bool on the host: True for each token of a row that lies in pages; masked ones do not.
        prefill: what the present call of ``generate`` begins with; None if it begins with our steps, or is past that.
    """

    prefill: PendingPrompt | None = None

    def __init__(self, model_runner: ModelRunner, computed: KeysAndValues | None = None) -> None:
        """Be empty, or hold what was ``computed``, which enters pages once something needs it there."""
        state = model_runner.state
        facts = state.facts
        of_all = state.dtype, state.device, not facts.states
        super().__init__(layers=[PagedLayer(self, index, *of_all) for index in range(len(facts.layers))])
        self.model_runner = model_runner
        self._computed = computed
        self._generate_loop: GenerateLoop | None = None
        self.stored = _NOTHING if computed is None else computed.shown

    @property
    def generate_loop(self) -> GenerateLoop:
        """The loop that owns the rows, whose tokens all lie in pages; OutOfPagesError if too few are free for that."""
        if self._generate_loop is None:  # few read the cache of a forward, and most of those of generate
            self._generate_loop = self._in_pages(self._computed)
            self._computed = None
        return self._generate_loop

    @deferred()
    def _in_pages(self, computed: KeysAndValues | None) -> GenerateLoop:
        generate_loop = GenerateLoop(self.model_runner)
        if computed is not None:
            try:
                for _ in self.stored:
                    generate_loop.add_row(0)
                generate_loop.fill(self.stored, computed.by_layer(), computed.next_positions())
            except BaseException:
                generate_loop.close()
                raise
        return generate_loop

    @deferred()
    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        """Return an independent copy; pages are shared until one of the two writes to them."""
        copy = PagedCache(self.model_runner)
        copy._generate_loop = self.generate_loop.fork()
        copy.stored = self.stored
        return copy

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a PagedCache cannot be pickled: its tokens lie in the pages of one model in this process; keep the token "
            "ids and compute them again"
        )

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, None]]:
        """Yield each layer's keys and values ``[B, K, C, D]`` and None, as ``DynamicCache`` does."""
        return ((layer.keys, layer.values, None) for layer in cast("list[PagedLayer]", self.layers))

    @property
    def seen(self) -> int:
        """C, how many tokens each row has been given, masked ones (which are not stored) included."""
        return int(self.stored.shape[1])

    @property
    def _rows(self) -> Sequence[Row]:
        return self.generate_loop.rows

    @property
    def is_compileable(self) -> bool:
        """False, or ``generate`` would compile by itself and turn the 2-D mask into one that this cache cannot use."""
        return False

    @property
    def max_cache_len(self) -> int:
        """-1, no limit: PEFT's prefix tuning asks every cache but a ``DynamicCache`` for one."""
        return -1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def copied(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return ``[B, K, C, D]`` twice, copies of a layer's keys and values; zeros where a token is masked."""
        keys, values = zip(*self.generate_loop.stored(layer), strict=True)
        return self._in_columns(keys), self._in_columns(values)

    def index_keys(self) -> Iterator[tuple[int, Tensor]]:
        """Yield each layer with an indexer, and copies ``[B, C, I]`` of its keys; nothing while there are none."""
        places = places_beside(self.model_runner.state.facts.layers) if self.seen else {}
        return ((layer, self.copied(place)[0][:, 0]) for layer, place in places.items())

    def _in_columns(self, rows: Sequence[Tensor]) -> Tensor:
        """Return ``[B, K, C, D]`` from the stored tokens of each row, ``[K, length, D]``."""
        heads, _, head_dim = rows[0].shape
        out = rows[0].new_zeros(len(rows), heads, self.seen, head_dim)
        for batch_index, row in enumerate(rows):
            out[batch_index, :, torch.from_numpy(np.flatnonzero(self.stored[batch_index])).to(out.device)] = row
        return out

    def handed_over(self, config: PretrainedConfig) -> Cache:
        """Return HuggingFace's cache with the same tokens, and give all pages back."""
        theirs = self.copied_into(DynamicCache(config=config.get_text_config(decoder=True)))
        self.close()
        return theirs

    def copied_into(self, theirs: Cache) -> Cache:
        """Return a cache of HuggingFace's, empty before, with copies of what the rows hold; zeros in masked columns."""
        for index, layer in enumerate(self.model_runner.state.facts.layers):
            if self.seen and layer.fills_caches:
                theirs.update(*self.copied(index), index)
        for index, keys in self.index_keys():
            add_index_keys(theirs, keys, index)
        if self.seen:
            add_states(theirs, self.model_runner.state.facts.layers, self.generate_loop.states())
        return theirs

    def end_prefill(self) -> None:
        """Forget the prompt that HuggingFace's forward had to compute: it has, and pages hold it, or it has failed."""
        self.prefill = None

    @deferred()
    def close(self) -> None:
        if self._generate_loop is not None:
            self._generate_loop.close()
        self._computed = None
        self.stored = _NOTHING

    def reset(self) -> None:
        """Drop all tokens and give their pages back; the cache can be used again."""
        self.close()

    @deferred()
    def crop(self, tokens_to_remove: int) -> None:
        """Drop a number of tokens, negative as in HuggingFace, masked ones included, from the end of every row.

        Raises:
            ValueError: the number is positive or too large, or there are no states from before; nothing
                changed.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop: tokens_to_remove={tokens_to_remove} must be a negative number of tokens")
        left = self.seen + tokens_to_remove
        if left < 0:
            raise ValueError(f"crop: tokens_to_remove={tokens_to_remove} and the cache was given {self.seen} tokens")
        lengths = self.stored[:, :left].sum(axis=1).tolist()
        kinds = self.model_runner.state.facts.kinds
        given = f"crop: tokens_to_remove={tokens_to_remove}"
        refused = refusal(kinds, "crop", given)
        if refused and any(0 < kept < row.exact_length for row, kept in zip(self._rows, lengths, strict=True)):
            raise ValueError(refused)
        with self.generate_loop.promise.drawn_on():
            for row, length in zip(self._rows, lengths, strict=True):
                row.rewind(length)
                row.release_unused()
        self.stored = self.stored[:, :left]
        if not left:
            self.close()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row b continue from row ``beam_idx[b]`` (``[B]`` integers); pages are shared, not copied."""
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row in place, with shared pages; ValueError if there were more rows than ``max_batch_size``."""
        self._select(torch.arange(len(self.stored), device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``, ``[B']`` integers or ``[B]`` bool; ValueError as ``batch_repeat_interleave``."""
        self._select(indices)

    @deferred()
    def _select(self, indices: Tensor) -> None:
        batch_indices = np.arange(len(self.stored))[on_host(indices)]
        self.generate_loop.select(batch_indices.tolist())
        self.stored = self.stored[batch_indices]

    def updates(self, batch: int, mask: Tensor | None, first: int, last: int) -> list[RowUpdate]:
        """Return ``row_updates`` of a call with ``batch`` rows; ValueError if the cache has another number of rows."""
        if self.seen and len(self.stored) != batch:
            raise ValueError(f"input_ids: {batch} rows do not fit a cache of {len(self.stored)} rows")
        shown = None if mask is None else on_host(mask) != 0
        keeps_states = bool(self.model_runner.state.facts.states)
        return row_updates(self._stored_of(batch), shown, first, last, keeps_states)

    def check_windows(self, updates: Sequence[RowUpdate], last: int, growth: int = 0) -> None:
        """Raise VisibilityMismatchError if a window hides tokens, or will ``growth`` tokens after column ``last``."""
        windows = self.model_runner.windows
        if windows and last + growth > min(windows):
            first = min(update.unchanged for update in updates)
            check_windows(with_updates(self._stored_of(len(updates)), updates, last), first, growth, windows)

    def _stored_of(self, rows: int) -> NDArray[np.bool_]:
        """Return ``stored``, which has no rows yet where there are no columns."""
        return self.stored if self.seen else np.zeros((rows, 0), dtype=bool)

    @contextmanager
    def extended(self, updates: Sequence[RowUpdate], last: int) -> Iterator[list[Row]]:
        """Shrink rows to their kept tokens for the block, or if it fails; it stores the rest up to ``last``."""
        while len(self.generate_loop.rows) < len(updates):
            self.generate_loop.add_row(0)
        rows = list(self.generate_loop.rows)
        stored = self._stored_of(len(rows))
        for row, update in zip(rows, updates, strict=True):
            row.rewind(update.kept)
        positions = [row.exact_position for row in rows]
        lent = _lent(rows)
        self.stored = with_only_kept(stored, updates)
        try:
            yield rows
        except BaseException:
            for row, update, entry, row.exact_position in zip(rows, updates, lent, positions, strict=True):
                row.go_back(update.kept, entry)
            if not self.seen:
                self.close()
            raise
        else:
            for row, entry in zip(rows, lent, strict=True):
                row.return_state(entry)
        finally:
            self.generate_loop.end_step()
            with self.generate_loop.promise.drawn_on():
                for row in rows:
                    row.release_unused()
        self.stored = with_updates(stored, updates, last)

    def count(self, tokens: int) -> None:
        """Note that every row has stored ``tokens`` more."""
        self.stored = np.pad(self.stored, ((0, 0), (0, tokens)), constant_values=True)

    @deferred()
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        logits_to_keep: LogitsToKeep,
        extra: ExtraColumns | None = None,
        counts_unmasked: bool = False,
        wanted: MoreOutputs | None = None,
    ) -> tuple[Tensor, GivenOutputs | None]:
        """Store new tokens; return their ``[B, Q', V]`` logits, zeros for masked tokens, and what else is ``wanted``.

        Args:
            input_ids: ``[B, Q]``; zeros if ``extra`` has embeddings.
            attention_mask: ``[B, C + Q]``, or ``[B, Q]`` for the new tokens alone; masked tokens are not stored, and
                stored ones that it hides are forgotten. None hides nothing new.
            position_ids: ``[B, Q]`` or ``[1, Q]`` rotary positions; columns, or with ``counts_unmasked`` unmasked
                tokens, are counted if None.
            extra: what rows have besides ids.
            logits_to_keep: HuggingFace's: 0 for all, n for the last n, or a slice or list of columns.

        Raises:
            ValueError: the rows are not the cache's, a token id does not exist, or the model has too few positions.
            VisibilityMismatchError: a row would see other tokens than in HuggingFace's forward.
            OutOfPagesError: the pages for the new tokens are not free; nothing was stored.
        """
        batch, new = input_ids.shape
        first = self.seen
        if attention_mask is not None and attention_mask.shape[1] > first + new:
            raise ValueError(
                f"attention_mask: {attention_mask.shape[1]} columns are more than the {first} of the cache and {new} "
                "new ones; leave out those of tokens that neither has"
            )
        rows = self.updates(batch, attention_mask, first, first + new)
        self._check_positions(rows, new)
        self.check_windows(rows, first + new)
        if position_ids is None:
            position_ids = (
                counted_positions(rows, first, new)
                if counts_unmasked
                else torch.arange(first, first + new, device="cpu")[None]
            )
        if runs_original(self.model_runner.state.facts.kinds, "left_padding"):
            check_blocks(rows, first, on_host(position_ids))
        columns = kept_columns(logits_to_keep, new)
        decodes = new == 1 and first > 0 and extra is None and columns.tolist() == [0]
        if decodes and all(row.unchanged == first and row.kept and len(row.columns) for row in rows):
            return self._decode(input_ids, position_ids, rows, wanted)
        return self._extend(input_ids, extra, position_ids, rows, columns, wanted)

    def _check_positions(self, rows: Sequence[RowUpdate], new: int) -> None:
        longest = max(row.length for row in rows)
        most = self.model_runner.max_positions
        if longest > most:
            raise ValueError(f"input_ids: {new} more tokens make {longest}, and the model has {most} positions")

    def _decode(
        self, input_ids: Tensor, position_ids: Tensor, rows: Sequence[RowUpdate], wanted: MoreOutputs | None
    ) -> tuple[Tensor, GivenOutputs | None]:
        positions = np.broadcast_to(on_host(position_ids).reshape(-1), len(rows)).tolist()
        self.model_runner.expect_changes()  # since the last forward
        with self.extended(rows, self.seen + 1), self._reading(wanted, rows, self.seen, 1) as outputs:
            logits = self.generate_loop.decode(input_ids[:, 0], positions)[:, None]
        return logits, outputs()

    def _reading(
        self, wanted: MoreOutputs | None, rows: Sequence[RowUpdate], first: int, new: int
    ) -> AbstractContextManager[Callable[[], GivenOutputs | None]]:
        """Collect what the rows' ``new`` columns from ``first`` emit in the block; yields what returns it."""
        if wanted is None:
            return nullcontext(lambda: None)
        return wanted.reading(self.generate_loop, rows, first, new)

    def _extend(
        self,
        input_ids: Tensor,
        extra: ExtraColumns | None,
        position_ids: Tensor,
        rows: Sequence[RowUpdate],
        columns: NDArray[np.int64],
        wanted: MoreOutputs | None,
    ) -> tuple[Tensor, GivenOutputs | None]:
        first = self.seen
        new = position_ids.shape[1]
        ids = self._known_ids(input_ids)
        positions = np.broadcast_to(on_host(position_ids).astype(np.int64), ids.shape)
        fresh = [row.columns - first for row in rows]
        each_itself = list(range(len(rows)))
        leaders = same_rows(ids, positions, fresh) if not first and extra is None else each_itself
        active = [batch_index for batch_index in sorted(set(leaders)) if len(fresh[batch_index])]
        if not active:
            raise ValueError("attention_mask hides every new token of every row: there is nothing to compute")
        packed = np.concatenate([batch_index * new + fresh[batch_index] for batch_index in active])
        distinct, order = (columns, columns) if ascend(columns) else np.unique(columns, return_inverse=True)
        chosen = np.zeros(new, dtype=bool)
        chosen[distinct] = True
        kept = np.flatnonzero(chosen[packed % new])
        with self.extended(rows, first + new), self._reading(wanted, rows, first, new) as outputs:
            logits = self.generate_loop.extend(
                [self.generate_loop.rows[batch_index] for batch_index in active],
                [ids[batch_index][fresh[batch_index]] for batch_index in active],
                [positions[batch_index][fresh[batch_index]] for batch_index in active],
                kept,
                None if extra is None else [extra.select(index, fresh[index]) for index in active],
            )
            self.generate_loop.select(leaders)
        if len(kept) == len(rows) * len(distinct):
            out = logits.view(len(rows), len(distinct), logits.shape[-1])
        else:
            places = packed[kept] // new * len(distinct) + np.searchsorted(distinct, packed[kept] % new)
            out = logits.new_zeros(len(rows), len(distinct), logits.shape[-1])
            out.view(-1, logits.shape[-1]).index_copy_(0, self._uploaded(places), logits)
        found = outputs()
        if leaders != each_itself:
            followed = self._uploaded(np.array(leaders))
            out = out[followed]
            found = None if found is None else found.map(lambda tensor: tensor[followed])
        return out if distinct is columns else out[:, self._uploaded(order)], found

    def _uploaded(self, indices: NDArray[np.int64]) -> Tensor:
        """Return indices on the device, from pinned memory: a copy from ordinary memory waits for all that runs."""
        (uploaded,) = self.model_runner.thread.call(self.model_runner.state.staging.to_device, [indices])
        return uploaded

    def _known_ids(self, input_ids: Tensor) -> NDArray[np.int64]:
        ids: NDArray[np.int64] = on_host(input_ids).astype(np.int64)
        check_range(int(ids.min()), int(ids.max()), self.model_runner.vocabulary)
        return ids


_NOTHING: NDArray[np.bool_] = np.zeros((0, 0), dtype=bool)


def _lent(rows: Sequence[Row]) -> list[int]:
    """Return the entries of rows' states, lent; OutOfStatesError if one could not go on, and none is lent then."""
    lent: list[int] = []
    try:
        for row in rows:
            lent.append(row.lend_state())  # noqa: PERF401  # those before an error are given back
    except OutOfPagesError:
        for row, entry in zip(rows, lent, strict=False):
            row.return_state(entry)
        raise
    return lent
