"""Counts calls by their paths, reasons for slower ones, steps and tokens."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from rich.table import Table

from compiled_llm.compat.forks import lock
from compiled_llm.compilation.graphs.table import mib
from compiled_llm.config import Mode
from compiled_llm.execution.reporting.plain_text import plain_text
from compiled_llm.execution.reporting.slow_paths import Reason
from compiled_llm.kvcache.pool import PageAccount, StateAccount

logger = logging.getLogger("compiled_llm.generate")

_OF_FORWARD = "forward: "

Path = Literal["fast loop", "engine", "processed loop", "compiled forward", "original"]
"""Our loop; an engine's batch; our loop with processors between steps; HuggingFace's, over ours or its forward."""

ForwardPath = Literal["compiled", "original", "outside"]
"""Our programs; HuggingFace's forward, called by us; or a call that passes us by, which we only notice."""


@dataclass(frozen=True)
class Stats:
    """A snapshot of one wrapped model's counters.

    Attributes:
        mode: that of ``wrap``, as the device runs it: ``"compile"`` on a CPU, unless it is ``"eager"``.
        device: where the model is.
        backend: whose kernels attend in prefill, which ``wrap(backend="auto")`` leaves to what is installed.
        generate_calls: calls of ``generate`` by the path they took, and managers of ``generate_batch`` by whose runs.
        forward_calls: calls of the model itself by ``compiled`` or ``original``; those that ``generate`` makes are
            not among them. ``outside``: calls of the module inside, ``model.model(...)``, and graphs that a
            ``torch.compile`` of yours has traced of the model, whose calls do not reach us.
        slow_paths: how often calls did not take the fast loop or the compiled forward, by the reason's id; for calls of
            the model itself the key begins with ``"forward: "``. ``execution/reporting/slow_paths.py`` says what to
            change.
        passed_over: what trainers have left on the model, known to do nothing to tokens: in how many calls of
            ``generate`` it was there, by where it is and whose.
        experts: how many layers have experts that our ops compute, as ``compiled_llm``, and how many have others, which
            HuggingFace's implementation computes, by the reason; empty for a model without.
        weights: how many linear layers have weights of 4 or 8 bits that another library has made, by their format and
            by whose kernels multiply them in our programs, with the reason if that is not ours; empty for a model
            without.
        steps: prefills and decode steps launched by our loops, the fast one and the processed one.
        cascade_steps: decode steps that read pages which rows share once.
        kv_saturated: with ``kv_dtype``, how many numbers of keys and values were too large for their scales, and were
            clamped on their way into the pages; those of padding, too.
        new_tokens: tokens that our loops have generated, over all rows; pads after the end of a row are not counted.
        generate_seconds: how long they took, prompts, streamers and criteria included, and compiling left out; of
            loops that ran at the same time, each second is counted once.
        uploads: page tables written into the decode buffers; between them steps only replay.
        graphs: graphs compiled: at most 3 (prefill, decode at batch 1, decode at larger batches), and 1 more once
            ``inputs_embeds`` were given, or shared pages are read once.
        compile_seconds: how long tracing, compiling, building kernels and capturing took, in ``warmup`` or in calls
            that waited for it.
        tracing_seconds: how much of that Dynamo took to trace graphs; what artifacts keep is not traced.
        programs: where each program comes from, by its name: ``kept`` if it runs as artifacts have it, ``traced`` or
            ``traced:`` and how the call differs from those that it was kept for, ``traced, not kept:`` and why no later
            process can take it, or ``given up:`` and why it was kept and is traced nevertheless.
        builds: with ``artifacts``, what had to be built nevertheless: ``graphs``, ``C++ kernels``, ``Triton kernels``
            and ``FlashInfer kernels``, the last two over the whole process since the model was wrapped; 0 of each if
            all is well. Empty without.
        graph_breaks: always 0: programs compile whole or raise.
        recompiles: graphs compiled again although they existed.
        uncompiled: prefills and decode steps that ran uncompiled, because torch had compiled their program as often as
            it does.
        cudagraph_skips: times Inductor did not capture a CUDA graph although it was asked to.
        cuda_graphs: those captured of decode steps, one for each batch size that is ready.
        prefill_cuda_graphs: those captured of prefills, one for each number of tokens and rows they are padded to;
            0 except in mode ``"cuda-graphs"``.
        patterns: on CUDA, how often decode programs had what our passes look for, ``rotary`` and ``norm``, and prefill
            programs, ``rotary in prefill``; 0 for all if the model writes them in another way, which makes its steps
            slower. With ``backend="flashinfer"`` there is no ``rotary``: in decode only our own attention takes that
            over.
        buckets: decode batch sizes that are ready.
        pages: the page account, or None while nothing is allocated.
        states: the account of states of rows; None if they have none, or while nothing is allocated.
        peak_pages: how many pages were used at one time, at most.
        page_size: tokens in a page.
        memory: bytes on the device: ``weights``, ``pages``, ``workspace`` (the backend's), ``buffers`` (page tables and
            sampling settings), ``graphs`` (what capturing CUDA graphs took from the allocator), with packed weights
            ``tables`` (what was made of their scales and zeros, if anything was), and after an engine's first image
            ``encoder_cache`` (what encoders have made of images), and where steps read these ``encoder_graphs``.
        cuda_graph_table: a dict for each CUDA graph that we have captured, those that were evicted too: the fields of
            ``CudaGraphRow``. ``model.compiled.cuda_graphs`` shows the same as a table.
    """

    mode: Mode = "cuda-graphs"
    device: str = "cpu"
    backend: str = ""
    generate_calls: dict[str, int] = field(default_factory=dict)
    forward_calls: dict[str, int] = field(default_factory=dict)
    slow_paths: dict[str, int] = field(default_factory=dict)
    passed_over: dict[str, int] = field(default_factory=dict)
    experts: dict[str, int] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    cascade_steps: int = 0
    kv_saturated: int = 0
    new_tokens: int = 0
    generate_seconds: float = 0.0
    uploads: int = 0
    graphs: int = 0
    compile_seconds: float = 0.0
    tracing_seconds: float = 0.0
    programs: dict[str, str] = field(default_factory=dict)
    builds: dict[str, int] = field(default_factory=dict)
    graph_breaks: int = 0
    recompiles: int = 0
    uncompiled: int = 0
    cudagraph_skips: int = 0
    cuda_graphs: int = 0
    prefill_cuda_graphs: int = 0
    patterns: dict[str, int] = field(default_factory=dict)
    buckets: list[int] = field(default_factory=list)
    pages: PageAccount | None = None
    states: StateAccount | None = None
    peak_pages: int = 0
    page_size: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    cuda_graph_table: list[dict[str, object]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float | None:
        """``new_tokens`` in each of ``generate_seconds``; None before the first."""
        return self.new_tokens / self.generate_seconds if self.new_tokens and self.generate_seconds else None

    def __str__(self) -> str:
        """A table, without rows that cannot be on this device."""
        table = Table(box=None, show_header=False, pad_edge=False)
        for name, value in self._rows():
            table.add_row(name, value)
        return plain_text(table)

    def _rows(self) -> Iterator[tuple[str, str]]:
        slow = {reason: count for reason, count in self.slow_paths.items() if not reason.startswith(_OF_FORWARD)}
        slow_forward = {reason: count for reason, count in self.slow_paths.items() if reason not in slow}
        yield "generate", _named(self.generate_calls) or "not called"
        yield from _slow_rows(slow)
        if self.forward_calls:
            yield "forward", _named(self.forward_calls)
            yield from _slow_rows(slow_forward)
        if self.passed_over:
            yield "passed over", "; ".join(f"{name} ({count} calls)" for name, count in self.passed_over.items())
        if self.experts:
            yield "experts", _named(self.experts)
        if self.weights:
            yield "packed weights", _named(self.weights)
        if self.pages is not None:
            if self._on_cuda:
                yield "attention", self.backend
            yield from self._step_rows()
            if self.mode != "eager":
                yield from self._graph_rows()
            yield "batch sizes", ", ".join(map(str, self.buckets)) or "none ready"
            yield from self._page_rows(self.pages)

    def _step_rows(self) -> Iterator[tuple[str, str]]:
        if (speed := self.tokens_per_second) is not None:
            yield "speed", f"{speed:,.1f} tokens/s: {self.new_tokens} new tokens in {self.generate_seconds:.2f} s"
        shared = f", {self.cascade_steps} of them read shared pages once" if self.cascade_steps else ""
        uploaded = f", page tables uploaded {self.uploads} times" if self._on_cuda else ""
        yield "steps", f"{self.steps}{shared}{uploaded}"

    def _graph_rows(self) -> Iterator[tuple[str, str]]:
        compiled = f"{self.graphs} graphs in {self.compile_seconds:.1f} s"
        yield "compiled", f"{compiled}, {self.graph_breaks} graph breaks, {self.recompiles} recompiles"
        if kept := [name for name, way in self.programs.items() if way == "kept"]:
            yield "kept programs", f"{', '.join(kept)}: not traced"
        for name, way in self.programs.items():
            if way.startswith("given up"):
                yield "traced again", f"{name}, {way}"
        if self.builds:
            built = {name: count for name, count in self.builds.items() if count}
            yield "artifacts", f"{_named(built) or 'nothing'} had to be built"
        if self.uncompiled:
            yield "uncompiled", f"{self.uncompiled} prefills and decode steps: torch compiles their programs no more"
        if self._on_cuda and self.mode != "compile":
            captured = f"{self.cuda_graphs} decode steps and {self.prefill_cuda_graphs} prefills captured"
            evicted = sum(cast(int, row["evictions"]) for row in self.cuda_graph_table)
            made_room = f", {evicted} made room for others" if evicted else ""
            yield "CUDA graphs", f"{captured}, {self.cudagraph_skips} skipped{made_room}"
        if self.patterns:
            yield "patterns", ", ".join(f"{count} {pattern}" for pattern, count in self.patterns.items())

    def _page_rows(self, pages: PageAccount) -> Iterator[tuple[str, str]]:
        cached = f", {pages.cached} cached" if pages.cached else ""
        tokens = pages.total * self.page_size
        if self.kv_saturated:
            yield "clamped", f"{self.kv_saturated} numbers of keys and values were too large for their scales"
        yield "pages", f"{pages.used} used, {self.peak_pages} at most{cached}, of {pages.total} ({tokens} tokens)"
        if (states := self.states) is not None:
            cached = f", {states.cached} cached" if states.cached else ""
            yield "states", f"{states.used} used{cached}, of {states.total}"
        for name, size in self.memory.items():
            if size:
                used = size * self.peak_pages / (pages.total + 1)  # the null page is not counted
                most = f", of which {mib(used)} were used at most" if name == "pages" else ""
                yield f"memory: {name}", f"{mib(size)}{most}"

    @property
    def _on_cuda(self) -> bool:
        return self.device.startswith("cuda")


def _named(calls: dict[str, int]) -> str:
    return ", ".join(f"{count} {path}" for path, count in calls.items())


def _slow_rows(reasons: dict[str, int]) -> Iterator[tuple[str, str]]:
    for reason, count in reasons.items():
        yield "", f"{count} on a slower path: {reason.removeprefix(_OF_FORWARD)}"


class Counters:
    """The counters of ``Stats``; safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = lock()
        self.generate_calls: Counter[str] = Counter()
        self.forward_calls: Counter[str] = Counter()
        self.slow_generates: Counter[Reason] = Counter()
        self.slow_forwards: Counter[Reason] = Counter()
        self.passed_over: Counter[str] = Counter()
        self.steps = 0
        self.tokens = 0

    def took(self, path: Path, reason: Reason | None = None) -> None:
        """Count one call of ``generate``; a reason for not taking the fast loop is logged the first time."""
        with self._lock:
            self.generate_calls[path] += 1
            if reason is not None:
                _count(self.slow_generates, "generate", path, reason)

    def took_request(self, reason: Reason, path: str = "the host looks at each token") -> None:
        """Count a request of an engine that takes a slower ``path``, and log the reason the first time."""
        with self._lock:
            _count(self.slow_generates, "an engine's request", path, reason)

    def took_part(self, reason: Reason, path: str) -> None:
        """Count a call of ``generate`` of which a part takes a slower ``path``; otherwise as ``took_request``."""
        with self._lock:
            _count(self.slow_generates, "a part of generate", path, reason)

    def took_forward(self, path: ForwardPath, reason: Reason | None = None) -> None:
        """Count one call of the model itself; a reason for not taking the compiled forward is logged the first time."""
        with self._lock:
            self.forward_calls[path] += 1
            if reason is not None:
                _count(self.slow_forwards, "forward", path, reason)

    def passed(self, names: Sequence[str]) -> None:
        """Count a call of ``generate``, or a manager of ``generate_batch``, that goes past what a trainer has left."""
        with self._lock:
            self.passed_over.update(names)

    @property
    def slow_paths(self) -> dict[str, int]:
        counts = Counter[str]()
        with self._lock:
            for reason, count in self.slow_generates.items():
                counts[reason.id] += count
            for reason, count in self.slow_forwards.items():
                counts[f"{_OF_FORWARD}{reason.id}"] += count
        return dict(counts)

    def add_steps(self, steps: int) -> None:
        with self._lock:
            self.steps += steps

    def add_tokens(self, tokens: int) -> None:
        with self._lock:
            self.tokens += tokens


def _count(reasons: Counter[Reason], call: str, path: str, reason: Reason) -> None:
    """Count a reason, and log it the first time."""
    reasons[reason] += 1
    if reasons[reason] == 1:
        said = "compiled_llm: %s takes a slower path (%s), because %s. %s (%s in docs/paths.md)"
        logger.warning(said, call, path, reason, reason.advice, reason.id)
