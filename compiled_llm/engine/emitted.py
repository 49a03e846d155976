"""Hidden states and outputs of traced hooks for requests' tokens: copied on the device, and later to the host."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compiled_llm.compilation.graphs.outputs import Emitted, StepOutputs
from compiled_llm.engine.loop_settings import LoopSettings
from compiled_llm.engine.request_part import RequestPart
from compiled_llm.engine.steps.plan import StepPlan
from compiled_llm.engine.steps.request import InvalidRequestError, Request, RequestError
from compiled_llm.engine.steps.taps import EngineTap, PlanTap, UnreadOutput
from compiled_llm.execution.batch import TokenSpan
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.state.staging import Readback, Readbacks
from compiled_llm.execution.taps.emitted_steps import EmittedSteps
from compiled_llm.execution.threads.executor import Executor
from compiled_llm.kvcache.memory import free_bytes
from compiled_llm.model.facts import ModelFacts
from compiled_llm.model.traced.hooks import TracedHooks
from compiled_llm.requests.columns import ReadAnswer, encoded

if TYPE_CHECKING:
    from msgspec import Raw

    from compiled_llm.engine import emitted as this
    from compiled_llm.engine.steps.taps import TapPart

    checked: TapPart = this

_HOST = torch.device("cpu")

_EMITTED_ON_DEVICE = 256 << 20
"""Bytes that steps emit of requests' tokens before all of it is copied to the host."""
# Each such copy is put together with those before when the request has ended, so few should be needed.

_SENT_AT_ONCE = 2**20  # bytes, at least one token's


NAME = "hidden_states"
"""By which a request has its ``RequestEmitted``."""


class EmittedTap(EngineTap):
    """The hidden states and hook outputs that an engine loop's requests ask for."""

    _bytes_on_device = 0  # since all was last copied to the host
    _reader: EmittedReader | None = None  # of the last plan

    @staticmethod
    def asked(**asked: Any) -> Callable[[Request], None]:
        """``hidden_states`` and ``emitted`` as of ``Engine.submit``, of a model with these ``facts``."""
        wanted = wanted_of(**asked)

        def enter(request: Request) -> None:
            request.parts[NAME] = RequestEmitted(request, wanted)

        return enter

    @staticmethod
    def check_room(asked: Iterable[Request], unfinished: Iterable[Request]) -> None:
        """Of a request that may end early, its prompt's count: its answer takes memory as it goes."""
        if not (new := sum(map(_bytes_left, asked))):
            return
        needed, free = new + sum(map(_bytes_left, unfinished)), free_bytes(_HOST)
        if needed > free:
            raise ValueError(
                f"hidden_states: those of the prompts and answers take {needed / 2**30:.1f} GiB of the host's memory, "
                f"and {free / 2**30:.1f} GiB are free; give fewer layers, prompts or max_tokens at once"
            )

    def of_plan(self, plan: StepPlan) -> PlanTap | None:
        both = ((request, request.part(NAME)) for request in plan.requests)
        wanting = [(request, emitted) for request, emitted in both if emitted is not None]
        self._reader = EmittedReader(self.model_runner, wanting) if wanting else None
        return self._reader

    def read(self, arrived: Sequence[UnreadOutput], ended: Sequence[Request]) -> None:
        """Start to copy what steps have emitted to the host: of requests that have ended; of all if it is much."""
        launches = [launch for launch in arrived if isinstance(launch, ArrivingEmitted)]
        if not launches:
            return
        self._bytes_on_device += sum(launch.nbytes for launch in launches)
        is_much = self._bytes_on_device > _EMITTED_ON_DEVICE
        for request in ended:
            if (emitted := request.part(NAME)) is not None:
                emitted.end()
        if is_much:
            self._bytes_on_device = 0
            for emitted in self._wanting():
                emitted.copy()
        elif ended and next(self._wanting(), None) is None:  # all that was on the device has left it
            self._bytes_on_device = 0
        if (is_much or ended) and self._reader is not None:
            self._reader.begin_again()

    def _wanting(self) -> Iterator[RequestEmitted]:
        """Yield what is kept for requests that have not ended, of those that run first."""
        requests = itertools.chain(self.scheduler.running, self.scheduler.waiting)
        parts = (request.part(NAME) for request in requests)
        return (emitted for emitted in parts if emitted is not None)


