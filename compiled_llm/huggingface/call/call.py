"""One call of ``generate``, as HuggingFace has prepared it, and whether our loops can serve it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.logits_process import (
    EncoderRepetitionPenaltyLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from compiled_llm.compat.huggingface import is_users_own, mask_width, prefill
from compiled_llm.execution.limits import pages_needed, whole_limit
from compiled_llm.execution.reporting.slow_paths import Reason
from compiled_llm.huggingface.cache.cache_columns import RowUpdate, first_equal
from compiled_llm.huggingface.cache.more_outputs import MoreOutputs, more_outputs
from compiled_llm.huggingface.cache.paged_cache import PagedCache
from compiled_llm.huggingface.cache.stand_in import StandIn
from compiled_llm.huggingface.call.other_inputs import one_a_token, reader_of
from compiled_llm.huggingface.handle import CompiledModel
from compiled_llm.huggingface.inspection.host_copies import HostCopies
from compiled_llm.kvcache.row import Row
from compiled_llm.model.version.module_tree import has_hooks

if TYPE_CHECKING:
    from compiled_llm.execution.model_runner import ModelRunner


_READING_PROMPTS = (EncoderRepetitionPenaltyLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)


@dataclass(frozen=True)
class LoopArguments:
    """HuggingFace's arguments of a decoding method."""

    # ``[B, T]`` int64 prompts, padded on the left; if the cache holds tokens, the whole text so far or the new part of
    # it; empty if embeddings stand for the tokens
    input_ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    kwargs: dict[str, Any]  # the inputs of the model, the cache among them, and arguments that only some methods take
    streamer: BaseStreamer | None = None

    def run(self, method: Callable[..., object]) -> object:
        return method(
            self.input_ids,
            logits_processor=self.processors,
            stopping_criteria=self.criteria,
            generation_config=self.config,
            **self.kwargs,
        )


@dataclass(frozen=True, kw_only=True)
class PagedCall(LoopArguments):
    """A call whose cache is ours, and the tokens that it adds to each row."""

    runtime: CompiledModel
    cache: PagedCache
    copies: HostCopies  # host copies of tensors on the device
    first: int  # the column of the cache that ``input_ids`` begin at
    updates: list[RowUpdate]
    # ``[B, V]``, from which first tokens are sampled, if a forward of its own has computed them
    logits: Tensor | None = None
    outputs: Mapping[str, Any] | None = None  # what that forward has given besides

    @classmethod
    def of(cls, arguments: LoopArguments, runtime: CompiledModel, copies: HostCopies) -> PagedCall | None:
        """Read HuggingFace's arguments of a decoding method; None if the cache is not ours, or ValueError."""
        inputs = arguments.kwargs
        cache = inputs.get(runtime.facts.generate_argument)
        mask = inputs.get("attention_mask")
        if not isinstance(cache, PagedCache):
            return None
        batch, tokens = inputs.get("inputs_embeds", arguments.input_ids).shape[:2]
        if mask is None:  # HuggingFace drops one that hides nothing, and notes its width
            mask = torch.ones(batch, mask_width(arguments.config, tokens), dtype=torch.long, device="cpu")
        first = cache.seen if mask.shape[1] > tokens else 0
        last = max(cache.seen, first + tokens)
        updates = cache.updates(batch, copies.of(mask), first, last)
        call = cls(**vars(arguments), runtime=runtime, cache=cache, copies=copies, first=first, updates=updates)
        cache.check_windows(updates, last, growth=call.max_new - 1 + call.drafted)
        return call

    @property
    def waits(self) -> Reason | None:
        """Why HuggingFace's own forward has to compute the prompts, or None."""
        return None if self.cache.prefill is None else self.cache.prefill.reason

    @property
    def prefilled_apart(self) -> bool:
        """Whether a forward of its own computes the prompts: HuggingFace's, or the compiled one of more than ids."""
        return self.embedded or reader_of(self.kwargs) is not None or self.waits is not None

    def prefilled(self) -> PagedCall:
        """Let that forward compute the prompts, and return the call that remains."""
        output = prefill(self.runtime.facts.model, self.input_ids, self.config, self.kwargs)
        assert output.logits is not None
        none = np.zeros(0, dtype=np.int64)
        updates = [RowUpdate(row.exact_length, self.cache.seen, none) for row in self.cache.generate_loop.rows]
        first = self.cache.seen - self.input_ids.shape[1]
        more = {name: value for name, value in output.items() if name not in ("logits", "past_key_values")}
        return replace(self, first=first, updates=updates, logits=output.logits[:, -1], outputs=more)

    @property
    def embedded(self) -> bool:
        return "inputs_embeds" in self.kwargs

    @property
    def position_ids(self) -> Tensor | None:
        """``[B, T']`` or ``[1, T']``, also with axes before, the last for the last column; None if none are given."""
        return self.kwargs.get("position_ids")

    @property
    def last(self) -> int:
        return self.first + self.input_ids.shape[1]

    @cached_property
    def max_new(self) -> int:
        """The most tokens that a row can get; HuggingFace checks lengths after a token, so never none."""
        # A subclass of ``MaxLengthCriteria`` has a rule of its own, in addition to the limit that ``generate`` sets.
        limits = [entry for entry in self.criteria if isinstance(entry, MaxLengthCriteria)]
        plain = [entry.max_length for entry in limits if type(entry) is MaxLengthCriteria]
        limit = whole_limit(min(plain or [entry.max_length for entry in limits]))
        return max(1, limit - self.input_ids.shape[1])

    @cached_property
    def lengths(self) -> list[int]:
        """The tokens of each row before its first new one."""
        return [row.length for row in self.updates]

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        ids: Tensor = self.copies.of(self.input_ids)
        return ids.numpy().astype(np.int64)

    @cached_property
    def tokens(self) -> list[NDArray[np.int64]]:
        return [ids[row.columns - self.first] for ids, row in zip(self.ids, self.updates, strict=True)]

    @cached_property
    def leaders(self) -> list[int]:
        """For each row the first one that begins with the same tokens; itself if the cache holds some already."""
        if self.cache.generate_loop.rows or self.prefilled_apart:
            return list(range(len(self.updates)))
        return first_equal(self.tokens)

    @property
    def returns_cache(self) -> bool:
        """Whether the cache, rows and all, goes to the user."""
        replaces_users = isinstance(self.cache, StandIn) and self.cache.returned
        return bool(self.config.return_dict_in_generate or is_users_own(self.cache) or replaces_users)

    @property
    def more(self) -> MoreOutputs | None:
        """The outputs of each step that ``generate`` returns besides tokens and scores; None if it returns none."""
        wanted = self.config.output_hidden_states
        return more_outputs(wanted, self.runtime.facts.hooks) if self.config.return_dict_in_generate else None

    def wants_scores(self, *outputs: str) -> bool:
        """Whether the caller gets each step's ``"output_scores"`` or ``"output_logits"``; either if none is named."""
        named = outputs or ("output_scores", "output_logits")
        return bool(self.config.return_dict_in_generate and any(getattr(self.config, output) for output in named))

    @property
    def drafted(self) -> int:
        """The tokens that HuggingFace's loop may store beyond the last; draft models keep to this number."""
        return max(0, (self.config.prompt_lookup_num_tokens or 0) - 1)

    @property
    def model_runner(self) -> ModelRunner:
        return self.cache.model_runner

    def pages_needed(self) -> int:
        """Return how many pages our loops may need beyond those that the cache has."""
        if not self.cache.generate_loop.rows:
            common = [
                0 if leads == batch_index else self.lengths[batch_index] - 1
                for batch_index, leads in enumerate(self.leaders)
            ]
            return pages_needed(self.model_runner, self.lengths, self.max_new, common)
        return sum(row.missing(length, kept) for row, length, kept in self._grown(self.max_new))

    def pages_needed_by_huggingface(self) -> int:
        """Return how many pages HuggingFace's loop may need, whose beams continue from each other."""
        most = self.max_new + self.drafted
        beams = self.config.num_beams or 1
        if not self.cache.generate_loop.rows:
            copies = 1 if self.prefilled_apart else max(beams, self.config.num_return_sequences or 1)
            common = [length if batch_index % copies else 0 for batch_index, length in enumerate(self.lengths)]
            return pages_needed(self.model_runner, self.lengths, most, common)
        if beams == 1:
            return sum(row.missing(length, kept) for row, length, kept in self._grown(most))
        pool = self.model_runner.pool
        return sum(pool.pages_for(length) - pool.filled_by(kept) for _, length, kept in self._grown(most))

    def _grown(self, max_new: int) -> list[tuple[Row, int, int]]:
        """Return each row, its final length, and how many of its tokens it keeps."""
        both = zip(self.cache.generate_loop.rows, self.updates, strict=True)
        return [(row, update.length + max_new - 1, update.kept) for row, update in both]


