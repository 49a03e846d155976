"""A model's device side: pages, buffers, plans and programs, and who is in the decode buffers at the moment.

Everything here runs on the model's device thread.

Shapes: B rows, T packed tokens, L tokens whose logits are wanted, V vocabulary, S page size.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from compiled_llm.attention import AttentionSwitch, PagedBatch
from compiled_llm.compat import cudagraph_messages, cudagraph_recordings, cudagraph_skips
from compiled_llm.compile import PREFILL, PREFILL_EMBEDDED, Forward, Programs
from compiled_llm.config import WrapConfig
from compiled_llm.executor import Executor
from compiled_llm.fused import FusedWeights, Group
from compiled_llm.journal import Journal, Replan
from compiled_llm.kv_cache import (
    DecodeBuffers,
    allocate_pages,
    bucket_for,
    buckets_up_to,
    pages_to_allocate,
    reserved_bytes,
)
from compiled_llm.layers import Layer, inner_hooks
from compiled_llm.page_table import PageCopy, PagePool, Row, Span, Stored, build_table
from compiled_llm.plan import Planner, attention_groups
from compiled_llm.progress import ProgressDisplay
from compiled_llm.sampler import Sampler
from compiled_llm.staging import Staging
from compiled_llm_ops import PageTable

if TYPE_CHECKING:
    from compiled_llm.runner import Runner

logger = logging.getLogger("compiled_llm.graphs")

# Cudagraph trees run a new shape once as it is, record it on the second call and replay it from the third.
_CALLS_TO_RECORD = 3
# Rows of two tokens, and tokens whose logits are kept, that prefill may be compiled with.
_PREFILL_SIZES = ((3, 5), (10, 13))


class Extension(NamedTuple):
    """New tokens of one row.

    Attributes:
        row: already grown by them.
        ids: ``[Q]`` int64.
        positions: ``[Q]`` int64, rotary positions.
    """

    row: Stored
    ids: NDArray[np.int64]
    positions: NDArray[np.int64]


class PagedModel:
    """What a ``Runner`` drives: packed prefill, and decode steps over fixed buffers."""

    def __init__(
        self,
        model: PreTrainedModel,
        forward: Forward,
        layers: Sequence[Layer],
        config: WrapConfig,
        switch: AttentionSwitch,
        thread: Executor,
        journal: Journal | None = None,
        groups: Sequence[Group] = (),
    ) -> None:
        """Allocate pages and buffers; nothing is compiled yet.

        Args:
            model: the model; only a weak reference is kept.
            forward: its class's own ``forward``.
            layers: its attention layers.
            config: the options of ``wrap``.
            switch: points the model's attention at the pages.
            thread: where everything here runs.
            journal: what to note things in.
            groups: its linear layers that read one input.

        Raises:
            ValueError: not even one page fits into the memory allowed.
        """
        self.config = config
        self.device = model.device
        self.fits = self.fingerprint(model)
        self.thread = thread
        self.journal = Journal() if journal is None else journal
        self._model = weakref.ref(model)
        self._switch = switch
        self.max_positions = max_positions_of(model)
        with switch.paged(thread.caller):  # nobody else computes with the weights meanwhile
            self.weights = FusedWeights(model, groups if config.fuses_on(self.device.type) else [])
        count = pages_to_allocate(config, layers, model.dtype, self.device, self.max_positions)
        with torch.inference_mode(False):
            self.pages = allocate_pages(count, layers, config.page_size, model.dtype, self.device)
            entries = config.max_batch_size * (-(-self.max_positions // config.page_size) + 1)
            self.buffers = DecodeBuffers(config.max_batch_size, entries, self.device)
            self._prefill_indices = torch.zeros(entries, dtype=torch.int32, device=self.device)
        self.pool = PagePool(count, config.page_size)
        self._head_dims = [layer.head_dim for layer in layers]
        self.staging = Staging(self.device)
        self.planner = Planner(
            attention_groups(layers, config.page_size, model.dtype, self.device), config, self.device
        )
        self._forward = forward
        self.programs = Programs(config, forward, self.device, self.weights)
        self.cudagraph_skips = 0
        self.cudagraph_reasons: list[str] = []
        self._recordings_before = cudagraph_recordings(self.device)
        self._recordings_meant = 0
        self._addresses: dict[str, dict[str, int]] = {}
        self._progress = ProgressDisplay(config.progress)
        self._ready: set[int | str] = set()
        self._sampler: Sampler | None = None
        self._sampling_ready: set[int] = set()
        self._graph_bytes = 0
        self._owner: weakref.ref[Runner] | None = None

    @staticmethod
    def fingerprint(model: PreTrainedModel) -> tuple[Hashable, ...]:
        """Return what must not change: where the model is, of what type, and the hooks compiled into its graphs."""
        return model.device, model.dtype, inner_hooks(model)

    def is_of(self, model: PreTrainedModel) -> bool:
        """Whether this is the device side of ``model``."""
        return self._model() is model

    @property
    def vocabulary(self) -> int:
        """How many token ids the model can take."""
        return cast(nn.Embedding, self._require_model().get_input_embeddings()).num_embeddings

    # ---- weights that are multiplied as one

    def _check_weights(self) -> None:
        """See that fused weights lie as the programs read them; those that cannot any more are compiled apart."""
        if self.weights.intact():
            return
        with self._switch.paged(self.thread.caller):
            restored = self.weights.restore()
        if not restored:
            self.journal.started_anew()
            self._start_anew()

    def separate_weights(self) -> None:
        """Give each fused weight memory of its own again."""
        if self.weights.groups:
            with self._switch.paged(self.thread.caller):
                self.weights.separate()
            self._start_anew()

    def _start_anew(self) -> None:
        """Forget what was compiled and recorded; rows and pages stay."""
        self.programs = Programs(self.config, self._forward, self.device, self.weights)
        self._ready.clear()
        self._sampling_ready.clear()

    # ---- readiness: compile and record on null rows, never on somebody's tokens

    @property
    def ready_buckets(self) -> list[int]:
        """The decode buckets that are compiled, and on CUDA recorded."""
        return sorted(bucket for bucket in self._ready if isinstance(bucket, int))

    def make_prefill_ready(self, embedded: bool = False, waiting: int = 0) -> None:
        """Compile prefill, if it is not compiled yet.

        Args:
            embedded: the one that reads embeddings in place of token ids.
            waiting: how many rows a call has that waits for it.
        """
        self._check_weights()
        program = PREFILL_EMBEDDED if embedded else PREFILL
        if program in self._ready:
            return
        with self._preparing(program, waiting):
            rows, kept = next(sizes for sizes in _PREFILL_SIZES if self._distinct(*_symbols(*sizes)))
            null = [_null_extension(2, self.config.page_size) for _ in range(rows)]
            embeddings = self._null_embeddings(2 * rows) if embedded else None
            logits, _ = self._run_prefill(null, np.zeros(kept, dtype=np.int64), embeddings)
            self._logits_width = logits.shape[-1]
        self._ready.add(program)

    def _null_embeddings(self, tokens: int) -> Tensor:
        model = self._require_model()
        width = cast(nn.Embedding, model.get_input_embeddings()).embedding_dim
        return torch.zeros(tokens, width, dtype=model.dtype, device=self.device)

    def _distinct(self, *sizes: int) -> bool:
        """Whether none of the sizes is P: Dynamo takes equal sizes at the first call for one symbol."""
        return self.pages[0].shape[0] not in sizes

    def make_decode_ready(self, bucket: int, waiting: int = 0) -> None:
        """Compile decode for the bucket and record its graph, if that has not happened yet.

        Args:
            bucket: B.
            waiting: how many rows a call has that waits for it.
        """
        self._check_weights()
        if bucket in self._ready:
            return
        self.claim(None)
        buckets = buckets_up_to(self.config.max_batch_size)
        if bucket > 1 and self.programs.decode_many_is_new and not self._distinct(bucket, bucket + 1):
            for other in buckets[1:]:
                if self._distinct(other, other + 1):
                    self.make_decode_ready(other)
                    break
        number = f" ({buckets.index(bucket) + 1} of {len(buckets)})"
        with self._preparing(f"decode bucket {bucket}", waiting, number), self._recording(f"decode bucket {bucket}"):
            for _ in range(_CALLS_TO_RECORD if self.programs.recorded else 1):
                self.upload([], bucket, None, "a bucket was prepared")
                self.run_decode(bucket)
        if self.programs.recorded:
            self.planner.freeze(bucket)
        self._ready.add(bucket)

    @property
    def sampler(self) -> Sampler:
        """What chooses the tokens of sampled rows; allocated at the first call, after prefill is ready."""
        if self._sampler is None:
            self._sampler = Sampler(
                self.config, self._logits_width, self.staging, self.device, cudagraphs=self.programs.recorded
            )
        return self._sampler

    def make_sampling_ready(self, bucket: int, waiting: int = 0) -> None:
        """Compile the choosing of tokens for the bucket and record it, if that has not happened yet.

        Args:
            bucket: B.
            waiting: how many rows a call has that waits for it.
        """
        self.make_decode_ready(bucket, waiting)
        if bucket in self._sampling_ready:
            return
        self.claim(None)
        what = f"sampling for bucket {bucket}"
        with self._preparing(what, waiting), self._recording(what):
            for _ in range(_CALLS_TO_RECORD if self.programs.recorded else 1):
                self.upload([], bucket, None, "a bucket was prepared")
                self.sampler.seat([], bucket)
                self.sampler.choose_next(self.run_decode(bucket), self.buffers.bucket(bucket))
        self._sampling_ready.add(bucket)

    def memory(self) -> dict[str, int]:
        """Return where device memory went, in bytes."""
        model = self._require_model()
        weights = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
        tables = () if self._sampler is None else self._sampler.tables
        return {
            "weights": sum(weights.values()),
            "pages": sum(pages.nbytes for pages in self.pages),
            "workspace": self.planner.workspace_bytes,
            "buffers": self.buffers.nbytes + self._prefill_indices.nbytes + sum(table.nbytes for table in tables),
            "graphs": self._graph_bytes,
        }

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return what is compiled, by name."""
        functions = self.programs.functions
        return functions if self._sampler is None else functions | self._sampler.functions

    def graph_counts(self) -> dict[str, int]:
        """Return how many graphs each program has been compiled into; more than one is a recompile."""
        counts = self.programs.graph_counts()
        return counts if self._sampler is None else counts | self._sampler.graph_counts()

    @contextmanager
    def _preparing(self, what: str, waiting: int, number: str = "") -> Iterator[None]:
        """Show what the block prepares, and note it where a call of ``waiting`` rows waits for it."""
        start = time.perf_counter()
        with self._progress.task(self._what(what + number)):
            yield
        if waiting:
            sampling = " with sampling=True" if "sampling" in what else ""
            cause = None if what == PREFILL_EMBEDDED else f"warmup did not name a batch size of {waiting}{sampling}"
            self.journal.missed(what, waiting, time.perf_counter() - start, cause)

    @contextmanager
    def _recording(self, what: str) -> Iterator[None]:
        """Count what the block takes from the allocator for good, and what it was asked to record and did not."""
        nbytes, skips, recordings = reserved_bytes(self.device), cudagraph_skips(), self.recordings()
        with cudagraph_messages() as messages:
            yield
        self.cudagraph_reasons += messages
        logger.debug("graphs %s, %d recorded", self.graph_counts(), self.recordings())
        self._graph_bytes += max(0, reserved_bytes(self.device) - nbytes)
        self.cudagraph_skips += cudagraph_skips() - skips
        self._recordings_meant += self.recordings() - recordings
        if self.programs.recorded:
            self._addresses[what] = self._weight_addresses()

    def recordings(self) -> int:
        """Return how many CUDA graphs have been recorded."""
        return max(0, cudagraph_recordings(self.device) - self._recordings_before)

    def rerecordings(self) -> int:
        """Return how many CUDA graphs were recorded anew in the midst of steps: each had been recorded before."""
        return max(0, self.recordings() - self._recordings_meant)

    def moved_weights(self) -> list[str]:
        """Return the parameters and buffers that no longer lie where a CUDA graph was recorded to read them."""
        recorded = self._addresses.values()
        return [
            name
            for name, address in self._weight_addresses().items()
            if any(then.get(name, address) != address for then in recorded)
        ]

    def _weight_addresses(self) -> dict[str, int]:
        model = self._require_model()
        return {name: tensor.data_ptr() for name, tensor in (*model.named_parameters(), *model.named_buffers())}

    def _what(self, program: str) -> str:
        if self.config.mode == "eager":
            return f"preparing {program}"
        if self.device.type == "cuda":
            return f"building kernels, compiling and recording {program}"
        return f"compiling {program}"

    # ---- prefill and extend

    def prefill(
        self, batch: list[Extension], keep: NDArray[np.int64] | None, embeddings: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run new tokens of some rows, packed.

        Args:
            batch: at most ``max_batch_size`` rows, each already grown by its tokens.
            keep: ``[L]`` ascending, which packed tokens' logits are wanted; each row's last where None.
            embeddings: ``[T, hidden]``, what the model reads in place of the tokens' ids.

        Returns:
            ``[L, V]`` logits, and ``[L]`` int64, the most likely next tokens.
        """
        self.make_prefill_ready(embedded=embeddings is not None, waiting=len(batch))
        if embeddings is not None:
            embeddings = embeddings.detach().clone()  # whether it was made in inference mode would be compiled in
        if keep is None:
            keep = np.cumsum([len(extension.ids) for extension in batch]) - 1
        start, parts = 0, []
        for chunk in _chunks(batch, self.config.prefill_tokens, self.config.page_size):
            end = start + sum(len(extension.ids) for extension in chunk)
            part = None if embeddings is None else embeddings[start:end]
            parts.append(self._prefill_chunk(chunk, keep[(keep >= start) & (keep < end)] - start, part))
            start = end
        if len(parts) == 1:
            return parts[0]
        return torch.cat([logits for logits, _ in parts]), torch.cat([tokens for _, tokens in parts])

    def _prefill_chunk(
        self, batch: list[Extension], keep: NDArray[np.int64], embeddings: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        wanted = len(keep)
        # A symbolic size is at least 2.
        if len(batch) == 1:
            batch = [*batch, _null_extension(1, self.config.page_size)]
            embeddings = None if embeddings is None else torch.cat([embeddings, self._null_embeddings(1)])
        if wanted < 2:
            keep = np.concatenate([keep, np.zeros(2 - wanted, dtype=np.int64)])
        logits, tokens = self._run_prefill(batch, keep, embeddings)
        return logits[:wanted], tokens[:wanted]

    def _run_prefill(
        self, batch: list[Extension], keep: NDArray[np.int64], embeddings: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        queries = [len(extension.ids) for extension in batch]
        table = build_table([extension.row for extension in batch], queries, self.config.page_size, len(batch))
        starts = [extension.row.length - len(extension.ids) for extension in batch]
        token_rows = np.repeat(np.arange(len(batch), dtype=np.int32), queries)
        token_positions = np.concatenate(
            [np.arange(start, start + count, dtype=np.int32) for start, count in zip(starts, queries, strict=True)]
        )
        ids, positions, keeps, rows, cache_positions, qo_indptr, indptr, last_page_len = self.staging.to_device(
            [
                np.concatenate([extension.ids for extension in batch]),
                np.concatenate([extension.positions for extension in batch]),
                keep.astype(np.int64),
                token_rows,
                token_positions,
                table.qo_indptr,
                table.indptr,
                table.last_page_len,
            ]
        )
        self.staging.upload([(table.indices, self._prefill_indices)])
        columns = PageTable(qo_indptr, indptr, self._prefill_indices, last_page_len)
        self.planner.plan_prefill(columns, table)
        packed = PagedBatch(self.pages, rows, cache_positions, *columns)
        with self._switch.paged(self.thread.caller):
            if embeddings is None:
                return self.programs.prefill(self._require_model(), ids[None], positions[None], keeps, packed)
            return self.programs.prefill_embedded(
                self._require_model(), embeddings[None], positions[None], keeps, packed
            )

    # ---- what lies in the pages

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy whole pages in all layers, in stream order."""
        columns = [np.array(column, dtype=np.int64) for column in zip(*copies, strict=True)]
        source, target = self.staging.to_device(columns)
        for pages in self.pages:
            pages.index_copy_(0, target, pages.index_select(0, source))

    def read(self, layer: int, row: Row) -> Tensor:
        """Return ``[2, K, length, D]``, a copy of a row's keys and values in one layer."""
        (indices,) = self.staging.to_device([np.array(row.pages, dtype=np.int64)])
        pages = self.pages[layer].index_select(0, indices)
        tokens = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)
        return tokens[:, :, : row.length, : self._head_dims[layer]]

    # ---- decode

    def claim(self, runner: Runner | None) -> None:
        """Hand the decode buffers to ``runner``; whoever had them takes its tokens out first."""
        owner = self._owner() if self._owner is not None else None
        if owner is not None and owner is not runner:
            owner.unseat()
        self._owner = None if runner is None else weakref.ref(runner)

    def owned_by(self, runner: Runner) -> bool:
        """Whether the decode buffers hold this runner's rows."""
        return self._owner is not None and self._owner() is runner

    def upload(self, rows: Sequence[Row], bucket: int, tokens: Tensor | None, cause: Replan) -> None:
        """Put rows, already grown by the token they are about to feed, into the decode buffers, and plan.

        Args:
            rows: the rows; the rest of the bucket becomes null rows.
            bucket: B.
            tokens: ``[len(rows)]`` int64 on the device, what the rows feed in; None leaves it as it is.
            cause: why.
        """
        inputs = self.buffers.bucket(bucket)
        table = build_table(rows, [1] * len(rows), self.config.page_size, bucket)
        positions = np.zeros(bucket, dtype=np.int64)
        positions[: len(rows)] = [row.position for row in rows]
        self.staging.upload(
            [
                (positions, inputs.positions),
                (table.last_page_len - 1, inputs.last_page_len),
                (table.indptr, inputs.indptr),
                (table.indices, inputs.indices),
            ]
        )
        if tokens is not None:
            inputs.tokens[: len(rows)].copy_(tokens)
        self.planner.plan_decode(inputs, table)
        self.journal.replans[cause] += 1

    def run_decode(self, bucket: int) -> Tensor:
        """Run one decode step over what lies in the buffers; returns ``[B, V]`` logits, overwritten by the next."""
        with self._switch.paged(self.thread.caller):
            return self.programs.decode(self._require_model(), self.buffers.bucket(bucket), self.pages)

    def bucket_for(self, rows: int) -> int:
        """Return the smallest bucket that holds ``rows``."""
        return bucket_for(rows, self.config.max_batch_size)

    def _require_model(self) -> PreTrainedModel:
        model = self._model()
        if model is None:
            raise RuntimeError("the model of this cache or runner no longer exists")
        return model


