"""The compiled side of a wrapped model: its options, runner, locks and counters."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Any, Protocol

from compiled_llm.compat.forks import HomeProcess, in_forked_processes
from compiled_llm.compilation.artifacts.artifacts import Artifacts
from compiled_llm.compilation.artifacts.made_for import made_for
from compiled_llm.compilation.graphs.table import CudaGraphTable
from compiled_llm.config import KVScales, Mode, WrapConfig
from compiled_llm.execution.generate_loop import GenerateLoop
from compiled_llm.execution.lifecycle.runner_lifecycle import Holder, ModelRunnerLifecycle
from compiled_llm.execution.lifecycle.warmup import ProfilePath, Report, Sizes, Warmup, quiet
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.reporting.events import Events
from compiled_llm.execution.reporting.slow_paths import Reason
from compiled_llm.execution.reporting.stats import Counters, Stats
from compiled_llm.execution.threads.calls import Calls
from compiled_llm.execution.threads.loop_lock import LoopLock
from compiled_llm.kvcache.pool import PagePool
from compiled_llm.model.facts import ModelFacts
from compiled_llm.model.version.model_version import Placement


class RunningEngine(Holder, Protocol):
    """The part of an engine that other users of its model call."""

    def give_back(self, pages: int, rows: int, pool: PagePool) -> None:
        """Preempt requests until a pool no longer lacks so much; the caller holds the loop lock."""

    def close(self) -> None: ...


class Runtime:
    """The compiled side of a wrapped model."""

    def __init__(self, facts: ModelFacts, config: WrapConfig) -> None:
        """Remember the model; nothing big is allocated before first use or ``warmup``; ValueError for bad artifacts."""
        self.config = config  # the options given to ``wrap``
        self.home = HomeProcess()  # the process that wrapped the model; each use checks that it runs there
        self.counters = Counters()  # read through ``stats``
        self.events = Events()  # of the model runner; read through ``explain``
        self.loop_lock = LoopLock()
        self.calls = Calls()  # of ``generate`` in progress
        # returns the thread that runs the loop of an engine on this model; None if there is none
        self.engine: Callable[[], object | None] = _no_engine
        self.engines: weakref.WeakSet[RunningEngine] = weakref.WeakSet()  # all engines on this model
        self.artifacts = _artifacts_for(facts, config)  # compiled programs, in place of compiling; None without
        self.runner_lifecycle = ModelRunnerLifecycle(facts, config, self.events, self.engines, self.artifacts)
        self.warming = Warmup(facts, config, self.runner_lifecycle, self.events, self.artifacts)
        _runtimes.add(self)

    def __repr__(self) -> str:
        asleep, model_runner = self.asleep, self._model_runner
        state = "asleep until wake()" if asleep else "nothing is compiled or allocated yet"
        if model_runner is not None:
            pages, buckets = model_runner.pool.account(), model_runner.graph_manager.ready_buckets
            ready = f"batch sizes {', '.join(map(str, buckets))} ready" if buckets else "no batch size ready"
            state = f"{ready}; {pages.used} of {pages.total} pages used"
        return f"<{type(self).__name__} mode={self._mode!r}: {state}>"

    @property
    def _mode(self) -> Mode:
        return self.config.mode_on(self.facts.model.device.type)

    def warmup(self, batch_sizes: Sizes = None, *, profile: ProfilePath | None = None, report: Report = quiet) -> None:
        """Allocate pages, compile, and capture the steps of batches of these sizes, or those that a profile names.

        Args:
            batch_sizes: rows that calls will have, one number or several; 1 to ``max_batch_size`` if None. ``"auto"``
                prepares the steps of the profile in the ``artifacts``; without one, on CUDA all sizes, and on a CPU
                those up to 8.
            profile: a file of ``save_profile``. Exactly the steps in it are prepared; if ``graph_memory`` or
                ``max_graphs`` leave no room for all, the most used ones.
            report: called with each preparation, in words.

        Raises:
            ValueError: a batch size is not between 1 and ``max_batch_size``; or the profile cannot be used: it is
                damaged, of another model or other options, or names sizes that do not exist here.
        """
        self.home.check()
        wanted = self.warming.wanted("batch_sizes", batch_sizes, profile, self.config.max_batch_size)
        self.check_sizes("batch_sizes", wanted.sizes)
        self.warming.prepare(wanted, report)
        self._prepare_parts(report)

    def _prepare_parts(self, report: Report) -> None:
        """Prepare what features need that rooms above know: none here."""

    def save_profile(self, path: ProfilePath) -> None:
        """Save which steps calls have used and how often, for ``warmup(profile=path)`` of a later process.

        If this one began with a profile, its counts are added at half their weight. The file is replaced at once: it is
        never there half written.

        Raises:
            RuntimeError: no step has been used yet; or the weights wait in host memory.
            ValueError: ``mode="eager"`` prepares nothing.
            OSError: the file cannot be written.
        """
        self.home.check()
        self.warming.save(path)

    def stats(self) -> Stats:
        """Return a snapshot of the counters."""
        self.home.check()
        counters, model_runner = self.counters, self._model_runner
        calls = Stats(
            mode=self._mode,
            device=str(self.facts.model.device),
            backend=self.config.backend_on(self.facts.model.device.type).name,
            generate_calls=dict(counters.generate_calls),
            forward_calls=dict(counters.forward_calls),
            slow_paths=counters.slow_paths,
            passed_over=dict(counters.passed_over),
            experts=dict(self.facts.attention.experts),
            weights=self.facts.packed_weights,
        )
        if model_runner is None:
            return calls
        graphs, cuda_graphs = self.graphs, model_runner.graph_manager.cuda_graphs
        return dataclasses.replace(
            calls,
            steps=counters.steps,
            cascade_steps=self.events.cascade_steps,
            kv_saturated=self.events.kv_saturated + model_runner.thread.call(model_runner.saturated),
            new_tokens=counters.tokens,
            generate_seconds=round(self.events.generating.seconds, 6),
            uploads=self.events.uploads.total(),
            graphs=sum(graphs.values()),
            compile_seconds=round(self.events.preparing.seconds, 3),
            tracing_seconds=round(model_runner.graph_manager.programs.tracing_seconds(), 3),
            programs=model_runner.graph_manager.programs.ways(),
            builds={} if self.artifacts is None else self.artifacts.builds(),
            recompiles=sum(max(0, count - 1) for count in graphs.values()),
            uncompiled=sum(self.uncompiled().values()),
            cudagraph_skips=cuda_graphs.skips,
            cuda_graphs=model_runner.thread.call(cuda_graphs.decodes),
            prefill_cuda_graphs=cuda_graphs.prefills,
            patterns=model_runner.graph_manager.programs.pattern_matches(),
            buckets=model_runner.graph_manager.ready_buckets,
            pages=model_runner.pool.account(),
            states=None if model_runner.pool.states is None else model_runner.pool.states.account(),
            peak_pages=model_runner.pool.peak_used,
            page_size=self.config.page_size,
            memory=model_runner.memory() | self.facts.tables_of_weights,
            cuda_graph_table=self.cuda_graphs.as_dicts(),
        )

    @property
    def cuda_graphs(self) -> CudaGraphTable:
        """The CUDA graphs that we have captured, with what they cost and how often they ran; empty in other modes."""
        return CudaGraphTable() if self._model_runner is None else self._model_runner.state.step_table.table()

    @property
    def asleep(self) -> bool:
        """Whether all on the device but the weights was given back, until an engine's ``wake``."""
        return self.runner_lifecycle.asleep

    @property
    def _model_runner(self) -> ModelRunner | None:
        return self.runner_lifecycle.present

    @property
    def graphs(self) -> dict[str, int]:
        """How many graphs each program is compiled into."""
        return {} if self._model_runner is None else self._model_runner.graph_manager.programs.graph_counts()

    # ---- used by the parts of the package that run on a wrapped model

    @property
    def facts(self) -> ModelFacts:
        """What is known of the model since the last ``placement``."""
        return self.runner_lifecycle.facts

    def placement(self) -> Placement:
        """Return the model's placement at this moment, as ``ModelRunnerLifecycle.placement``."""
        return self.runner_lifecycle.placement()

    def check_sizes(self, name: str, sizes: Iterable[int]) -> None:
        """Check that the batch sizes of the argument ``name`` are whole numbers between 1 and ``max_batch_size``."""
        limit = self.config.max_batch_size
        for size in sizes:
            if not (isinstance(size, Integral) and 1 <= size <= limit):
                raise ValueError(f"{name}: {size!r} is not a whole number between 1 and max_batch_size={limit}")

    def usual_rows(self, most: int) -> int:
        """Return how many rows there may be if nobody has said it: ``most``, or the room of artifacts, if less."""
        return most if self.artifacts is None else min(most, self.artifacts.rows)

    def make_room(self, rows: int) -> None:
        """Have room for so many rows, as ``ModelRunnerLifecycle.make_room``; ValueError if the artifacts have less."""
        if self.artifacts is not None:
            self.artifacts.check_rows(rows)
        self.runner_lifecycle.make_room(rows)

    def model_runner(self, placement: Placement | None = None) -> ModelRunner:
        """Return the model runner, as ``ModelRunnerLifecycle.current``; RuntimeError in a forked process, too."""
        self.home.check()
        return self.runner_lifecycle.current(placement)

    def is_current(self, model_runner: ModelRunner, placement: Placement | None = None) -> bool:
        """Return whether ``model_runner`` is that of the model as it is now; makes none. ``placement`` as above."""
        return self.runner_lifecycle.is_current(model_runner, placement)

    def take_kv_scales(self, scales: KVScales) -> None:
        """Have other scales of pages, which fit, while nothing runs; RuntimeError if caches hold pages."""
        self.runner_lifecycle.set_kv_scales(scales)
        self.config = dataclasses.replace(self.config, kv_scales=scales)

    def take_back(self, pages: int, rows: int, pool: PagePool) -> None:
        """Make pages of a pool and states of rows available, if engines have them, or caches that nobody reaches."""
        # A loop that begins has waited for those in progress; but requests of an engine keep their pages while it is
        # paused, or passes from thread to thread. The caller holds the loop lock.
        if not pool.lacks(pages, rows):
            return
        for engine in list(self.engines):
            engine.give_back(pages, rows, pool)
        if pool.lacks(pages, rows):
            # A cache that nobody reaches may be in a cycle: torch leaves some that hold the frames of a call which has
            # waited for a compiler.
            gc.collect()

    def separate_weights(self) -> None:
        """Give each fused weight its own memory again."""
        self.runner_lifecycle.separate_weights()

    def programs(self) -> dict[str, Callable[..., Any]]:
        """Return the compiled functions by name."""
        return {} if self._model_runner is None else self._model_runner.graph_manager.programs.functions

    def uncompiled(self) -> dict[str, int]:
        """Return how many calls of each program have run uncompiled because torch no longer compiles it."""
        return {} if self._model_runner is None else self._model_runner.graph_manager.programs.uncompiled()

    def cudagraph_reasons(self) -> list[str]:
        """Return Inductor's reasons for decode steps that it did not capture."""
        return [] if self._model_runner is None else self._model_runner.graph_manager.cuda_graphs.reasons

    def recaptures(self) -> tuple[int, list[str]]:
        """Return how many CUDA graphs were captured again, and the weights that have moved since the first time."""
        if self._model_runner is None:
            return 0, []
        cuda_graphs = self._model_runner.graph_manager.cuda_graphs
        return self._model_runner.thread.call(cuda_graphs.repeated), cuda_graphs.moved_weights()

    def obstacle(self, placement: Placement | None = None) -> Reason | None:
        """Return why no loop of ours can run the model now, or None; ``placement`` if that was just asked for."""
        return None

    def generate_loop(self, placement: Placement | None = None) -> GenerateLoop:
        """Return a loop without rows; ``placement`` as ``model_runner`` takes it."""
        return GenerateLoop(self.model_runner(placement))


def _artifacts_for(facts: ModelFacts, config: WrapConfig) -> Artifacts | None:
    if config.artifacts is None:
        return None
    here = made_for(facts.model, facts.model_class, config)
    installation = config.backend_on(facts.model.device.type).backend.installation
    artifacts = Artifacts.read(config.artifacts, here, installation)
    artifacts.check_rows(config.max_batch_size)
    return artifacts


def _no_engine() -> None:
    return None


_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()
_left_behind: list[object] = []
"""Objects that a forked process cannot use; CUDA memory of its parent must not be given back here."""


@in_forked_processes
def _leave_behind() -> None:
    _left_behind.extend((runtime, *runtime.engines) for runtime in list(_runtimes))


def runtime_of(model: object) -> Runtime | None:
    """Return the compiled side of a wrapped model; None for a model that is not wrapped."""
    runtime = getattr(model, "compiled", None)
    return runtime if isinstance(runtime, Runtime) else None
