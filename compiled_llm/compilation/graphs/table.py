"""The table of CUDA graphs: a row for each present or former one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from compiled_llm.compilation.graphs.step_key import Phase

StepState = Literal["missing", "compiled", "capturing", "ready", "stale", "failed", "evicted"]
"""The state of a step."""
# missing: nothing; its program may have to be compiled before it runs.
# compiled: it can be launched kernel by kernel. Where nothing is captured, that is all there is to it.
# capturing: its CUDA graph is being captured, in slices between other steps.
# ready: it has a CUDA graph, which is replayed once the model is known to be the same.
# stale: its graph was dropped, since the model, or the memory that the graph reads, had changed.
# failed: it could not be captured, in several attempts; only ``warmup`` tries again.
# evicted: its graph has made room for others, or has found none.


@dataclass(frozen=True)
class CudaGraphRow:
    """One CUDA graph, at one moment.

    Attributes:
        phase: prefill, decode, and so on.
        tokens: how many it computes, padding included.
        rows: how many of them sample a token, padding included.
        variant: of a prefill how the backend divides it, of a sampling step 1 if it writes masks first; else 0.
        states: whether it gives hidden states, too, or vectors of prompts alone.
        state: ready if it can be replayed; else missing, compiled, capturing, stale (dropped, since the model has
            changed), failed, or evicted (it has made room for others).
        nbytes: device memory that it takes in addition to the shared part, and gives back; 0 unless it is ready.
        captures: how often it was captured.
        evictions: how often it had to make room for others, or found none.
        replays: how often it ran, over all its captures.
        misses: how often a step needed it and it was not ready: it ran in a larger one, or kernel by kernel.
        padded: how many of the misses ran in a larger one.
        failures: how often it could not be captured.
        idle_seconds: since it was last captured or replayed.
        capture_seconds: how long its captures took together.
    """

    phase: Phase
    tokens: int
    rows: int
    variant: int
    states: bool
    state: StepState
    nbytes: int
    captures: int
    evictions: int
    replays: int
    misses: int
    padded: int
    failures: int
    idle_seconds: float
    capture_seconds: float

    @property
    def ready(self) -> bool:
        return self.state == "ready"


@dataclass(frozen=True)
class CudaGraphTable:
    """All CUDA graphs of a model, those that were evicted too; ``str`` shows them.

    Attributes:
        rows: decode steps by size, then prefills, then sampling steps.
        nbytes: device memory that all take now.
        shared_bytes: the part of it that they share: activations, logits and tokens.
        limit: what ``nbytes`` may be; None for any.
        max_graphs: how many may be ready; None for any number.
    """

    rows: Sequence[CudaGraphRow] = ()
    nbytes: int = 0
    shared_bytes: int = 0
    limit: int | None = None
    max_graphs: int | None = None

    def __iter__(self) -> Iterator[CudaGraphRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def as_dicts(self) -> list[dict[str, object]]:
        """Return the rows as data."""
        return [{**asdict(row), "ready": row.ready} for row in self.rows]

    @property
    def ready(self) -> int:
        """How many CUDA graphs can be replayed."""
        return sum(row.ready for row in self.rows)

    @property
    def captures(self) -> int:
        """How many graphs were captured."""
        return sum(row.captures for row in self.rows)

    @property
    def evictions(self) -> int:
        """How many had to make room for others."""
        return sum(row.evictions for row in self.rows)

    @property
    def misses(self) -> int:
        """How often a step needed one that was not ready."""
        return sum(row.misses for row in self.rows)

    @property
    def padded(self) -> int:
        """How many of the misses ran in a larger one."""
        return sum(row.padded for row in self.rows)

    @property
    def failures(self) -> int:
        """How often one could not be captured."""
        return sum(row.failures for row in self.rows)

    def __str__(self) -> str:
        """The rows under their headings, and their totals."""
        lines = [_HEADINGS, *map(_cells, self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        shown = ["  ".join(map(_aligned, line, widths)).rstrip() for line in lines] if self.rows else []
        return "\n".join([*shown, self._summary()])

    def _summary(self) -> str:
        most = "" if self.max_graphs is None else f" of at most {self.max_graphs}"
        limit = "" if self.limit is None else f" of at most {mib(self.limit)}"
        memory = f"{mib(self.nbytes)}{limit}, {mib(self.shared_bytes)} of them shared"
        counts = f"{self.captures} captures, {self.evictions} evictions, {self.misses} misses"
        padded = f" ({self.padded} of them ran in larger ones)" if self.padded else ""
        failures = f", {self.failures} failures" if self.failures else ""
        return f"{self.ready} ready{most}; {memory}; {counts}{padded}{failures}"


_HEADINGS = (
    "phase",
    "tokens",
    "rows",
    "variant",
    "state",
    "memory",
    "captures",
    "evictions",
    "replays",
    "misses",
    "idle",
    "cost",
)


def _cells(row: CudaGraphRow) -> tuple[str, ...]:
    counts = (row.captures, row.evictions, row.replays, row.misses)
    sizes = (row.tokens, row.rows, row.variant)
    memory = mib(row.nbytes) if row.ready else ""
    times = (f"{row.idle_seconds:.1f} s", f"{row.capture_seconds:.2f} s")
    phase = f"{row.phase}, hidden states" if row.states else row.phase
    return (phase, *map(str, sizes), row.state, memory, *map(str, counts), *times)


def _aligned(cell: str, width: int) -> str:
    return cell.rjust(width) if cell[:1].isdigit() else cell.ljust(width)


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"