def _symbols(rows: int, kept: int) -> tuple[int, ...]:
    """Return B, B + 1, T and L of a prefill of ``rows`` rows of two tokens."""
    return rows, rows + 1, 2 * rows, kept


def max_positions_of(model: PreTrainedModel) -> int:
    """Return how many positions the model was made for."""
    return int(getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", 2**17))


def _chunks(batch: list[Extension], most: int, page_size: int) -> Iterator[list[Extension]]:
    """Cut packed tokens into pieces of at most ``most``; a row that is cut attends to its earlier pieces in pages."""
    chunk: list[Extension] = []
    room = most
    for extension in batch:
        start, count = 0, len(extension.ids)
        while start < count:
            stop = min(count, start + room)
            chunk.append(_part(extension, start, stop, page_size))
            room -= stop - start
            start = stop
            if room == 0:
                yield chunk
                chunk, room = [], most
    if chunk:
        yield chunk


def _part(extension: Extension, start: int, stop: int, page_size: int) -> Extension:
    """Return tokens ``start`` to ``stop`` of an extension, with the row as it is once they are stored."""
    if (start, stop) == (0, len(extension.ids)):
        return extension
    length = extension.row.length - len(extension.ids) + stop
    row = Span(extension.row.pages[: -(-length // page_size)], length)
    return Extension(row, extension.ids[start:stop], extension.positions[start:stop])


def _null_extension(length: int, page_size: int) -> Extension:
    return Extension(Span.null(length, page_size), np.zeros(length, np.int64), np.arange(length, dtype=np.int64))
