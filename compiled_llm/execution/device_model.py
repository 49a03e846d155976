"""A model's device side: pages, buffers, plans and programs, and who is in the decode buffers at the moment.

Everything here runs in the model's executor.

Shapes: B rows, T packed tokens, L tokens whose logits are wanted, C of them after which a token is chosen, V
vocabulary, S page size.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from compiled_llm.compilation.graphs.recordings import Key, Recordings, Step, StepInputs
from compiled_llm.compilation.graphs.validity import Guards
from compiled_llm.compilation.inputs import PrefillInputs, Shape
from compiled_llm.compilation.programs import PREFILL, PREFILL_EMBEDDED, Programs
from compiled_llm.config import WrapConfig
from compiled_llm.execution.decode_buffers import DecodeBuffers, bucket_for, buckets_up_to
from compiled_llm.execution.events import Journal, Upload
from compiled_llm.execution.packing import (
    Extension,
    Packed,
    as_bytes,
    chunks,
    null_extension,
    pack,
    padded,
    token_count,
)
from compiled_llm.execution.prefill_plans import Planner, attention_groups
from compiled_llm.execution.progress import ProgressDisplay
from compiled_llm.execution.recorded_shapes import RecordedShapes
from compiled_llm.execution.sampling_slots import Sampler
from compiled_llm.execution.staging import Readbacks, Staging
from compiled_llm.execution.threads.executor import Executor
from compiled_llm.kvcache.memory import allocate_pages, pages_to_allocate
from compiled_llm.kvcache.pool import PagePool
from compiled_llm.kvcache.row import PageCopy, Row
from compiled_llm.kvcache.table import HostTable, build_table
from compiled_llm.model.facts import ModelFacts
from compiled_llm.model.fused_weights import FusedWeights
from compiled_llm.model.layer_probe import Layer
from compiled_llm.model.sizes import logits_width, max_positions_of, weights_of_a_layer
from compiled_llm_ops import PageTable

if TYPE_CHECKING:
    from compiled_llm.execution.runner import Runner

logger = logging.getLogger("compiled_llm.uploads")

# Cudagraph trees run a new shape once as it is, record it on the second call and replay it from the third.
_CALLS_TO_RECORD = 3
# Rows, and tokens whose logits are kept, that prefill may be compiled with.
_PREFILL_SIZES = ((3, 5), (10, 13))
# Inductor's tilings for CUDA follow from the sizes that it compiles with and from timing its kernels there, so there
# should be many tokens; but from so many results for each multiprocessor on, it loops over what is summed.
_RESULTS_THAT_LOOP = 64


class PagedModel:
    """What a ``Runner`` drives: packed prefill, and decode steps over fixed buffers."""

    def __init__(
        self,
        facts: ModelFacts,
        config: WrapConfig,
        thread: Executor,
        journal: Journal | None = None,
    ) -> None:
        """Allocate pages and buffers; nothing is compiled yet.

        Args:
            facts: what is known of the model.
            config: the options of ``wrap``.
            thread: where everything here runs.
            journal: what to note things in.

        Raises:
            ValueError: not even one page fits into the memory allowed.
        """
        model, layers = facts.model, facts.layers
        self.config = config
        self.device = model.device
        self.thread = thread
        self.journal = Journal() if journal is None else journal
        self._facts = facts
        self.max_positions = max_positions_of(model)
        with facts.attention.paged(thread.caller):  # nobody else computes with the weights meanwhile
            self.weights = FusedWeights(model, facts.fused_groups if config.fuses_on(self.device.type) else [])
        count = pages_to_allocate(config, layers, model.dtype, self.device, self.max_positions)
        with torch.inference_mode(False):
            self.pages = allocate_pages(count, layers, config.page_size, model.dtype, self.device)
            entries = config.max_batch_size * (-(-self.max_positions // config.page_size) + 1)
            self.buffers = DecodeBuffers(config.max_batch_size, entries, self.device)
            self._prefill_indices = torch.zeros(entries, dtype=torch.int32, device=self.device)
        self._packed: dict[Shape, Tensor] = {}  # what recorded prefills begin with
        self.pool = PagePool(count, config.page_size)
        self._head_dims = [layer.head_dim for layer in layers]
        self._typical_tokens = _typical_tokens(layers, self.device)
        self.staging = Staging(self.device)
        self.readbacks = Readbacks(self.device)
        self._shapes = RecordedShapes(config.max_batch_size, weights_of_a_layer(model, len(layers)))
        self.planner = Planner(
            attention_groups(layers, config.page_size, model.dtype, self.device),
            config,
            self.device,
            self.max_positions,
            self._shapes.all() if config.records_on(self.device.type) else [],
        )
        self.planner.load()
        self.programs = Programs(config, facts.forward, self.device, self.weights)
        self.recordings = Recordings(model, config, self.device)
        self._progress = ProgressDisplay(config.progress)
        self._ready: set[int | str] = set()
        # How often the model has been looked at, and which recordings' guards have held since the last time.
        self._glance = 0
        self._held: set[Key] = set()
        self._sampler: Sampler | None = None
        self._owner: weakref.ref[Runner] | None = None

    def is_of(self, model: PreTrainedModel) -> bool:
        """Whether this is the device side of ``model``."""
        return self._facts.reference() is model

    @property
    def vocabulary(self) -> int:
        """How many token ids the model can take."""
        return cast(nn.Embedding, self._facts.model.get_input_embeddings()).num_embeddings

    # ---- weights that are multiplied as one

    def _check_weights(self) -> None:
        """Drop what was recorded of weights that are no longer there; compile apart what can no longer be fused."""
        self._glance += 1
        self._held.clear()
        if self._sampler is not None:
            self._sampler.fit(logits_width(self._facts.model))
        if self.recordings.weights_hold():  # those that are multiplied as one, too
            return
        if self.recordings:
            self._ready -= self.recordings.forget()
        if self.weights.intact():
            return
        with self._facts.attention.paged(self.thread.caller):
            restored = self.weights.restore()
        if not restored:
            self.journal.started_anew()
            self._start_anew()

    def separate_weights(self) -> None:
        """Give each fused weight memory of its own again."""
        if self.weights.groups:
            with self._facts.attention.paged(self.thread.caller):
                self.weights.separate()
            self._start_anew()

    def _start_anew(self) -> None:
        """Forget what was compiled and recorded; rows and pages stay."""
        self.programs = Programs(self.config, self._facts.forward, self.device, self.weights)
        self.recordings.forget()
        self._ready.clear()

    # ---- readiness: compile and record on null rows, never on somebody's tokens

    @property
    def ready_buckets(self) -> list[int]:
        """The decode buckets that are compiled, and on CUDA recorded."""
        return sorted(bucket for bucket in self._ready if isinstance(bucket, int))

    def is_ready(self, bucket: int) -> bool:
        """Whether a decode bucket is compiled, and on CUDA recorded."""
        return bucket in self._ready

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
            rows, length, kept = self._prefill_sizes()
            null = [null_extension(length, self.config.page_size)] * rows
            embeddings = self._null_embeddings(length * rows) if embedded else None
            slots = self.sampler.slots([], kept - 1)
            self._launch_prefill(self._laid_out(null, np.zeros(kept, dtype=np.int64), slots, embeddings))
        self._ready.add(program)

    def _prefill_sizes(self) -> tuple[int, int, int]:
        """Return rows, tokens of each, and tokens whose logits are kept, to compile prefill with."""
        most, page_size = min(self._typical_tokens, self.max_positions), self.config.page_size
        sizes = ((rows, max(2, most // rows // page_size * page_size), kept) for rows, kept in _PREFILL_SIZES)
        return next(candidate for candidate in sizes if self._distinct(*_symbols(*candidate)))

    def _null_embeddings(self, tokens: int) -> Tensor:
        model = self._facts.model
        width = cast(nn.Embedding, model.get_input_embeddings()).embedding_dim
        return torch.zeros(tokens, width, dtype=model.dtype, device=self.device)

    def _distinct(self, *sizes: int) -> bool:
        """Whether none of the sizes is P: Dynamo takes equal sizes at the first call for one symbol."""
        return self.pages[0].shape[0] not in sizes

    def make_decode_ready(self, bucket: int, waiting: int = 0, unchanged: bool = False) -> None:
        """Compile decode for the bucket and record its graph, if that has not happened yet or no longer holds.

        Args:
            bucket: B.
            waiting: how many rows a call has that waits for it.
            unchanged: the model cannot have changed since the last prefill or the last call without this.
        """
        if unchanged and bucket in self._ready and bucket in self._held:
            return
        if not (unchanged and bucket in self._ready):
            self._check_weights()
        if bucket in self._ready and self._holds(bucket):
            return
        self.claim(None)
        buckets = buckets_up_to(self.config.max_batch_size)
        if bucket > 1 and self.programs.decode_many_is_new and not self._distinct(bucket, bucket + 1):
            for other in buckets[1:]:
                if self._distinct(other, other + 1):
                    self.make_decode_ready(other)
                    break
        what, number = f"decode bucket {bucket}", f" ({buckets.index(bucket) + 1} of {len(buckets)})"
        waiting = 0 if self.recordings.lost(bucket) else waiting
        with self._preparing(what, waiting, number), self.recordings.accounted(what):
            for _ in range(_CALLS_TO_RECORD if self.programs.recorded else 1):
                self.upload([], bucket, None, "a bucket was prepared")
                self._launch_decode(bucket)
            if self.recordings.own:
                self._record(bucket, lambda: self._launch_decode(bucket), self.buffers.bucket(bucket))
        self._ready.add(bucket)

    @property
    def sampler(self) -> Sampler:
        """How rows choose their tokens; allocated at the first call."""
        if self._sampler is None:
            self._sampler = Sampler(self.config.max_batch_size, logits_width(self._facts.model), self.device)
        return self._sampler

    def _record(self, key: Key, launch: Callable[[], Step], inputs: StepInputs) -> None:
        """Record a step that has run before."""
        model = self._facts.model

        def guards() -> Guards:
            with self._facts.attention.paged(self.thread.caller):
                return self.programs.guards(model, inputs, self.sampler.tables, self.pages)

        self.recordings.record(key, launch, inputs, guards)

    def _holds(self, key: Key) -> bool:
        """Whether a step, if it is recorded, may still be replayed; if not, all recordings are forgotten.

        The weights have been looked at.
        """
        if key in self.recordings:
            with self._facts.attention.paged(self.thread.caller):
                holds = self.recordings.guards_hold(key, self._glance)
            if not holds:
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)  # a replay that found this out late may be running
                self._held.clear()
                self._ready -= self.recordings.forget()
                self.programs.drop_tensors()
                return False
        self._held.add(key)
        return True

    def memory(self) -> dict[str, int]:
        """Return where device memory went, in bytes."""
        model = self._facts.model
        weights = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
        tables = 0 if self._sampler is None else self._sampler.nbytes
        return {
            "weights": sum(weights.values()),
            "pages": sum(pages.nbytes for pages in self.pages),
            "workspace": self.planner.workspace_bytes,
            "buffers": self.buffers.nbytes + self._prefill_indices.nbytes + tables,
            "graphs": self.recordings.nbytes,
        }

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return what is compiled, by name."""
        return self.programs.functions

    def graph_counts(self) -> dict[str, int]:
        """Return how many graphs each program has been compiled into; more than one is a recompile."""
        return self.programs.graph_counts()

    @contextmanager
    def _preparing(self, what: str, waiting: int, number: str = "") -> Iterator[None]:
        """Show what the block prepares, and note it where a call of ``waiting`` rows waits for it."""
        start = time.perf_counter()
        with self._progress.task(self._what(what + number)):
            yield
        if waiting:
            cause = None if what == PREFILL_EMBEDDED else f"warmup did not name a batch size of {waiting}"
            self.journal.missed(what, waiting, time.perf_counter() - start, cause)

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
        slots = self.sampler.slots([], 0)
        if keep is None:
            keep = np.cumsum([len(extension.ids) for extension in batch]) - 1
            slots = self.sampler.slots([cast(Row, extension.row) for extension in batch], len(batch))
        start, parts = 0, []
        for chunk in chunks(batch, self.config.prefill_tokens, self.config.page_size):
            end = start + sum(len(extension.ids) for extension in chunk)
            inside = (keep >= start) & (keep < end)
            part = None if embeddings is None else embeddings[start:end]
            parts.append(self._prefill_chunk(chunk, keep[inside] - start, slots[inside] if len(slots) else slots, part))
            start = end
        if len(parts) == 1:
            return parts[0]
        return torch.cat([logits for logits, _ in parts]), torch.cat([tokens for _, tokens in parts])

    def _prefill_chunk(
        self,
        batch: list[Extension],
        keep: NDArray[np.int64],
        slots: NDArray[np.int64],
        embeddings: Tensor | None,
    ) -> Step:
        """Run one chunk; ``slots`` ``[C]`` are those of the rows that end in it, or there are none."""
        wanted, chosen = len(keep), len(slots)
        shape = self._shape_to_replay(batch, keep, slots, embeddings)
        if shape is not None:
            if shape not in self.recordings:
                self.make_prefills_recorded([shape], waiting=len(batch))
            logits, tokens = self._replay_prefill(shape, batch, keep, slots)
            return logits[:wanted].clone(), tokens[:chosen].clone()  # the next replay overwrites them
        # A symbolic size is at least 2.
        if len(batch) == 1:
            batch = [*batch, null_extension(1, self.config.page_size)]
            embeddings = None if embeddings is None else torch.cat([embeddings, self._null_embeddings(1)])
        if wanted < 2:
            keep = np.concatenate([keep, np.zeros(2 - wanted, dtype=np.int64)])
        if chosen < 2:
            slots = np.concatenate([slots, self.sampler.slots([], 2 - chosen)])
        logits, tokens = self._launch_prefill(self._laid_out(batch, keep, slots, embeddings))
        return logits[:wanted], tokens[:chosen]

    def _laid_out(
        self,
        batch: list[Extension],
        keep: NDArray[np.int64],
        slots: NDArray[np.int64],
        embeddings: Tensor | None,
    ) -> PrefillInputs:
        """Return a prefill in new tensors on the device, planned."""
        packed, table = pack(batch, keep, slots, self.config.page_size)
        inputs = self._prefill_inputs(self.staging.to_device(packed))
        if embeddings is not None:
            inputs = inputs._replace(ids=embeddings[None])
        self.staging.upload([(table.indices, self._prefill_indices)])
        self.planner.plan_prefill(_columns(inputs), table)
        return inputs

    def _prefill_inputs(self, columns: Sequence[Tensor]) -> PrefillInputs:
        """Return device tensors, in the order of ``Packed``, as the program takes them."""
        named = Packed(*columns)._asdict()  # type: ignore[arg-type]
        named |= {"ids": named["ids"][None], "positions": named["positions"][None]}
        return PrefillInputs(indices=self._prefill_indices, **named)

    def _launch_prefill(self, inputs: PrefillInputs) -> Step:
        with self._facts.attention.paged(self.thread.caller):
            return self.programs.prefill(self._facts.model, inputs, self.sampler.tables, self.pages)

    # ---- recorded prefill

    def recorded_shapes(self, rows: int) -> list[Shape]:
        """Return the shapes that prefills of so many rows are padded to and recorded in, smallest first."""
        both = [shape._replace(split=split) for shape in self._shapes.of(rows) for split in (False, True)]
        return [shape for shape in both if self.planner.fits(shape)]

    def make_prefills_recorded(self, shapes: Sequence[Shape], waiting: int = 0) -> None:
        """Record prefills of these shapes, those that are not recorded yet.

        Args:
            shapes: what they are padded to.
            waiting: how many rows a call has that waits for them.
        """
        new = [shape for shape in shapes if shape not in self.recordings]
        if not (self.recordings.own and new):
            return
        self.make_prefill_ready()
        largest = max(shape.tokens for shape in new)
        none = np.zeros(0, dtype=np.int64)
        waiting = 0 if all(map(self.recordings.lost, new)) else waiting
        with self._preparing(f"prefill of up to {largest} tokens", waiting):
            for shape in reversed(new):  # the largest first: what it leaves in the pool serves the others
                self._replay_prefill(shape, [], none, none)

    def _shape_to_replay(
        self,
        batch: Sequence[Extension],
        keep: NDArray[np.int64],
        slots: NDArray[np.int64],
        embeddings: Tensor | None,
    ) -> Shape | None:
        """Return the shape of a prefill that ends in one token a row, if it is one to record."""
        if not self.recordings.own or embeddings is not None or len(slots) != len(batch):
            return None
        shape = self._shapes.smallest(token_count(batch), len(batch))
        if shape is None:
            return None
        shape = shape._replace(split=self.planner.splits(batch))
        fits = shape in self.recordings or self.planner.fits(shape)
        return shape if fits else None  # larger ones fit even less

    def _replay_prefill(
        self, shape: Shape, batch: list[Extension], keep: NDArray[np.int64], slots: NDArray[np.int64]
    ) -> Step:
        """Run a prefill of at most ``shape``; the first one is launched kernel by kernel, and recorded."""
        missing = shape.rows - len(batch)
        keep = np.concatenate([keep, np.zeros(missing, dtype=np.int64)])
        slots = np.concatenate([slots, self.sampler.slots([], missing)])
        packed, table = pack(padded(batch, shape, self.config.page_size), keep, slots, self.config.page_size)
        if (recording := self.recordings.get(shape)) is not None:
            self._upload_prefill(cast(PrefillInputs, recording.inputs), packed, table, shape)
            result = recording.replay()
            # Looked at while the device computes. All it reads is there, since the weights are; and if it is not what
            # the model does now, all it writes is written anew.
            if self._holds(shape):
                return result
            self.sampler.restore(slots)
        inputs = self._prefill_inputs(self.staging.to_device(packed))
        (self._packed[shape],) = self.staging.to_device([as_bytes(packed)])
        self._upload_prefill(inputs, packed, table, shape)
        with self.recordings.accounted(f"prefill of {shape.tokens} tokens, {shape.rows} rows"):
            result = self._launch_unpacked(inputs, self._packed[shape])
            self._record(shape, lambda: self._launch_unpacked(inputs, self._packed[shape]), inputs)
        self.planner.freeze_prefill(shape)
        return result

    def _upload_prefill(self, inputs: PrefillInputs, packed: Packed, table: HostTable, shape: Shape) -> None:
        """Put a prefill where its graph reads it, and plan it."""
        self.staging.upload([(as_bytes(packed), self._packed[shape]), (table.indices, self._prefill_indices)])
        self.planner.plan_prefill(_columns(inputs), table, shape)

    def _launch_unpacked(self, inputs: PrefillInputs, packed: Tensor) -> Step:
        """Run a prefill that was uploaded in one: copies inside a graph take the host no time."""
        start = 0
        for name in Packed._fields:
            column = getattr(inputs, name).view(-1).view(torch.uint8)
            column.copy_(packed[start : start + len(column)])
            start += len(column)
        return self._launch_prefill(inputs)

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

    def upload(self, rows: Sequence[Row], bucket: int, tokens: Tensor | None, cause: Upload) -> None:
        """Put rows, already grown by the token they are about to feed, into the decode buffers.

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
                (table.last_page_len, inputs.last_page_len),
                (table.indptr, inputs.indptr),
                (table.indices, inputs.indices),
                (self.sampler.slots(rows, bucket), inputs.slots),
            ]
        )
        if tokens is not None:
            inputs.tokens[: len(rows)].copy_(tokens)
        self.journal.uploads[cause] += 1
        logger.debug("decode bucket %d: a table of %d pages uploaded, since %s", bucket, len(table.indices), cause)

    def run_decode(self, bucket: int) -> Step:
        """Run one decode step over what lies in the buffers.

        Returns:
            ``[B, V]`` logits, and ``[B]`` int64, the next tokens; both overwritten by the next step.
        """
        recording = self.recordings.get(bucket)
        return self._launch_decode(bucket) if recording is None else recording.replay()

    def _launch_decode(self, bucket: int) -> Step:
        with self._facts.attention.paged(self.thread.caller):
            return self.programs.decode(self._facts.model, self.buffers.bucket(bucket), self.sampler.tables, self.pages)

    def bucket_for(self, rows: int) -> int:
        """Return the smallest bucket that holds ``rows``."""
        return bucket_for(rows, self.config.max_batch_size)


def _symbols(rows: int, length: int, kept: int) -> tuple[int, ...]:
    """Return B, B + 1, T, L and C of a prefill of ``rows`` rows of ``length`` tokens."""
    return rows, rows + 1, length * rows, kept, kept - 1


def _typical_tokens(layers: Sequence[Layer], device: torch.device) -> int:
    """Return how many tokens prefill is best compiled with; 0 where that makes no difference."""
    if device.type != "cuda":
        return 0
    results = _RESULTS_THAT_LOOP * torch.cuda.get_device_properties(device).multi_processor_count
    return (results - 1) // max(layer.query_heads for layer in layers)


def _columns(inputs: PrefillInputs) -> PageTable:
    return PageTable(inputs.qo_indptr, inputs.indptr, inputs.indices, inputs.last_page_len)
