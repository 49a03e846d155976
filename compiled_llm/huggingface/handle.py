"""``model.compiled``: everything that wrapping adds to a model hangs on this one object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from compiled_llm.config import WrapConfig
from compiled_llm.execution.lifecycle.runtime import Runtime
from compiled_llm.execution.reporting.slow_paths import Reason
from compiled_llm.huggingface.cache.paged_cache import PagedCache
from compiled_llm.huggingface.inspection.model_obstacles import model_obstacle
from compiled_llm.huggingface.inspection.overrides import Overrides
from compiled_llm.huggingface.inspection.settings_cache import PreparedConfigs
from compiled_llm.huggingface.inspection.special_tokens import SpecialTokens
from compiled_llm.model.facts import ModelFacts
from compiled_llm.model.version.model_version import Placement

if TYPE_CHECKING:
    from compiled_llm.explaining.report import Report


class CompiledModel(Runtime):
    """The compiled side of a wrapped model.

    Attributes:
        prepared_configs: the generation configs of calls so far.
        special_tokens: the tensors that they use.
        overrides: the user's replacements of HuggingFace's functions.
    """

    def __init__(self, facts: ModelFacts, config: WrapConfig) -> None:
        super().__init__(facts, config)
        self.prepared_configs = PreparedConfigs()
        self.special_tokens = SpecialTokens()
        self.overrides = Overrides()

    def explain(self, timings: bool | Sequence[int] = False) -> Report:
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
        return model_obstacle(self.facts.model, self.facts.version, self.overrides, placement)

    def new_cache(self, placement: Placement | None = None) -> PagedCache:
        """Return an empty cache with a loop of its own; ``placement`` as ``model_runner`` takes it."""
        return PagedCache(self.generate_loop(placement))