def obstacle(model: PreTrainedModel, call: PagedCall) -> Reason | None:
    """Return why our loops cannot serve this call, or None."""
    if overridden := call.runtime.overrides.of(model):
        return Reason("overrides", ", ".join(overridden))
    if call.embedded and (call.config.prefill_chunk_size is not None or _reads_prompts(call)):
        return Reason("inputs_embeds")
    if call.prefilled_apart:
        return Reason("model_hooks") if has_hooks(model) else None
    if not all(len(row.columns) and row.columns[-1] == call.last - 1 for row in call.updates):
        return Reason("no_new_tokens")
    if has_hooks(model):
        return Reason("model_hooks")
    if _has_own_positions(call):
        return Reason("position_ids")
    return None


def _reads_prompts(call: PagedCall) -> bool:
    """Whether a processor looks at the prompts' tokens, or skips their padding, which without them is the answer's."""
    skipped = [call.copies.of(getattr(processor, "prompt_ignore_length", None)) for processor in call.processors]
    skips = any(length is not None and bool(np.any(np.asarray(length))) for length in skipped)
    return skips or any(isinstance(processor, _READING_PROMPTS) for processor in call.processors)


def _has_own_positions(call: PagedCall) -> bool:
    """Whether the positions are not those that counting each row's unmasked tokens gives."""
    if call.position_ids is None:
        return False
    if call.position_ids is call.copies.counted and not call.cache.generate_loop.rows:
        return False
    flat = one_a_token(call.copies.of(call.position_ids), call.runtime.facts.model.config)
    if flat is None:
        return True
    if len(flat) not in (1, rows := len(call.input_ids)):
        raise ValueError(
            f"position_ids: {len(flat)} rows for input_ids of {rows}; pass one row, or as many as there are prompts. A "
            "model that sees images makes them by the rope_deltas of its last call: go on with that call's cache alone"
        )
    positions = flat.expand(rows, -1).numpy()
    shift = call.last - positions.shape[1]
    starts = [row.exact_position - row.exact_length for row in call.cache.generate_loop.rows] or [0] * len(positions)
    for row, start, update in zip(positions, starts, call.updates, strict=True):
        counted = start + np.arange(update.kept, update.length)
        covered = update.columns >= shift
        if (row[update.columns[covered] - shift] != counted[covered]).any():
            return True
    return False
