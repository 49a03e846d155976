"""The decoding loops: one runs a step ahead of the tokens it has read, one lets processors see each step."""

# HuggingFace's ``generate`` prepares everything as always (inputs, config, cache, processors, stopping criteria) and
# then calls the model's ``_sample``; for a wrapped model that leads here. Calls that these loops cannot serve go back
# to HuggingFace's own. Shapes: B rows, T prompt columns, G tokens generated so far, V vocabulary.

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.generation.stopping_criteria import (
    ConfidenceCriteria,
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)
from transformers.generation.streamers import (
    AsyncTextIteratorStreamer,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from compiled_llm.compat.cache_names import output_field
from compiled_llm.compat.huggingface import pad_token
from compiled_llm.compat.known_functions import reads_tokens_alone
from compiled_llm.compilation.sampling.sampling import NOT_A_TOKEN, Sampling
from compiled_llm.execution.generate_loop import GenerateLoop
from compiled_llm.execution.threads.interrupts import allowed
from compiled_llm.huggingface.call.call import PagedCall
from compiled_llm.huggingface.processors.grammar import grammar_of, masks_from
from compiled_llm.huggingface.processors.step_scores import StepScores
from compiled_llm.kvcache.row import Row
from compiled_llm.model.version.module_tree import has_hooks

# These are known not to change the model between steps; classes derived from them may do anything.
_HARMLESS = (
    ConfidenceCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
    AsyncTextIteratorStreamer,
    TextIteratorStreamer,
    TextStreamer,
)


class TokenSource(Protocol):
    """Where the tokens of a call come from, one for each row at a time."""

    def next(self) -> dict[Row, int]:
        """Launch what is to be launched, and return the next token of each row that goes on; none if some wait."""
        ...

    def leave(self, row: Row) -> None:
        """Let a row that has ended take no part in further steps."""
        ...


Drafting = Callable[[PagedCall, Sequence[NDArray[np.int64]], int], TokenSource]
"""Makes the rounds of a call whose prompts wait, by the tokens that answers have, and how many more they may get."""


def fast_loop(
    call: PagedCall,
    settings: Sequence[Sampling | None],
    sequences: Sequences | None = None,
    drafting: Drafting | None = None,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Generate with tokens sampled inside the graph; the caller holds the loop lock.

    They are read one step late if the device runs in parallel with the host. Without ``settings`` the most likely ones
    are taken. ``sequences`` have the tokens that an engine has generated before the call left it. With ``drafting``,
    steps feed in guesses, and give several tokens.

    Returns:
        ``[B, T + G]`` int64 on the device of ``input_ids``; in HuggingFace's output class, with the cache, where
        ``return_dict_in_generate`` asks for it.
    """
    sequences = sequences or Sequences(call)
    cache, generate_loop, left = call.cache, call.cache.generate_loop, sequences.max_new - sequences.generated
    states, grammar = sequences.step_states, grammar_of(call.processors)
    taps = [*[sequences.step_scores] * call.wants_scores(), *([] if states is None else [states])]
    with (
        counted(call, sequences),
        cache.extended(call.updates, call.last) as rows,
        generate_loop.watched(taps, masks_from(grammar, rows, settings, sequences.on_host)),
    ):
        generate_loop.model_runner.expect_changes()  # since the last call
        generate_loop.restart()
        begun = list(begin_rows(call, rows))
        if states is not None:
            states.begin(rows, [len(tokens) for tokens in begun])
        if call.logits is None:
            for row, tokens, sampling, answer in zip(rows, begun, settings, sequences.answers(), strict=True):
                going_on = replace(sampling, output_ids=answer) if sampling and len(answer) else sampling
                generate_loop.resume(row, np.concatenate([tokens, answer]), left, going_on)
        else:
            generate_loop.begin(call.logits, settings)
        ends: dict[Row, int] = {}
        watched = sequences.may_change_model
        # Outputs of later steps are to be those of HuggingFace's pads, and a state does not go back by several tokens.
        pads = bool(taps) or bool(call.runtime.facts.states)
        source: TokenSource = SingleTokens(generate_loop, sequences, left, ends if pads else {})
        if drafting is not None:
            source = drafting(call, sequences.answers(), left)
        while not sequences.done:
            if watched:
                check_hooks(call)
                generate_loop.model_runner.expect_changes()
            sampled = source.next()
            if not sampled:
                continue
            for index in append_tokens(call, sequences, [sampled.get(row, 0) for row in rows]):
                source.leave(rows[index])
                if call.returns_cache:
                    ends[rows[index]] = sequences.generated
                else:
                    generate_loop.release(rows[index])
        if generate_loop.model_runner.state.taps:
            generate_loop.let_taps_report()
        if call.returns_cache:
            trim_cache(call, rows, {} if pads else ends, sequences)
    call.runtime.counters.add_steps(generate_loop.steps)
    if call.returns_cache:
        cache.count(sequences.generated - 1)
    return sequences.finish()


@contextmanager
def counted(call: PagedCall, sequences: Sequences) -> Iterator[None]:
    """Count the time and the tokens of a loop, also of one that is interrupted."""
    with call.runtime.events.generating.running():
        try:
            yield
        finally:
            call.runtime.counters.add_tokens(sequences.new_tokens)


def append_tokens(call: PagedCall, sequences: Sequences, tokens: Sequence[int]) -> list[int]:
    """Take one token a row. Another loop may run while this one waits, or while the user's code looks at the token."""
    call.runtime.calls.moves += 1
    lock = call.runtime.loop_lock
    if not (sequences.callbacks or lock.waiters):
        return sequences.append(tokens)
    with lock.yielded(), allowed():
        return sequences.append(tokens)


def check_hooks(call: PagedCall) -> None:
    """Raise RuntimeError if a callback has put hooks on the model: our loops would not call them."""
    facts = call.runtime.facts
    if has_hooks(facts.model) or facts.version.obstacles().hooked:
        raise RuntimeError(
            "generate: forward hooks were registered while it was running, and its compiled steps cannot call them; "
            f"register them before the call, or pass a DynamicCache as {facts.generate_argument}"
        )


def begin_rows(call: PagedCall, rows: list[Row]) -> Iterator[NDArray[np.int64]]:
    """Promise each row its pages, and yield its tokens to compute: those that no other row begins with as well."""
    # All are computed at once: in each layer, every row's keys and values are stored before any row attends.
    for row, leads, tokens, length in zip(rows, call.leaders, call.tokens, call.lengths, strict=True):
        shared = 0 if rows[leads] is row else row.begin_as(rows[leads], length)
        if shared:
            row.identify(tokens)
        row.reserve(length + call.max_new - 1)
        yield tokens[shared:]


class SingleTokens:
    """Steps that give each row one token."""

    def __init__(self, loop: GenerateLoop, sequences: Sequences, left: int, ends: Mapping[Row, int]) -> None:
        """Launch ``left`` steps. Of rows that go on with pads, ``ends`` are their numbers of tokens when they ended."""
        self._loop = loop
        self._sequences = sequences
        self._left = left
        self._ends = ends

    def next(self) -> dict[Row, int]:
        loop = self._loop
        fed = self._pads() if self._ends else {}
        sampled = loop.step(None, fed) if loop.steps < self._left else loop.drain()
        if not sampled and not (loop.asynchronous and loop.prepared):
            sampled = loop.drain()  # the first tokens do not wait for decode to be compiled
        return sampled

    def _pads(self) -> dict[Row, int]:
        """Return what ended rows feed in: HuggingFace's go on with pads, and so do the scores of their steps."""
        pad = self._sequences.pad_token  # the first step feeds in no new token
        return {row: pad for row, count in self._ends.items() if self._loop.steps > count}

    def leave(self, row: Row) -> None:
        """Its tokens are not looked at any more."""


def trim_cache(call: PagedCall, rows: list[Row], ends: dict[Row, int], sequences: Sequences) -> None:
    """Leave the cache as HuggingFace leaves it: all columns but the last, pads after a row's end included."""
    # The loop ran a step ahead of the tokens it read, and ended rows went on with tokens of their own, or took part in
    # no further step. ``ends`` are the numbers of tokens when they ended, without rows that have gone on with pads.
    stored = sequences.generated - 1
    late: list[tuple[Row, NDArray[np.int64]]] = []
    for row, length, answer in zip(rows, call.lengths, sequences.answers(), strict=True):
        generated = min(stored, ends.get(row, stored), row.exact_length - length)
        row.rewind(length + generated)
        if generated < stored:
            late.append((row, answer[generated:stored]))
    if late:
        call.cache.generate_loop.extend(
            [row for row, _ in late],
            [tokens for _, tokens in late],
            [row.exact_position + np.arange(len(tokens)) for row, tokens in late],
        )


def steps_with_callbacks(call: PagedCall) -> bool:
    """Whether the user's code has a say between two steps: a criterion, or a streamer that may change the model."""
    return bool(_custom_criteria(call)) or (call.streamer is not None and _may_change_model(call.streamer))


def _may_change_model(callback: object) -> bool:
    known = type(callback) in _HARMLESS or reads_tokens_alone(callback)
    return not (known or getattr(callback, "leaves_model_alone", False))


def _custom_criteria(call: PagedCall) -> list[Callable[..., Any]]:
    """Return the criteria beyond those that ``Sequences`` checks by itself."""
    return [entry for entry in call.criteria if type(entry) not in (MaxLengthCriteria, EosTokenCriteria)]


class Sequences:
    """The sequences on the host, ``generated`` (G) tokens of each row, and HuggingFace's rules for when each ends."""

    def __init__(self, call: PagedCall) -> None:
        batch, self._prompt = call.input_ids.shape
        self.max_new = call.max_new
        self.generated = 0
        self._call = call
        self._ids = torch.empty((batch, self._prompt + self.max_new), dtype=torch.int64, device="cpu")
        self._columns = self._ids.numpy()
        self._columns[:, : self._prompt] = call.ids
        self._running = set(range(batch))
        self._tokens_of_ended = 0
        ends = [entry.eos_token_id for entry in call.criteria if type(entry) is EosTokenCriteria]
        eos = [call.copies.of(tokens).tolist() for tokens in ends]
        self.eos = frozenset(itertools.chain(*eos))
        # Without an EOS criterion HuggingFace lets a row that another criterion ended run on, unpadded.
        self._pads = any(hasattr(entry, "eos_token_id") for entry in call.criteria)
        pad = pad_token(call.config)
        self.pad_token = 0 if pad is None else int(call.copies.of(pad))
        self._custom = _custom_criteria(call)
        self.callbacks = [*self._custom, *([] if call.streamer is None else [call.streamer])]
        self.step_scores, more = StepScores(call), call.more
        self.step_states = None if more is None else more.steps(call)

    @property
    def may_change_model(self) -> bool:
        """Whether user code runs between steps that might change the model."""
        return any(map(_may_change_model, self.callbacks))

    @property
    def new_tokens(self) -> int:
        """The tokens of all rows, without pads after a row's end."""
        return self._tokens_of_ended + len(self._running) * self.generated

    @property
    def length(self) -> int:
        return self._prompt + self.generated

    @property
    def done(self) -> bool:
        """Whether every row has ended."""
        return self.generated == self.max_new or not self._running

    def append(self, tokens: Sequence[int]) -> list[int]:
        """Take one token a row; return the rows that ended with it and need no more steps."""
        running = self._running
        if NOT_A_TOKEN in tokens and (wrong := [row for row in running if tokens[row] == NOT_A_TOKEN]):
            raise RuntimeError(
                f"row {min(wrong)}: no token can be drawn after {self.generated} new ones, because its logits are NaN, "
                "+inf or all -inf; check the weights and their dtype, or the logits processors"
            )
        if self._pads and len(running) < len(tokens):
            tokens = [token if row in running else self.pad_token for row, token in enumerate(tokens)]
        self._columns[:, self._prompt + self.generated] = tokens
        self.generated += 1
        ended = set() if self.eos.isdisjoint(tokens) else {row for row in running if tokens[row] in self.eos}
        for entry in self._custom:
            ids = self.result()
            scores = self.step_scores.scores(ids)
            flags = torch.zeros(len(ids), dtype=torch.bool, device=ids.device) | entry(ids, scores)
            ended.update(row for row, flag in enumerate(flags.tolist()) if flag)
        if self._call.streamer is not None:
            self._call.streamer.put(torch.tensor(tokens, device="cpu"))
        if not ended:
            return []
        self._running = running - ended
        self._tokens_of_ended += (len(running) - len(self._running)) * self.generated
        return sorted(running & ended) if self._pads else []

    def answers(self) -> list[NDArray[np.int64]]:
        """Return each row's tokens so far, pads after its end included."""
        return list(self._columns[:, self._prompt : self.length])

    def on_host(self) -> Tensor:
        """``[B, T + G]`` int64, overwritten by later tokens."""
        return self._ids[:, : self.length]

    def result(self) -> Tensor:
        """``[B, T + G]`` int64 on the caller's device."""
        return self.on_host().to(self._call.input_ids.device)

    def finish(self) -> Tensor | GenerateDecoderOnlyOutput:
        """End the stream and return what ``generate`` returns."""
        if self._call.streamer is not None:
            self._call.streamer.end()
        if not self._call.config.return_dict_in_generate:
            return self.result()
        ids = self.result()
        cache: dict[str, Any] = {output_field(GenerateDecoderOnlyOutput): self._call.cache}
        more = {} if self.step_states is None else self.step_states.outputs(self.generated)
        output = GenerateDecoderOnlyOutput(
            sequences=ids,  # type: ignore[arg-type]
            scores=self.step_scores.scores(ids),  # type: ignore[arg-type]
            logits=self.step_scores.logits(self.generated),  # type: ignore[arg-type]
            hidden_states=more.get("hidden_states"),
            **cache,
        )
        if "emitted" in more:
            output["emitted"] = more["emitted"]
        return output
