"""A model with its compiled side: pages, programs, runners, and what has happened so far."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from transformers import PreTrainedModel

from compiled_llm.config import WrapConfig
from compiled_llm.execution.decode_buffers import buckets_up_to
from compiled_llm.execution.device_model import PagedModel
from compiled_llm.execution.events import Journal
from compiled_llm.execution.runner import Runner
from compiled_llm.execution.stats import Counters, Stats
from compiled_llm.execution.threads.executor import executor_for
from compiled_llm.execution.threads.turn import Turn
from compiled_llm.model.checks import check_placement
from compiled_llm.model.facts import ModelFacts
from compiled_llm.model.modules import InnerHooks


class Runtime:
    """A model with its compiled side.

    Attributes:
        facts: what is known of the model.
        config: the options given to ``wrap``.
        hooks: those on the model's inner modules.
        turn: whose loop runs.
        counters: what ran where; read them through ``stats``.
        journal: what happened on the device side; read it through ``explain``.
    """

    def __init__(self, facts: ModelFacts, config: WrapConfig) -> None:
        """Remember the model; nothing big is allocated before the first use or ``warmup``."""
        self.facts = facts
        self.config = config
        self.counters = Counters()
        self.journal = Journal()
        self.hooks = InnerHooks()
        self.turn = Turn()
        self._paged: PagedModel | None = None
        # What must not change: where the model is, of what type, and the hooks compiled into its graphs.
        self._made_for: tuple[Hashable, ...] = ()
        self._allocation = threading.Lock()

    def warmup(self, batch_sizes: Iterable[int] | None = None) -> None:
        """Allocate pages, compile, and record every bucket that batches of these sizes use.

        Args:
            batch_sizes: rows that calls will have; 1 to ``max_batch_size`` where None.

        Raises:
            ValueError: a batch size is not between 1 and ``max_batch_size``.
        """
        sizes = buckets_up_to(self.config.max_batch_size) if batch_sizes is None else list(batch_sizes)
        self.check_sizes("batch_sizes", sizes)
        paged = self.paged()
        paged.thread.call(paged.make_prefill_ready)
        for bucket in sorted({paged.bucket_for(size) for size in sizes}):
            paged.thread.call(paged.make_decode_ready, bucket)
        for shapes in {tuple(paged.recorded_shapes(size)) for size in sizes}:
            paged.thread.call(paged.make_prefills_recorded, shapes)
        self.journal.warmed_up()

    def stats(self) -> Stats:
        """Return what has happened so far."""
        counters, paged = self.counters, self._paged
        if paged is None:
            return Stats(dict(counters.generate_calls), dict(counters.forward_calls), dict(counters.slow_paths))
        graphs = paged.graph_counts()
        return Stats(
            generate_calls=dict(counters.generate_calls),
            forward_calls=dict(counters.forward_calls),
            slow_paths=dict(counters.slow_paths),
            steps=counters.steps,
            uploads=self.journal.uploads.total(),
            graphs=sum(graphs.values()),
            recompiles=sum(max(0, count - 1) for count in graphs.values()),
            cudagraph_skips=paged.recordings.skips,
            recordings=paged.thread.call(paged.recordings.decodes),
            prefill_recordings=paged.recordings.prefills,
            buckets=paged.ready_buckets,
            pages=paged.pool.account(),
            page_size=self.config.page_size,
            memory=paged.memory(),
        )

    @property
    def graphs(self) -> dict[str, int]:
        """How many graphs each program is compiled into."""
        return {} if self._paged is None else self._paged.graph_counts()

    # ---- used by the parts of the package that run on a wrapped model

    def check_sizes(self, name: str, sizes: Iterable[int]) -> None:
        """Check the batch sizes that an argument named ``name`` holds.

        Raises:
            ValueError: one is not between 1 and ``max_batch_size``.
        """
        limit = self.config.max_batch_size
        for size in sizes:
            if not 1 <= size <= limit:
                raise ValueError(f"{name}: {size} is not between 1 and max_batch_size={limit}")

    def paged(self) -> PagedModel:
        """Return the device side; made at the first call, and anew after the model was moved, converted or hooked."""
        model = self.facts.model
        with self._allocation:
            paged, fits = self._paged, (model.device, model.dtype, self.hooks.of(model))
            if paged is None or fits != self._made_for:
                if paged is not None:
                    self.journal.started_anew()
                paged = self._paged = None  # its memory goes back first
                check_placement(model, self.config)
                thread = executor_for(model.device, self.config)
                paged = thread.call(PagedModel, self.facts, self.config, thread, self.journal)
                self._paged, self._made_for = paged, fits
            return paged

    def separate_weights(self) -> None:
        """Give each fused weight memory of its own again."""
        if (paged := self._paged) is not None:
            paged.thread.call(paged.separate_weights)

    def model(self) -> PreTrainedModel:
        """Return the wrapped model."""
        return self.facts.model

    def programs(self) -> dict[str, Callable[..., Any]]:
        """Return the functions that have been compiled, by name."""
        return {} if self._paged is None else self._paged.functions()

    def cudagraph_reasons(self) -> list[str]:
        """Return what Inductor said of decode steps that it did not record."""
        return [] if self._paged is None else self._paged.recordings.reasons

    def rerecordings(self) -> tuple[int, list[str]]:
        """Return how many CUDA graphs were recorded anew, and the weights that have moved since the first time."""
        if self._paged is None:
            return 0, []
        recordings = self._paged.recordings
        return self._paged.thread.call(recordings.anew), recordings.moved_weights()

    def runner(self) -> Runner:
        """Return a new runner."""
        return Runner(self.paged())


def runtime_of(model: object) -> Runtime | None:
    """Return the compiled side of a wrapped model; None for a model that is not wrapped."""
    runtime = getattr(model, "compiled", None)
    return runtime if isinstance(runtime, Runtime) else None
