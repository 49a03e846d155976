"""The decoding loop that lets logits processors see each step: HuggingFace's code between our launches."""

# Shapes: B rows, T prompt columns, G tokens generated so far, V vocabulary.

from __future__ import annotations

from contextlib import ExitStack
from typing import cast

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from compiled_llm.compilation.sampling.draws import Draws
from compiled_llm.execution.threads.interrupts import allowed
from compiled_llm.huggingface.call.call import PagedCall
from compiled_llm.huggingface.generate import (
    Sequences,
    append_tokens,
    begin_rows,
    check_hooks,
    counted,
    trim_cache,
)
from compiled_llm.huggingface.processors.guidance import GuidanceByTwins, Twins
from compiled_llm.huggingface.processors.processors import new_seeds
from compiled_llm.huggingface.processors.watermarks import WatermarkOfHost, with_watermarks_of_host
from compiled_llm.kvcache.row import Row


def processed_loop(call: PagedCall, twins: Twins | None = None) -> Tensor | GenerateDecoderOnlyOutput:
    """As ``fast_loop``, with HuggingFace's processors run between steps, on the device, in the caller's thread."""
    # The caller holds the loop lock. Sampled tokens go into the next forward on the device, and are read while it runs.
    # So processors see the very steps that HuggingFace's loop shows them, and their launches, like those of sampling,
    # are queued before the forward is done; a processor that reads from the device waits for itself. ``twins`` are the
    # second rows of guidance.
    sequences, generate_loop = Sequences(call), call.cache.generate_loop
    with counted(call, sequences), call.cache.extended(call.updates, call.last) as rows, ExitStack() as stack:
        stack.enter_context(generate_loop.watched([*filter(None, [sequences.step_states])]))
        generate_loop.restart()  # a call that was interrupted may have left a step unread
        steps = _Steps(call, twins, sequences)
        steps.begin(rows, [] if twins is None else stack.enter_context(twins.rows_in(generate_loop, call.max_new)))
        while True:
            tokens = steps.sample()
            generate_loop.start_reading(tokens)
            if ahead := steps.may_go_ahead:
                steps.launch(tokens)
            steps.pad(append_tokens(call, sequences, generate_loop.read().tokens))
            if sequences.done:
                break
            if not ahead:
                steps.launch(tokens)
        generate_loop.let_taps_report()
        if call.returns_cache:
            trim_cache(call, rows, {}, sequences)
    call.cache.count(sequences.generated - 1)
    call.runtime.counters.add_steps(sequences.generated)
    return sequences.finish()


class _Steps:
    """Device state between a forward and the tokens that are sampled after it."""

    def __init__(self, call: PagedCall, twins: Twins | None, sequences: Sequences) -> None:
        self._call = call
        self._twins = twins
        self._sequences = sequences
        self._generate_loop = call.cache.generate_loop
        self._ids = call.input_ids
        self._running: Tensor | None = None  # [B] bool, once a row has ended that gets pads
        self._processors = with_watermarks_of_host(call.processors)
        self._runs_foreign_code = not all(map(_is_known, self._processors))
        self._watched = self._runs_foreign_code or sequences.may_change_model

    def begin(self, rows: list[Row], twins: list[Row]) -> None:
        """Compute the prompts, and those of the twins with them."""
        call = self._call
        new = list(zip(rows, begin_rows(call, rows), strict=True))
        if self._sequences.step_states is not None:
            self._sequences.step_states.begin(rows, [len(tokens) for _, tokens in new])
        extended = (
            [] if call.logits is not None else [(*one, one[0].exact_position + np.arange(len(one[1]))) for one in new]
        )
        if self._twins is not None:
            extended += zip(twins, self._twins.tokens, self._twins.positions, strict=True)
        logits = [] if call.logits is None else [call.logits]
        if extended:
            logits.append(self._generate_loop.extend(*map(list, zip(*extended, strict=True))))  # type: ignore[arg-type]
        self._logits = torch.cat(logits) if len(logits) > 1 else logits[0]
        device = call.input_ids.device
        seeds = new_seeds(len(rows)).to(device) if call.config.do_sample else None
        self._draws = Draws(seeds, torch.tensor([row.exact_position for row in rows], device=device))

    def sample(self) -> Tensor:
        """Process the last logits, and return ``[B]`` int64, the next tokens."""
        logits = self._logits.to(self._ids.device)
        logits = logits if self._twins is None else self._twins.take_logits(logits)
        raw = logits.to(torch.float32, copy=True)
        scores = self._processed(raw)
        self._sequences.step_scores.record(scores, raw)
        tokens = self._draws(scores)
        if self._running is not None:
            tokens = torch.where(self._running, tokens, self._sequences.pad_token)
        self._ids = torch.cat([self._ids, tokens[:, None]], dim=1)
        return tokens

    def _processed(self, logits: Tensor) -> Tensor:
        ids, scores = cast(torch.LongTensor, self._ids), cast(torch.FloatTensor, logits)
        for processor in self._processors:
            if isinstance(processor, WatermarkOfHost):
                processor.texts = iter(self._sequences.on_host())
        if not self._runs_foreign_code:
            return self._processors(ids, scores)
        with self._call.runtime.loop_lock.yielded(), allowed():  # it may call the model
            return self._processors(ids, scores)

    @property
    def may_go_ahead(self) -> bool:
        """Whether the next forward can be launched before it is known to be needed."""
        generate_loop, sequences = self._generate_loop, self._sequences
        return generate_loop.asynchronous and generate_loop.prepared and sequences.generated + 1 < sequences.max_new

    def launch(self, tokens: Tensor) -> None:
        """Launch the forward that feeds in ``tokens`` ``[B]``."""
        if self._watched:
            check_hooks(self._call)
            self._generate_loop.model_runner.expect_changes()
        fed = tokens.clamp(min=0).to(self._logits.device)
        fed = fed if self._twins is None else fed.repeat(2)
        self._logits = self._generate_loop.decode(fed)

    def pad(self, ended: list[int]) -> None:
        """Feed pads to rows from now on, without waiting for the device."""
        if ended and self._running is None:
            self._running = torch.ones(len(self._ids), dtype=torch.bool, device=self._ids.device)
        for row in ended:
            self._running[row].fill_(False)  # type: ignore[index]


def _is_known(processor: LogitsProcessor) -> bool:
    """Whether a processor is HuggingFace's own, and neither calls nor changes the model."""
    kind = type(processor)
    known = kind.__module__ == LogitsProcessor.__module__ and kind is not UnbatchedClassifierFreeGuidanceLogitsProcessor
    return known or kind in (GuidanceByTwins, WatermarkOfHost)
