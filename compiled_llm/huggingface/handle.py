"""``model.compiled``: everything that wrapping adds to a model hangs on this one object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

from compiled_llm.config import KVScales, WrapConfig
from compiled_llm.engine.lifecycle.all_engines import with_no_pages
from compiled_llm.engine.lifecycle.warmup import prepare_images
from compiled_llm.execution.lifecycle.runtime import Runtime
from compiled_llm.execution.lifecycle.warmup import Report
from compiled_llm.execution.reporting.slow_paths import Reason
from compiled_llm.huggingface.cache.paged_cache import PagedCache
from compiled_llm.huggingface.inspection.model_obstacles import model_obstacle
from compiled_llm.huggingface.inspection.overrides import Overrides
from compiled_llm.huggingface.inspection.settings_cache import PreparedConfigs
from compiled_llm.huggingface.inspection.special_tokens import SpecialTokens
from compiled_llm.kinds.scales import check_scales
from compiled_llm.model.facts import ModelFacts
from compiled_llm.model.version.model_version import Placement

if TYPE_CHECKING:
    from transformers import GenerationMixin, PreTrainedModel

    from compiled_llm.explaining.report import Report as History

    class Wrapped(PreTrainedModel, GenerationMixin):
        """A wrapped model, for type checkers: its class is made from the user's, and ``WrappedModel``."""

        compiled: CompiledModel

        def _note_outer_compile(self) -> None: ...


compiled_models: WeakSet[CompiledModel] = WeakSet()  # those of all wrapped models of this process


class CompiledModel(Runtime):
    """The compiled side of a wrapped model."""

    def __init__(self, facts: ModelFacts, config: WrapConfig) -> None:
        super().__init__(facts, config)
        compiled_models.add(self)
        self.prepared_configs = PreparedConfigs()
        self.special_tokens = SpecialTokens()
        self.overrides = Overrides()

    def _prepare_parts(self, report: Report) -> None:
        if self.config.images_in_steps_on(self.facts.model.device.type):
            prepare_images(self.model_runner(), report)

    def set_kv_scales(self, scales: KVScales) -> None:
        """Have other scales of keys and values in pages from now on, as ``wrap(kv_scales=...)``.

        For a model whose weights have changed. Calls in progress end first; requests of engines go on, and compute
        again what they have in pages. The prefix cache is emptied. Nothing is compiled or captured again.

        Raises:
            TypeError: they are no ``KVScales``.
            ValueError: the model is wrapped without ``kv_dtype``, or they do not fit its layers.
            RuntimeError: caches that you hold lie in the pages; or a call or an engine of this thread's is in progress.
                Nothing has changed, except that requests compute again what they need.
        """
        self.home.check()
        if not isinstance(scales, KVScales):
            raise TypeError(f"set_kv_scales: give KVScales, as compiled_llm.kv_scales returns them; got {scales!r:.80}")
        if self.config.kv_dtype is None:
            raise ValueError(
                "set_kv_scales: the model is wrapped without kv_dtype, and its pages have no scales; unwrap it, and "
                "wrap it with kv_dtype"
            )
        check_scales("set_kv_scales", scales, self.facts.layers)
        with_no_pages(self, "set_kv_scales", lambda _: self.take_kv_scales(scales))

    def explain(self, timings: bool | Sequence[int] = False) -> History:
        """Return the history and its reasons: paths taken, recompiles, cold starts, uploads, CUDA graphs.

        Args:
            timings: also run prefill and decode on meaningless rows and say where their time goes: at these batch
                sizes, or if True at those that are ready. Calls of other threads wait meanwhile.

        Raises:
            ValueError: a batch size is not between 1 and ``max_batch_size``.
            OutOfPagesError: caches that you hold leave too few pages for the timings.
        """
        from compiled_llm.explaining.history import report_of  # needed by few, and slow to import

        return report_of(self, timings)

    def obstacle(self, placement: Placement | None = None) -> Reason | None:
        """Return why our loops cannot run the model now, or None; ``placement`` if that was just asked for."""
        return model_obstacle(self.facts.model, self.facts, self.overrides, placement)

    def new_cache(self, placement: Placement | None = None) -> PagedCache:
        """Return an empty cache; ``placement`` as ``model_runner`` takes it."""
        return PagedCache(self.model_runner(placement))
