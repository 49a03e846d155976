"""``model.compiled``: everything that wrapping adds to a model hangs on this one object."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from compiled_llm.compilation.steps import Forward
from compiled_llm.config import WrapConfig
from compiled_llm.execution.decode_buffers import buckets_up_to
from compiled_llm.execution.device_model import PagedModel
from compiled_llm.execution.events import Journal
from compiled_llm.execution.runner import Runner
from compiled_llm.execution.stats import Counters, Stats
from compiled_llm.execution.threads.executor import executor_for
from compiled_llm.execution.threads.turn import Turn
from compiled_llm.huggingface.paged_cache import PagedCache
from compiled_llm.huggingface.settings_cache import KnownSettings
from compiled_llm.huggingface.special_tokens import SpecialTokens
from compiled_llm.model.attention import AttentionSwitch
from compiled_llm.model.checks import check_placement
from compiled_llm.model.fused_weights import Group
from compiled_llm.model.layer_probe import Layer, counts_unmasked
from compiled_llm.model.modules import InnerHooks

if TYPE_CHECKING:
    from compiled_llm.explaining.report import Report


class CompiledModel:
    """The compiled side of a wrapped model.

    Attributes:
        config: the options given to ``wrap``.
        layers: the model's attention layers.
        groups: its linear layers that read one input.
        hooks: those on its inner modules.
        counts_unmasked: whether it numbers unmasked tokens where it is given no positions.
        attention: switches between paged attention and the model's own.
        settings: what calls of ``generate`` were asked for so far.
        turn: whose loop runs.
        counters: what ran where; read them through ``stats``.
        journal: what happened on the device side; read it through ``explain``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        forward: Forward,
        layers: Sequence[Layer],
        config: WrapConfig,
        groups: Sequence[Group] = (),
    ) -> None:
        """Remember the model; nothing big is allocated before the first use or ``warmup``.

        Args:
            model: the wrapped model; only a weak reference is kept.
            forward: its class's own ``forward``.
            layers: its attention layers.
            config: the options.
            groups: its linear layers that read one input.
        """
        self.config = config
        self.counters = Counters()
        self.journal = Journal()
        self._model = weakref.ref(model)
        self._forward = forward
        self.layers = list(layers)
        self.groups = list(groups)
        self.hooks = InnerHooks()
        self.counts_unmasked = counts_unmasked(model)
        self.attention = AttentionSwitch(model)
        self._paged: PagedModel | None = None
        # What must not change: where the model is, of what type, and the hooks compiled into its graphs.
        self._made_for: tuple[Hashable, ...] = ()
        self._allocation = threading.Lock()
        self.settings = KnownSettings()
        self.special_tokens = SpecialTokens()
        self.turn = Turn()

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

    def explain(self, timings: bool | Sequence[int] = False) -> Report:
        """Return what has happened so far and why: paths taken, recompiles, buckets missed, uploads, recordings.

        Args:
            timings: also run prefill and decode on rows of no meaning and say where their time goes: at these batch
                sizes, or where True at those that are ready. Calls of other threads wait meanwhile.

        Raises:
            ValueError: a batch size is not between 1 and ``max_batch_size``.
            OutOfPagesError: caches that you hold leave too few pages for the timings.
        """
        from compiled_llm.explaining.history import report_of

        return report_of(self, timings)

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
        model = self._model()
        assert model is not None
        with self._allocation:
            paged, fits = self._paged, (model.device, model.dtype, self.hooks.of(model))
            if paged is None or fits != self._made_for:
                if paged is not None:
                    self.journal.started_anew()
                paged = self._paged = None  # its memory goes back first
                check_placement(model, self.config)
                thread = executor_for(model.device, self.config)
                known = model, self._forward, self.layers, self.config, self.attention
                paged = thread.call(PagedModel, *known, thread, self.journal, self.groups)
                self._paged, self._made_for = paged, fits
            return paged

    def separate_weights(self) -> None:
        """Give each fused weight memory of its own again."""
        if (paged := self._paged) is not None:
            paged.thread.call(paged.separate_weights)

    def model(self) -> PreTrainedModel:
        """Return the wrapped model."""
        model = self._model()
        assert model is not None
        return model

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

    def new_cache(self) -> PagedCache:
        """Return an empty cache with a runner of its own."""
        return PagedCache(self.runner(), len(self.layers))
