"""The decoding loops: one that stays a step ahead of what it has read, and one that lets processors see each step.

HuggingFace's ``generate`` prepares everything as always (inputs, config, cache, processors, stopping criteria) and
then calls the model's ``_sample``; for a wrapped model that leads here. What these loops lack goes back to
HuggingFace's own.

Shapes: B rows, T prompt columns, G tokens generated so far, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import (
    ConfidenceCriteria,
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)
from transformers.generation.streamers import (
    AsyncTextIteratorStreamer,
    BaseStreamer,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from compiled_llm.compilation.sampling import NOT_A_TOKEN, Sampling, draw, new_seeds
from compiled_llm.execution.limits import pages_needed
from compiled_llm.execution.threads.interrupts import allowed
from compiled_llm.huggingface.cache_columns import Addition
from compiled_llm.huggingface.host_copies import HostCopies
from compiled_llm.huggingface.paged_cache import PagedCache
from compiled_llm.kvcache.row import Row

if TYPE_CHECKING:
    from compiled_llm.execution.device_model import PagedModel
    from compiled_llm.huggingface.handle import CompiledModel

# What these do between steps is known; classes derived from them may do anything.
_HARMLESS = (
    ConfidenceCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
    AsyncTextIteratorStreamer,
    TextIteratorStreamer,
    TextStreamer,
)


@dataclass(frozen=True)
class Call:
    """One call of ``generate``, as HuggingFace has prepared it.

    Attributes:
        runtime: the wrapped model's ``compiled``.
        cache: it owns the rows.
        copies: what has been read of tensors on the device.
        input_ids: ``[B, T]`` int64 prompts, padded on the left; with a cache that holds tokens the whole text so far,
            or what is new of it.
        first: the column of the cache that ``input_ids`` begin at.
        additions: what is new in each row.
        position_ids: ``[B, T']`` or ``[1, T']``, the last of them for the last column, or None.
        embedded: whether embeddings stand for the tokens, and ``input_ids`` is empty.
        processors: what changes logits, settings such as the temperature included.
        criteria: what ends rows.
        config: everything else.
        streamer: gets each step's tokens.
    """

    runtime: CompiledModel
    cache: PagedCache
    copies: HostCopies
    input_ids: Tensor
    first: int
    additions: list[Addition]
    position_ids: Tensor | None
    embedded: bool
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    streamer: BaseStreamer | None

    @classmethod
    def of(
        cls,
        runtime: CompiledModel,
        cache: PagedCache,
        copies: HostCopies,
        input_ids: Tensor,
        model_kwargs: Mapping[str, Any],
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        streamer: BaseStreamer | None,
    ) -> Call:
        """Read what HuggingFace hands to a decoding method.

        Raises:
            ValueError: the cache does not fit the rows or their mask.
        """
        batch, tokens = model_kwargs.get("inputs_embeds", input_ids).shape[:2]
        mask, seen = model_kwargs.get("attention_mask"), cache.seen
        if mask is None:  # HuggingFace drops one that hides nothing, and notes its width
            mask = torch.ones(batch, getattr(config, "_mask_length", tokens), dtype=torch.long)
        first = seen if mask.shape[1] > tokens else 0
        rows = cache.additions(batch, copies.of(mask), first, max(seen, first + tokens))
        return cls(
            runtime,
            cache,
            copies,
            input_ids,
            first,
            rows,
            model_kwargs.get("position_ids"),
            "inputs_embeds" in model_kwargs,
            processors,
            criteria,
            config,
            streamer,
        )

    @property
    def last(self) -> int:
        """One past the column of the last token given."""
        return self.first + self.input_ids.shape[1]

    @property
    def most_new(self) -> int:
        """How many tokens each row can get at most."""
        return most_new(self.criteria, self.input_ids)

    @property
    def lengths(self) -> list[int]:
        """How many tokens each row has before the first new one is chosen."""
        return [row.length for row in self.additions]

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """``input_ids`` on the host."""
        ids: Tensor = self.copies.of(self.input_ids)
        return ids.numpy().astype(np.int64)

    @cached_property
    def tokens(self) -> list[NDArray[np.int64]]:
        """The tokens that are new in each row, on the host."""
        return [own[row.columns - self.first] for own, row in zip(self.ids, self.additions, strict=True)]

    @cached_property
    def leaders(self) -> list[int]:
        """For each row the first one that begins with the same tokens; itself where the cache holds some already."""
        if self.cache.runner.rows:
            return list(range(len(self.tokens)))
        first: dict[bytes, int] = {}
        return [first.setdefault(tokens.tobytes(), seat) for seat, tokens in enumerate(self.tokens)]

    @property
    def returns_cache(self) -> bool:
        """Whether the cache, rows and all, goes to the user."""
        return returns_cache(self.config, self.cache)

    @property
    def wants_scores(self) -> bool:
        """Whether the caller gets each step's scores or logits."""
        return bool(self.config.return_dict_in_generate and (self.config.output_scores or self.config.output_logits))

    @property
    def drafted(self) -> int:
        """How many tokens a loop of HuggingFace's may store beyond the last; draft models keep to it."""
        return max(0, (self.config.prompt_lookup_num_tokens or 0) - 1)

    @property
    def paged(self) -> PagedModel:
        """The model's device side."""
        return self.cache.runner.paged

    def pages_needed(self) -> int:
        """Return how many pages our loops may need beyond those that the cache has."""
        if not self.cache.runner.rows:
            common = [0 if leads == seat else self.lengths[seat] - 1 for seat, leads in enumerate(self.leaders)]
            return pages_needed(self.paged, self.lengths, self.most_new, common)
        return sum(row.missing(length, kept) for row, length, kept in self._grown(self.most_new))

    def pages_needed_by_huggingface(self) -> int:
        """Return how many pages a loop of HuggingFace's may need, whose beams go on from each other."""
        most, beams = self.most_new + self.drafted, self.config.num_beams or 1
        if not self.cache.runner.rows:
            copies = 1 if self.embedded else max(beams, self.config.num_return_sequences or 1)
            common = [length if seat % copies else 0 for seat, length in enumerate(self.lengths)]
            return pages_needed(self.paged, self.lengths, most, common)
        if beams == 1:
            return sum(row.missing(length, kept) for row, length, kept in self._grown(most))
        pool = self.paged.pool
        return sum(pool.pages_for(length) - kept // pool.page_size for _, length, kept in self._grown(most))

    def _grown(self, most_new: int) -> list[tuple[Row, int, int]]:
        """Return each row, what it holds at the end, and what it keeps of what it holds now."""
        both = zip(self.cache.runner.rows, self.additions, strict=True)
        return [(row, addition.length + most_new - 1, addition.kept) for row, addition in both]


def most_new(criteria: StoppingCriteriaList, input_ids: Tensor) -> int:
    """Return how many tokens each row can get at most; HuggingFace checks lengths after a token, so never none."""
    lengths = [entry.max_length for entry in criteria if isinstance(entry, MaxLengthCriteria)]
    return max(1, min(lengths) - input_ids.shape[1])


def returns_cache(config: GenerationConfig, cache: PagedCache) -> bool:
    """Whether the cache, rows and all, goes to the user."""
    return bool(config.return_dict_in_generate or getattr(cache, "_is_user_defined", False))


def obstacle(model: PreTrainedModel, call: Call) -> str | None:
    """Return why our loops cannot serve this call, or None."""
    if call.embedded:
        return "inputs_embeds"
    if not all(len(row.columns) and row.columns[-1] == call.last - 1 for row in call.additions):
        return "no token that the cache does not hold"
    if model._forward_hooks or model._forward_pre_hooks:
        return "forward hooks on the model itself"
    if _has_own_positions(call):
        return "position_ids of your own"
    return None


def _has_own_positions(call: Call) -> bool:
    """Whether the positions are not those that counting each row's unmasked tokens gives."""
    if call.position_ids is None:
        return False
    given = call.copies.of(call.position_ids).expand(len(call.input_ids), -1).numpy()
    shift = call.last - given.shape[1]
    ahead = [row.position - row.length for row in call.cache.runner.rows] or [0] * len(given)
    for own, start, addition in zip(given, ahead, call.additions, strict=True):
        counted = start + np.arange(addition.kept, addition.length)
        there = addition.columns >= shift
        if (own[addition.columns[there] - shift] != counted[there]).any():
            return True
    return False


def fast_loop(call: Call, settings: Sequence[Sampling | None]) -> Tensor | GenerateDecoderOnlyOutput:
    """Generate with tokens chosen inside the graph; the caller holds the turn.

    They are read one step late where the device runs beside the host.

    Args:
        call: the call.
        settings: how each row chooses its tokens; the most likely ones where None.

    Returns:
        ``[B, T + G]`` int64 on the device of ``input_ids``; in HuggingFace's output class, with the cache, where
        ``return_dict_in_generate`` asks for it.

    Raises:
        RuntimeError: a row's logits are NaN or all -inf.
    """
    sequences = _Sequences(call)
    cache, runner = call.cache, call.cache.runner
    with cache.extended(call.additions, call.last) as rows:
        runner.restart()
        for row, tokens, sampling in zip(rows, _begun(call, rows), settings, strict=True):
            runner.resume(row, tokens, sequences.most_new, sampling)
        ends: dict[Row, int] = {}
        watched = sequences.may_change_model
        while not sequences.done:
            unchanged = runner.steps > 0 and not watched
            chosen = runner.step(unchanged=unchanged) if runner.steps < sequences.most_new else runner.drain()
            if not chosen and not (runner.asynchronous and runner.prepared):
                chosen = runner.drain()  # the first tokens do not wait for decode to be compiled
            if not chosen:
                continue
            ended = _append(call, sequences, [chosen.get(row, 0) for row in rows])
            if ended and call.returns_cache:
                ends.update({rows[index]: sequences.generated for index in ended})
            elif ended:
                for index in ended:
                    runner.release(rows[index])
        if call.returns_cache:
            _settle(call, rows, ends, sequences)
    call.runtime.counters.add_steps(runner.steps)
    if call.returns_cache:
        cache.count(sequences.generated - 1)
    return sequences.finish()


def _append(call: Call, sequences: _Sequences, tokens: Sequence[int]) -> list[int]:
    """Take one token a row; another loop may run meanwhile if it waits, or if code of the user's looks at the token."""
    turn = call.runtime.turn
    if not (sequences.callbacks or turn.wanted):
        return sequences.append(tokens)
    with turn.yielded(), allowed():
        return sequences.append(tokens)


def _begun(call: Call, rows: list[Row]) -> Iterator[NDArray[np.int64]]:
    """Promise each row its pages, and give the tokens to compute of it: those that no other row begins with as well.

    All are computed at once: in each layer, every row's keys and values are stored before any row attends.
    """
    for row, leads, tokens, length in zip(rows, call.leaders, call.tokens, call.lengths, strict=True):
        shared = 0 if rows[leads] is row else row.begin_as(rows[leads], length)
        row.reserve(length + call.most_new - 1)
        yield tokens[shared:]


def _settle(call: Call, rows: list[Row], ends: dict[Row, int], sequences: _Sequences) -> None:
    """Leave in the cache what HuggingFace leaves there: all columns but the last, pads after a row's end included.

    The loop ran a step ahead of what it read, and rows that had ended went on with tokens of their own.

    Args:
        call: the call.
        rows: all its rows.
        ends: how many tokens a row had got when it ended.
        sequences: where pads come from.
    """
    stored = sequences.generated - 1
    late: list[tuple[Row, int]] = []
    for row, length in zip(rows, call.lengths, strict=True):
        own = min(stored, ends.get(row, stored))
        row.rewind(length + own)
        if own < stored:
            late.append((row, stored - own))
    if late:
        call.cache.runner.extend(
            [row for row, _ in late],
            [np.full(count, sequences.pad_token, dtype=np.int64) for _, count in late],
            [row.position + np.arange(count) for row, count in late],
        )


def processed_loop(call: Call) -> Tensor | GenerateDecoderOnlyOutput:
    """Generate with HuggingFace's processors run between steps, on the device, in the caller's thread.

    The caller holds the turn. Each step is read before the next is launched, as in HuggingFace's own loop: that is
    what processors of any kind and recorded scores cost.

    Returns:
        As ``fast_loop``.

    Raises:
        RuntimeError: a row's scores are NaN or all -inf.
    """
    sequences = _Sequences(call)
    runner, device = call.cache.runner, call.input_ids.device
    seeds = new_seeds(len(call.input_ids)).to(device) if call.config.do_sample else None
    with call.cache.extended(call.additions, call.last) as rows:
        tokens = list(_begun(call, rows))
        positions = [row.position + np.arange(len(own)) for row, own in zip(rows, tokens, strict=True)]
        logits = runner.extend(rows, tokens, positions)
        while True:
            with call.runtime.turn.yielded(), allowed():
                raw = logits.to(device=device, dtype=torch.float32, copy=True)
                scores = call.processors(cast(torch.LongTensor, sequences.result()), raw)
                sequences.record(scores, raw)
                counted = torch.tensor([row.position for row in rows], device=device)
                sequences.append(draw(scores, seeds, counted).tolist())
            if sequences.done:
                break
            logits = runner.decode(sequences.last().to(logits.device), [row.position for row in rows])
    call.cache.count(sequences.generated - 1)
    call.runtime.counters.add_steps(sequences.generated)
    return sequences.finish()


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
        pad_token: what follows in a row that has ended.
        callbacks: what looks at each step's tokens, criteria and a streamer.
    """

    def __init__(self, call: Call) -> None:
        batch, self._prompt = call.input_ids.shape
        self.most_new = call.most_new
        self.generated = 0
        self._call = call
        self._ids = torch.empty((batch, self._prompt + self.most_new), dtype=torch.int64)
        self._columns = self._ids.numpy()
        self._columns[:, : self._prompt] = call.ids
        self._running = set(range(batch))
        ends = [entry.eos_token_id for entry in call.criteria if isinstance(entry, EosTokenCriteria)]
        eos = [call.copies.of(tokens).tolist() for tokens in ends]
        self._eos = frozenset(itertools.chain(*eos))
        # Without an EOS criterion HuggingFace lets a row that another criterion ended run on, unpadded.
        self._pads = any(hasattr(entry, "eos_token_id") for entry in call.criteria)
        pad = call.config._pad_token_tensor
        self.pad_token = 0 if pad is None else int(call.copies.of(pad))
        self._custom: list[Callable[..., Any]] = [
            entry for entry in call.criteria if type(entry) not in (MaxLengthCriteria, EosTokenCriteria)
        ]
        self.callbacks = [*self._custom, *([] if call.streamer is None else [call.streamer])]
        self._scores: tuple[Tensor, ...] | None = () if self._wants("output_scores") else None
        self._logits: tuple[Tensor, ...] | None = () if self._wants("output_logits") else None

    def _wants(self, output: str) -> bool:
        return bool(self._call.config.return_dict_in_generate and getattr(self._call.config, output))

    @property
    def may_change_model(self) -> bool:
        """Whether code runs between steps that nobody knows to leave the model alone."""
        return not all(
            type(callback) in _HARMLESS or getattr(callback, "leaves_model_alone", False) for callback in self.callbacks
        )

    @property
    def length(self) -> int:
        """Prompt columns and tokens generated."""
        return self._prompt + self.generated

    @property
    def done(self) -> bool:
        """Whether every row has ended."""
        return self.generated == self.most_new or not self._running

    def record(self, scores: Tensor, logits: Tensor) -> None:
        """Keep a step's scores and logits where the caller asked for them."""
        if self._scores is not None:
            self._scores += (scores,)
        if self._logits is not None:
            self._logits += (logits,)

    def append(self, tokens: Sequence[int]) -> list[int]:
        """Take one token a row; return the rows that this ended and that need no more steps."""
        running = self._running
        if NOT_A_TOKEN in tokens and (wrong := [row for row in running if tokens[row] == NOT_A_TOKEN]):
            raise RuntimeError(
                f"row {min(wrong)}: no token can be chosen after {self.generated} new ones, because its logits are NaN "
                "or all -inf; check the weights and their dtype, or the logits processors that mask tokens"
            )
        if self._pads and len(running) < len(tokens):
            tokens = [token if row in running else self.pad_token for row, token in enumerate(tokens)]
        self._columns[:, self.length] = tokens
        self.generated += 1
        ended = set() if self._eos.isdisjoint(tokens) else {row for row in running if tokens[row] in self._eos}
        for entry in self._custom:
            ids = self.result()
            flags = torch.zeros(len(ids), dtype=torch.bool, device=ids.device) | entry(ids, self._scores)
            ended.update(row for row, flag in enumerate(flags.tolist()) if flag)
        if self._call.streamer is not None:
            self._call.streamer.put(torch.tensor(tokens))
        if not ended:
            return []
        self._running = running - ended
        return sorted(running & ended) if self._pads else []

    def last(self) -> Tensor:
        """``[B]`` int64 on the host: the last token of each row."""
        return self._ids[:, self.length - 1]

    def result(self) -> Tensor:
        """``[B, T + G]`` int64 on the caller's device."""
        return self._ids[:, : self.length].to(self._call.input_ids.device)

    def finish(self) -> Tensor | GenerateDecoderOnlyOutput:
        """End the stream and return what ``generate`` returns."""
        if self._call.streamer is not None:
            self._call.streamer.end()
        if not self._call.config.return_dict_in_generate:
            return self.result()
        return GenerateDecoderOnlyOutput(
            sequences=self.result(),  # type: ignore[arg-type]
            scores=self._scores,  # type: ignore[arg-type]
            logits=self._logits,  # type: ignore[arg-type]
            past_key_values=self._call.cache,
        )
