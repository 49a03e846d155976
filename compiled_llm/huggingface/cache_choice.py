"""Chooses the cache for a call of ``generate``: pages, pages that stand in for HuggingFace's cache, or that one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from compiled_llm.compat.huggingface import columns_in, mask_width
from compiled_llm.execution.limits import whole_limit
from compiled_llm.execution.reporting.slow_paths import Reason
from compiled_llm.huggingface.cache.hidden_columns import differing_window
from compiled_llm.huggingface.cache.paged_cache import PagedCache, PendingPrompt
from compiled_llm.huggingface.cache.reading import READABLE, readable
from compiled_llm.huggingface.cache.stand_in import StandIn
from compiled_llm.huggingface.call.current_call import copies, current_call, made
from compiled_llm.huggingface.call.other_inputs import are_whole, reader_of, sees, without_what_says_nothing
from compiled_llm.huggingface.forward.forward_obstacles import ignored_inputs
from compiled_llm.huggingface.forward.prefills import OF_PREFILLS, prefill_obstacle, prefill_reason
from compiled_llm.huggingface.handle import CompiledModel
from compiled_llm.huggingface.inspection.model_obstacles import SEEN_BOTH_WAYS

_KNOWN_INPUTS = frozenset(
    {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "inputs_embeds", "output_hidden_states"}
)
_APPENDING_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


@dataclass(frozen=True)
class CacheChoice:
    """The choice for one call."""

    runtime: CompiledModel
    model: PreTrainedModel
    config: GenerationConfig
    inputs: dict[str, Any]
    given: Any  # the cache that the user gave, of any kind
    mode: GenerationMode
    rows: int
    # how many columns the cache holds at the end, but for those that it held before if the call is given only new
    # tokens
    max_columns: int

    @cached_property
    def others(self) -> list[str]:
        """The names of inputs that the model reads besides tokens, mask, positions and cache."""
        known = _KNOWN_INPUTS | {self.runtime.facts.generate_argument} | ignored_inputs(type(self.model).forward)
        given = without_what_says_nothing(self.model, self.inputs, copies())
        return [name for name, value in given.items() if name not in known and value is not None]

    @property
    def users(self) -> Cache | None:
        return None if isinstance(self.given, PagedCache) else self.given

    @property
    def max_row_tokens(self) -> int:
        """Upper bound of the columns that the cache holds at the end."""
        if self.users is None:
            return self.max_columns
        if self.config.max_new_tokens is None:
            return self.max_columns + self._known
        return max(self.max_columns, self._width + whole_limit(self.config.max_new_tokens) - 1)

    @property
    def _known(self) -> int:
        """How many columns the user's cache of HuggingFace's holds; 0 if there is none, or it does not count them."""
        return 0 if self.users is None else columns_in(self.users) or 0

    @property
    def _width(self) -> int:
        mask = self.inputs.get("attention_mask")
        return mask_width(self.config, -1) if mask is None else int(mask.shape[1])

    @property
    def is_static(self) -> bool:
        return self.config.cache_implementation == "static" and self._own != "static"

    @property
    def returned(self) -> bool:
        """Whether the user gets a cache of HuggingFace's class, filled as HuggingFace fills it."""
        return self.users is not None or (self.is_static and bool(self.config.return_dict_in_generate))

    @cached_property
    def prefill(self) -> Reason | None:
        """Why HuggingFace's own forward computes the prompt, or None."""
        reason = self._unread or prefill_reason(self.inputs, self._known if self.returned else None)
        return reason or (SEEN_BOTH_WAYS if self.runtime.facts.sees_prompts_both_ways else None)

    @cached_property
    def _unread(self) -> Reason | None:
        """Why steps of ours do not read what the model is given besides tokens; None if they do, or it is nothing."""
        if not self.others:
            return None
        given = f"the model is given {', '.join(self.others)}"
        if (reader := reader_of(self.inputs)) is None or self.returned:
            return Reason("prefill", given)
        obstacle = reader.steps_obstacle(self.runtime, self.others)
        if obstacle is None and not self._cannot_follow():
            return None
        return Reason("prefill", obstacle or given)

    @property
    def stands_in(self) -> bool:
        """Whether pages stand in for a cache of HuggingFace's."""
        return self.returned or self.prefill is not None

    def obstacle(self) -> Reason | None:
        """Return why HuggingFace's own cache and forward have to serve the call, or None."""
        if self._hides_in_window():
            return Reason("hidden_in_window")
        positions = copies().of(self.inputs.get("position_ids"))
        if positions is not None and not are_whole(positions):
            return Reason("fractional_positions")
        if not isinstance(self.inputs.get("logits_to_keep", 0), int):
            return Reason("logits_to_keep", "not a number")
        if self.config.cache_implementation not in (None, "dynamic", "static", self._own):
            return Reason("cache_implementation")
        if self.others and not (sees(self.model) and OF_PREFILLS.issuperset(self.others)):
            return Reason("model_inputs", ", ".join(self.others))
        if self.users is not None and not self._is_readable(self.users):
            return Reason("past_key_values", type(self.users).__name__)
        if self.stands_in and not self.runtime.facts.fills_caches:
            if self.prefill is not None:
                return self._why_original(self.prefill)
            if self.is_static:
                return Reason("cache_implementation")
            return Reason("past_key_values", type(self.users).__name__)
        if self.returned and not self._appends:
            return Reason("cache_implementation") if self.is_static else Reason("past_key_values", "static cache")
        if self.prefill is not None and (self.config.use_cache is False or self._cannot_follow()):
            return self._why_original(self.prefill)
        made = not isinstance(self.given, PagedCache)
        return self._too_much() if made and (self.stands_in or self.is_static) else None

    def stand_in(self) -> PagedCache:
        """Return pages that stand in for HuggingFace's prepared cache; OutOfPagesError if too few are free."""
        # HuggingFace's own would forget what the windows of layers have left, and rows may be cropped later.
        of_its_own = any(layer.kind.own_cache_layers or layer.states for layer in self.runtime.facts.layers)
        own = DynamicCache(config=self.model.config) if of_its_own else DynamicCache()
        if isinstance(self.given, PagedCache):
            assert self.prefill is not None
            self.given.prefill = PendingPrompt(self.prefill, self.given.copied_into(own))
            return self.given
        original = self.inputs[self.runtime.facts.generate_argument] if self.returned else own
        cache = made(StandIn(self.runtime.model_runner(), original, self.returned, self.prefill))
        if known := columns_in(original):
            mask = self.inputs.get("attention_mask")
            shown = np.ones((self.rows, known), bool) if mask is None else copies().of(mask).numpy()[:, :known] != 0
            cache.read(shown, shown.sum(axis=1).tolist())
        return cache

    @property
    def _own(self) -> str | None:
        return getattr(self.model.generation_config, "cache_implementation", None)

    @property
    def _appends(self) -> bool:
        """Whether the loop only adds columns, and is ours to end."""
        call = current_call.get()
        return self.mode in _APPENDING_MODES and call is not None and not call.custom

    def _is_readable(self, cache: Cache) -> bool:
        state = self.runtime.model_runner().state
        layers = self.runtime.facts.layers
        if not self._appends or self.config.use_cache is False or type(cache) not in READABLE:
            return False
        if not readable(cache, layers, state, self.rows, self.max_row_tokens):
            return False
        return self._known == 0 or self._width > self._known

    def _hides_in_window(self) -> bool:
        """Whether hidden tokens lie between others in a sliding window; for a ``PagedCache``, ``Call`` checks that."""
        windows = self.runtime.facts.windows
        mask = self.inputs.get("attention_mask")
        if not windows or mask is None or (isinstance(self.given, PagedCache) and self.given.seen):
            return False
        shown: NDArray[np.bool_] = copies().of(mask).numpy() != 0
        growth = max(0, self.max_row_tokens + (self.config.prompt_lookup_num_tokens or 0) - shown.shape[1])
        return differing_window(shown, 0, growth, windows) is not None

    def _cannot_follow(self) -> bool:
        call = current_call.get()
        if call is None or call.custom or (isinstance(self.given, PagedCache) and not self._goes_on_apart):
            return True
        return prefill_obstacle(self.model, self.config, self.inputs)

    @property
    def _goes_on_apart(self) -> bool:
        """Whether the text after what pages hold has images, or is seen both ways, each row its own."""
        apart = bool(self.others) or self.runtime.facts.sees_prompts_both_ways
        return apart and self._appends and (not self.given.seen or self.rows == len(self.given.stored))

    def _why_original(self, prefill: Reason) -> Reason:
        if self.others:
            return Reason("model_inputs", ", ".join(self.others))
        if self.users is not None:
            return Reason("past_key_values", type(self.users).__name__)
        if prefill is SEEN_BOTH_WAYS:
            return prefill
        return Reason("cache_implementation" if self.returned else "right_padding")

    def _too_much(self) -> Reason | None:
        model_runner = self.runtime.model_runner()
        if self.rows > model_runner.max_batch_size:
            return Reason("max_batch_size")
        if self.max_row_tokens >= model_runner.max_positions:
            return Reason("out_of_positions")
        pool = model_runner.pool
        return None if self.rows * pool.pages_for(self.max_row_tokens) <= pool.available else Reason("out_of_pages")