TAP: type[EngineTap] = EmittedTap


class _Span(NamedTuple):
    """The kept tokens that are a request's, from position ``first`` on."""

    request: Request
    emitted: RequestEmitted
    tokens: slice
    first: int

    def after(self, launches: int) -> int:
        """Return the position after so many launches."""
        return int(self.first + launches * (self.tokens.stop - self.tokens.start))


class ArrivingEmitted(NamedTuple):
    """The outputs of one launch whose tokens have not been read yet, and the launches of the same rows."""

    steps: KeptSteps
    spans: Sequence[_Span]
    keys: frozenset[int | str]
    nbytes: int

    def hand_out(self) -> Mapping[Request, RequestError]:
        """Give it to requests that have not ended; return those that want what the launch has not emitted."""
        self.steps.read += 1
        return self._begin() if self.steps.read == 1 else {}

    def continues_with(self, spans: Sequence[_Span], kept: Sequence[slice], keys: frozenset[int | str]) -> bool:
        """Return whether a launch of these is of the same rows, and of the tokens that follow those of the last one."""
        launches = self.steps.emitted.count
        going_on = [(span.request, span.after(launches)) for span in self.spans]
        wanted = [(span.request, span.first) for span in spans]
        return (self.steps.emitted.kept, self.keys, going_on) == (kept, keys, wanted)

    def _begin(self) -> Mapping[Request, RequestError]:
        failed: dict[Request, RequestError] = {}
        for request, emitted, tokens, first in self.spans:
            if lacking := emitted.wanted.keys.difference(self.keys):
                failed[request] = _lacks(min(lacking, key=str))
            elif not request.done:
                emitted.append(self.steps, tokens, first)
        return failed


def _lacks(key: int | str) -> InvalidRequestError:
    if isinstance(key, str):
        return InvalidRequestError(f"emitted: no traced hook emits {key!r}; leave it out")
    return InvalidRequestError(f"hidden_states: the forward of this model gives none of layer {key}; leave it out")


class EmittedReader(PlanTap):
    """Reader of what each step of one plan emits of its requests' tokens."""

    def __init__(self, model_runner: ModelRunner, wanting: Iterable[tuple[Request, RequestEmitted]]) -> None:
        super().__init__()
        self._executor = model_runner.thread
        self._wanting = {request.running_row: (request, emitted) for request, emitted in wanting}
        self._keys = {key for _, emitted in self._wanting.values() for key in emitted.wanted.keys}
        self.wants = ("hidden_states",) if any(isinstance(key, int) for key in self._keys) else ()
        self._last: ArrivingEmitted | None = None  # what was read last, with its arguments
        self._spans: Sequence[TokenSpan] = ()
        self._later = 0

    def launched(self, spans: Sequence[TokenSpan], outputs: StepOutputs, later: int = 0) -> None:
        """Copy what is wanted of a launch, on the device."""
        launch = self._last
        if launch is None or spans is not self._spans or later != self._later + 1:
            launch = self._of(spans, outputs.emitted, later)
        self._last, self._spans, self._later = launch, spans, later
        if launch.spans:
            launch.steps.emitted.append(outputs.emitted)
            self._arriving.append(launch)

    def _of(self, spans: Sequence[TokenSpan], emitted: Emitted, later: int) -> ArrivingEmitted:
        """Return the last launch if this one goes on with it, as after rows got pages; else the first of others."""
        found: list[_Span] = []
        kept: list[slice] = []  # of the packed tokens; requests next to each other have one
        at = count = 0
        for row, first, size in spans:
            if row in self._wanting:
                found.append(_Span(*self._wanting[row], slice(count, count + size), first + later))
                start = kept.pop().start if kept and kept[-1].stop == at else at
                kept.append(slice(start, at + size))
                count += size
            at += size
        keys = frozenset(self._keys.intersection(emitted))
        if self._last is not None and self._last.continues_with(found, kept, keys):
            return self._last
        nbytes = sum(count * emitted[key][:1].nbytes for key in keys)
        return ArrivingEmitted(KeptSteps(EmittedSteps(kept, keys), self._executor), found, keys, nbytes)

    def begin_again(self) -> None:
        """Keep the next launches apart from those before, whose memory is then given back."""
        self._last = None


