"""Hidden states and outputs of traced hooks for a request's tokens, as steps copy them to the host."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from compiled_llm.execution.state.emitted_steps import EmittedSteps
from compiled_llm.execution.state.staging import Readback, Readbacks
from compiled_llm.execution.threads.executor import Executor


class WantedEmitted(NamedTuple):
    """The hidden states and outputs of traced hooks that a request asks for.

    Attributes:
        layers: of each layer as the user has named it, the number that steps give it: 0 for the embeddings; None if
            hidden states are not wanted.
        names: of what traced hooks emit; None if it is not wanted.
        hidden_size: of the model.
        dtype: of the model.
    """

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
    """Launches of the same rows, and what they have emitted, on the device.

    Attributes:
        emitted: by each launch, also by those that come to nothing.
        read: how many of them count, the first ones: their tokens have been read.
        executor: the model's.
    """

    def __init__(self, emitted: EmittedSteps, executor: Executor) -> None:
        self.emitted, self.executor = emitted, executor
        self.read = 0


class RequestEmitted:
    """A request's hidden states and hooks' outputs, of its tokens from the first on.

    They stay on the device, so that no step waits for a copy, until the request has ended or they take much memory. The
    loop's thread adds to them, and any thread may read them.

    Attributes:
        wanted: what is kept.
    """

    def __init__(self, wanted: WantedEmitted) -> None:
        """Begin without tokens."""
        self.wanted = wanted
        self._earlier = 0  # how many tokens have it without the last part
        self._parts: list[_Kept] = []
        self._copies: list[_OnItsWay] = []
        self._joined: dict[tuple[int | str, ...], tuple[int, Tensor]] = {}  # so many copies in one, by their keys
        self._executor: Executor | None = None

    @property
    def tokens(self) -> int:
        """How many tokens have it."""
        return max([self._earlier, *(part.end for part in self._parts[-1:])])

    @property
    def copied(self) -> int:
        """How many tokens have it on the host, or on its way there."""
        key = next(iter(self.wanted.keys))  # each is copied of the same tokens
        return sum(copy.shape[1] for copy in self._copies[:] if key in copy.keys)

    def append(self, steps: KeptSteps, tokens: slice, first: int) -> None:
        """Add that of steps, each of which has ``tokens`` of the request, from position ``first`` on.

        Tokens that have it already were computed again. A gap cannot be: a request computes all that it has none of.
        """
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
        self._copies += [_OnItsWay.of(keys, tensors) for keys, tensors in found.items()]

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
    """The part of a request's hidden states and hooks' outputs that some launches have on the device.

    Attributes:
        steps: the launches.
    """

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


class _OnItsWay(NamedTuple):
    """Tensors of one dtype and width on their way to the host.

    Attributes:
        keys: of K tensors.
        readback: their bytes.
        dtype: of each.
        shape: of all of them, ``[K, tokens, ...]``.
    """

    keys: tuple[int | str, ...]
    readback: Readback
    dtype: torch.dtype
    shape: torch.Size

    @classmethod
    def of(cls, keys: tuple[int | str, ...], tensors: list[Tensor]) -> _OnItsWay:
        """Start to copy ``[K, n, ...]`` each, tokens one after the other."""
        whole = torch.cat(tensors, dim=1) if len(tensors) > 1 else tensors[0].contiguous()
        return cls(keys, Readbacks.start_once(whole.view(-1).view(torch.uint8)), whole.dtype, whole.shape)

    def result(self) -> Tensor:
        """Return them, ``[K, tokens, ...]``."""
        return self.readback.memory().view(self.dtype).view(self.shape)


def joined_on_host(tensors: Sequence[Tensor]) -> Tensor:
    """Return contiguous tensors of the host, ``[K, n, *W]`` of one dtype and width, as one; one alone as it is.

    In one piece of memory from NumPy, which asks for huge pages: where those of a request's layers were joined one by
    one, touching new memory took longer than to copy. ``torch.cat`` would also start threads for each, milliseconds on
    many cores that others use, too.
    """
    first, *others = tensors
    nbytes = sum(tensor.nbytes for tensor in tensors)
    if not (others and nbytes):
        return torch.cat([*tensors], dim=1) if others else first
    parts = [tensor.reshape(len(first), -1).view(torch.uint8).numpy() for tensor in tensors]
    whole = np.empty(nbytes, dtype=np.uint8)
    np.concatenate(parts, axis=1, out=whole.reshape(len(first), -1))
    tokens = sum(tensor.shape[1] for tensor in tensors)
    return torch.from_numpy(whole).view(first.dtype).view(len(first), tokens, *first.shape[2:])
