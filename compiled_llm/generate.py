"""The fast loop: greedy decoding that stays one step ahead of the tokens it has read.

HuggingFace's ``generate`` prepares everything as always (inputs, config, cache, stopping criteria) and then calls the
model's ``_sample``; for a wrapped model that leads here. What this loop lacks goes back to HuggingFace's own.

Shapes: B rows, G tokens generated so far.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from compiled_llm.paged_cache import PagedCache

if TYPE_CHECKING:
    from compiled_llm.runtime import CompiledModel


def obstacle(
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    logits_processor: LogitsProcessorList,
    model_kwargs: dict[str, Any],
    input_ids: Tensor,
    synced_gpus: bool,
) -> str | None:
    """Return why the fast loop cannot serve this call on a ``PagedCache``, or None."""
    if generation_config.do_sample:
        return "sampling (do_sample=True)"
    if len(logits_processor) > 0:
        names = ", ".join(sorted({type(processor).__name__ for processor in logits_processor}))
        return f"logits processors ({names})"
    for output in ("output_scores", "output_logits"):
        if generation_config.return_dict_in_generate and getattr(generation_config, output):
            return output
    if synced_gpus:
        return "synced_gpus"
    if model_kwargs["past_key_values"].seen:
        return "a cache that holds tokens already"
    if model._forward_hooks or model._forward_pre_hooks:
        return "forward hooks on the model itself"
    if _has_own_positions(input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")):
        return "position_ids of your own"
    return None


def _has_own_positions(input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> bool:
    """Whether the positions are not those that counting each row's unmasked tokens gives."""
    if position_ids is None:
        return False
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    counted = (mask.long().cumsum(dim=-1) - 1).to(position_ids.device)
    return bool(((counted != position_ids) & (mask != 0).to(position_ids.device)).any())


def fast_loop(
    runtime: CompiledModel,
    cache: PagedCache,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Generate greedily.

    Args:
        runtime: the wrapped model's ``compiled``.
        cache: an empty cache; it owns the rows afterwards.
        input_ids: ``[B, T]`` int64 prompts, padded.
        attention_mask: ``[B, T]``, 0 where padded; None where nothing is.
        stopping_criteria: HuggingFace's, ready to be asked.
        generation_config: HuggingFace's, ready to be used.
        streamer: gets each step's tokens.

    Returns:
        ``[B, T + G]`` int64 on the device of ``input_ids``; in HuggingFace's output class, with the cache, where
        ``return_dict_in_generate`` asks for it.
    """
    sequences = _Sequences(input_ids, stopping_criteria, generation_config)
    runner = cache.runner
    with runtime.turn():
        prompts = prompts_of(input_ids, attention_mask)
        rows = [runner.admit(prompt, sequences.most_new) for prompt in prompts]
        while not sequences.done:
            tokens = runner.step() if runner.steps < sequences.most_new else runner.drain()
            if not tokens:
                continue
            with runtime.turn_yielded():
                ended = sequences.append([tokens.get(row, 0) for row in rows], streamer)
            if not generation_config.return_dict_in_generate:  # else the cache goes to the user, rows and all
                for index in ended:
                    runner.release(rows[index])
        # The loop ran a step ahead of what it read. As in HuggingFace's caches, the last token is not fed in.
        for row, prompt in zip(rows, prompts, strict=True):
            if row in runner.rows:
                row.rewind(len(prompt) + sequences.generated - 1)
        cache.seen = input_ids.shape[1] + sequences.generated - 1
    runtime.counters.add_steps(runner.steps)
    if streamer is not None:
        streamer.end()
    ids = sequences.result(input_ids.device)
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=ids, past_key_values=cache)  # type: ignore[arg-type]
    return ids


def prompts_of(input_ids: Tensor, attention_mask: Tensor | None) -> list[NDArray[np.int64]]:
    """Return each row's tokens that are not masked, on the host."""
    ids = input_ids.cpu().numpy()
    if attention_mask is None:
        return list(ids)
    mask = attention_mask.cpu().numpy() != 0
    return [ids[row][mask[row]] for row in range(len(ids))]


class _Sequences:
    """The sequences on the host, and HuggingFace's rules for when each one ends.

    Attributes:
        generated: G, how many tokens each row has got.
        most_new: how many it can get at most.
        done: whether every row has ended.
    """

    def __init__(self, input_ids: Tensor, criteria: StoppingCriteriaList, generation_config: GenerationConfig) -> None:
        batch, prompt = input_ids.shape
        max_length = min(entry.max_length for entry in criteria if isinstance(entry, MaxLengthCriteria))
        self.most_new = max_length - prompt
        self.generated = 0
        self._ids = torch.empty((batch, max_length), dtype=torch.int64)
        self._ids[:, :prompt] = input_ids
        self._prompt = prompt
        self._device = input_ids.device
        self._unfinished = np.ones(batch, dtype=bool)
        self._eos = [entry.eos_token_id.cpu().numpy() for entry in criteria if isinstance(entry, EosTokenCriteria)]
        # Without an EOS criterion HuggingFace lets a row that another criterion ended run on, unpadded.
        self._pads = any(hasattr(entry, "eos_token_id") for entry in criteria)
        pad = generation_config._pad_token_tensor
        self._pad_token = 0 if pad is None else int(pad)
        self._custom: list[StoppingCriteria] = [
            entry for entry in criteria if type(entry) not in (MaxLengthCriteria, EosTokenCriteria)
        ]

    @property
    def done(self) -> bool:
        return self.generated == self.most_new or not self._unfinished.any()

    def append(self, tokens: list[int], streamer: BaseStreamer | None) -> list[int]:
        """Take one token a row; return the rows that this ended and that need no more steps."""
        before = self._unfinished.copy()
        step = np.array(tokens, dtype=np.int64)
        if self._pads:
            step[~before] = self._pad_token
        self._ids[:, self._prompt + self.generated] = torch.from_numpy(step)
        self.generated += 1
        for eos in self._eos:
            self._unfinished &= ~np.isin(step, eos)
        for entry in self._custom:
            self._unfinished &= ~entry(self.result(self._device), None).cpu().numpy()
        if streamer is not None:
            streamer.put(torch.from_numpy(step))
        return np.flatnonzero(before & ~self._unfinished).tolist() if self._pads else []

    def result(self, device: torch.device) -> Tensor:
        """``[B, T + G]`` int64."""
        return self._ids[:, : self._prompt + self.generated].to(device)