class WantedEmitted(NamedTuple):
    """The hidden states and outputs of traced hooks that a request asks for; None for either if it does not."""

    # ``layers`` are numbers that steps give, 0 for the embeddings, by the user's names.

    layers: Mapping[int, int] | None
    names: Sequence[str] | None
    hidden_size: int
    dtype: torch.dtype

    @property
    def keys(self) -> set[int | str]:
        """Under which steps emit it."""
        return {*(self.layers or {}).values(), *(self.names or ())}

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's hidden states; hooks' outputs are not counted, since their sizes are known only later."""
        return len(set((self.layers or {}).values())) * self.hidden_size * self.dtype.itemsize


class KeptSteps:
    """Launches of the same rows, and what they have emitted, on the device."""

    # Of these the first ``read`` count: their tokens have been read.

    def __init__(self, emitted: EmittedSteps, executor: Executor) -> None:
        self.emitted, self.executor = emitted, executor
        self.read = 0


class RequestEmitted(RequestPart):
    """A request's hidden states and hooks' outputs, of its tokens from the first on."""

    # They stay on the device, so that no step waits for a copy, until the request has ended or they take much memory.
    # The loop's thread adds to them, and any thread may read them.

    def __init__(self, request: Request, wanted: WantedEmitted) -> None:
        """Begin without tokens."""
        self.request, self.wanted = request, wanted
        self._earlier = 0  # how many tokens have it without the last part
        self._parts: list[_Kept] = []
        self._copies: list[_PendingCopy] = []
        self._joined: dict[tuple[int | str, ...], tuple[int, Tensor]] = {}  # so many copies in one, by their keys
        self._executor: Executor | None = None

    @property
    def tokens(self) -> int:
        """How many tokens have it."""
        return max([self._earlier, *(part.end for part in self._parts[-1:])])

    @property
    def needed(self) -> int:
        return self.tokens

    def needs_single_tokens(self, settings: LoopSettings) -> bool:
        return True

    # ---- read

    def completion(self, answer: ReadAnswer) -> Mapping[str, Any]:
        if self.request.done:
            self.end()
        # All but the last were fed in; a stop string may have come before others.
        fed = len(self.request.prompt) + max(1, len(answer.tokens_after(0))) - 1
        return {"hidden_states": self.hidden_states(fed), "emitted": self.by_name(fed)}

    takes_long = True

    def pieces(self, answer: ReadAnswer) -> Iterator[Raw | None]:
        """Yield parts of tensors: the layer or the name, torch's name of the dtype, the shape, and the numbers."""
        while not answer.done:
            yield None
        found = self.completion(answer).values()
        for key, tensor in itertools.chain.from_iterable(tensors.items() for tensors in found if tensors is not None):
            for part in tensor.split(max(1, _SENT_AT_ONCE // max(1, tensor[:1].nbytes))):
                numbers = part.contiguous().flatten().view(torch.uint8).numpy().tobytes()
                yield encoded((key, str(part.dtype).removeprefix("torch."), list(part.shape), numbers))

    @property
    def copied(self) -> int:
        """How many tokens have it on the host, or on its way there."""
        key = next(iter(self.wanted.keys))  # each is copied of the same tokens
        return sum(copy.shape[1] for copy in self._copies[:] if key in copy.keys)

    def append(self, steps: KeptSteps, tokens: slice, first: int) -> None:
        """Add that of steps, each of which has ``tokens`` of the request, from position ``first`` on."""
        # Tokens that have it already were computed again. A gap cannot be: a request computes all that it has none of.
        earlier = self.tokens
        assert earlier >= first, "tokens are computed one after the other"
        self._executor, self._earlier = steps.executor, earlier
        self._parts.append(_Kept(steps, tokens, first, earlier - first))

    def copy(self) -> None:
        """Start to copy to the host what is only on the device; wait for a thread that is about to."""
        if self._executor is not None and self._parts:
            self._executor.call(self._copy)

    def _copy(self) -> None:
        parts = self._parts[:]  # more may come meanwhile
        found: dict[tuple[int | str, ...], list[Tensor]] = {}
        for part in parts:
            for keys, tensors in part.take(self.wanted.keys).items():
                found.setdefault(keys, []).extend(tensors)
        del self._parts[: len(parts) - 1]  # these have got all of their tokens
        self._copies += [_PendingCopy.of(keys, tensors) for keys, tensors in found.items()]

    def end(self) -> None:
        """Copy the rest, and leave the device; there will be no more."""
        self.copy()
        self._earlier = self.tokens
        self._parts = []

    def hidden_states(self, tokens: int) -> dict[int, Tensor] | None:
        """Return those of at most the first ``tokens``, ``[tokens, hidden]`` by layer, as the user has named it."""
        if self.wanted.layers is None:
            return None
        none = torch.empty(0, self.wanted.hidden_size, dtype=self.wanted.dtype, device="cpu")
        of_number = {number: self._first(number, tokens, none) for number in self.wanted.layers.values()}
        return {asked: of_number[number] for asked, number in self.wanted.layers.items()}

    def by_name(self, tokens: int) -> dict[str, Tensor] | None:
        """Return what hooks have emitted of at most the first ``tokens``, ``[tokens, ...]`` each."""
        if self.wanted.names is None:
            return None
        return {name: self._first(name, tokens, torch.empty(0, device="cpu")) for name in self.wanted.names}

    def _first(self, key: int | str, tokens: int, none: Tensor) -> Tensor:
        self.copy()
        copies = [copy for copy in self._copies[:] if key in copy.keys]
        if not copies:
            return none[:tokens]
        if len({(copy.keys, copy.dtype, copy.shape[2:]) for copy in copies}) > 1:  # a hook's outputs have changed
            own = [copy.result()[copy.keys.index(key)] for copy in copies]
            return torch.cat(own)[:tokens]  # which promotes, or says what does not fit
        keys = copies[0].keys
        count, joined = self._joined.get(keys, (0, none))
        if count < len(copies):
            joined = joined_on_host([copy.result() for copy in copies])
            self._joined[keys] = len(copies), joined
        return joined[keys.index(key), :tokens]


class _Kept:
    """The part of a request's hidden states and hooks' outputs that some launches have on the device."""

    def __init__(self, steps: KeptSteps, tokens: slice, first: int, taken: int) -> None:
        """As ``RequestEmitted.append``; so many of its tokens are ``taken`` already."""
        self.steps = steps
        self._tokens, self._size = tokens, int(tokens.stop - tokens.start)
        self._first, self._taken = first, taken

    @property
    def end(self) -> int:
        """The position after its last token that counts."""
        return self._first + self.steps.read * self._size

    def take(self, keys: Collection[int | str]) -> dict[tuple[int | str, ...], list[Tensor]]:
        """Return that of the tokens that were not taken, as ``EmittedSteps.of``; nothing if there are none."""
        steps = self.steps.read
        first, computed_again = divmod(self._taken, self._size)
        self._taken = max(self._taken, steps * self._size)
        if first >= steps:
            return {}
        found = self.steps.emitted.of(keys, self._tokens, range(first, steps))
        return {names: [parts[0][:, computed_again:], *parts[1:]] for names, parts in found.items()}


class _PendingCopy(NamedTuple):
    """Tensors of K ``keys`` on their way to the host, ``[K, tokens, ...]`` of one dtype and width."""

    keys: tuple[int | str, ...]
    readback: Readback
    dtype: torch.dtype
    shape: torch.Size

    @classmethod
    def of(cls, keys: tuple[int | str, ...], tensors: list[Tensor]) -> _PendingCopy:
        """Start to copy ``[K, n, ...]`` each, tokens one after the other."""
        whole = torch.cat(tensors, dim=1) if len(tensors) > 1 else tensors[0].contiguous()
        return cls(keys, Readbacks.start_once(whole.view(-1).view(torch.uint8)), whole.dtype, whole.shape)

    def result(self) -> Tensor:
        """Return them, ``[K, tokens, ...]``."""
        return self.readback.memory().view(self.dtype).view(self.shape)


def joined_on_host(tensors: Sequence[Tensor]) -> Tensor:
    """Return contiguous tensors of the host, ``[K, n, *W]`` of one dtype and width, as one; one alone as it is."""
    # In one piece of memory from NumPy, which asks for huge pages: where those of a request's layers were joined one by
    # one, touching new memory took longer than to copy. ``torch.cat`` would also start threads for each, milliseconds
    # on many cores that others use, too.
    first, *others = tensors
    nbytes = sum(tensor.nbytes for tensor in tensors)
    if not (others and nbytes):
        return torch.cat([*tensors], dim=1) if others else first
    parts = [tensor.reshape(len(first), -1).view(torch.uint8).numpy() for tensor in tensors]
    whole = np.empty(nbytes, dtype=np.uint8)
    np.concatenate(parts, axis=1, out=whole.reshape(len(first), -1))
    tokens = sum(tensor.shape[1] for tensor in tensors)
    return torch.from_numpy(whole).view(first.dtype).view(len(first), tokens, *first.shape[2:])


def wanted_of(hidden_states: Sequence[int] | None, emitted: Sequence[str] | None, facts: ModelFacts) -> WantedEmitted:
    """Return what a request wants; ValueError if there is no such layer, or no hook that could emit any."""
    model = facts.model
    if hidden_states is not None and facts.stacks_hidden_states:
        raise ValueError(
            "hidden_states: layers of this model have several of each token, stacked, and steps give one; ask "
            "model.generate(output_hidden_states=True), or emit what you need from a traced hook"
        )
    layers = None if hidden_states is None else _layers(hidden_states, model)
    names = None if emitted is None else _names(emitted, facts.hooks)
    return WantedEmitted(layers, names, model.config.get_text_config(decoder=True).hidden_size, model.dtype)


def _layers(asked: Sequence[int], model: PreTrainedModel) -> Mapping[int, int]:
    last = model.config.get_text_config(decoder=True).num_hidden_layers
    all_of_them = f"0 for the embeddings to {last} for the last layer, or from the end, -1 to {-last - 1}"
    if not isinstance(asked, Sequence) or isinstance(asked, str) or not asked:
        raise ValueError(f"hidden_states={asked!r}: give a list of layers, {all_of_them}; None for none")
    for number in asked:
        if not isinstance(number, Integral) or isinstance(number, bool) or not -last - 1 <= number <= last:
            raise ValueError(f"hidden_states={asked!r}: {number!r} is no layer; give {all_of_them}")
    return {int(number): int(number) % (last + 1) for number in asked}


def _names(asked: Sequence[str], hooks: TracedHooks) -> Sequence[str]:
    if not isinstance(asked, Sequence) or isinstance(asked, str) or not asked:
        raise ValueError(f"emitted={asked!r}: give a list of the names that traced hooks emit; None for none")
    if wrong := [name for name in asked if not isinstance(name, str)]:
        raise ValueError(f"emitted={asked!r}: {wrong[0]!r} is no name; give those that traced hooks emit")
    if not hooks:
        raise ValueError(
            f"emitted={asked!r}: the model has no traced hooks; add one by compiled_llm.traced_hook(module, function)"
        )
    return list(asked)


def _bytes_left(request: Request) -> int:
    """Return what the hidden states of a request are known to take beyond those that the host has."""
    if (emitted := request.part(NAME)) is None:
        return 0
    known = max(len(request.prompt), emitted.tokens) if request.stop_token_ids else request.stored
    return int(max(0, known - emitted.copied) * emitted.wanted.token_bytes)
