"""One answer on its way through the engine: host facts, written by the loop alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiled_llm.compilation.sampling.sampling import NOT_A_TOKEN, Sampling
from compiled_llm.engine.request_part import RequestPart
from compiled_llm.engine.steps.constraint import Constraint
from compiled_llm.engine.steps.token_log import TokenLog
from compiled_llm.kvcache.row import Row
from compiled_llm.requests.answer import AnswerRecord
from compiled_llm.requests.listeners import Listeners
from compiled_llm.requests.outputs import FinishReason


class RequestError(RuntimeError):
    """The failure of one request; others go on."""


class InvalidRequestError(RequestError):
    """The request turns out to be impossible: it would fail again."""


_arrivals = itertools.count()


@dataclass(eq=False, kw_only=True)
class Request(AnswerRecord[RequestPart]):
    """One answer to one prompt."""

    prompt: NDArray[np.int64]  # ``[T]`` int64, at least one token, as the prefix cache knows it
    sampling: Sampling | None  # how its tokens are sampled; the most likely ones if None
    max_tokens: int  # with 0, the token that follows from its prompt is dropped
    stop_ids: frozenset[int] = frozenset()  # those of ``stop_token_ids`` that the user has named
    known_length: bool = False  # whether its answer has ``max_tokens`` tokens: nothing that it says ends it earlier
    priority: int = 0  # smaller ones run first
    deadline: float | None = None  # on ``time.monotonic``'s clock, when it ends with what it has; None for never
    salt: Hashable = None  # requests with equal ones may read each other's cached pages
    constraint: Constraint | None = None  # says on the host which tokens it may have next; None if nothing does
    prefix_owner: Request | None = None  # the answer whose prompt this one shares, and waits for; None for the first
    submitted: float = 0.0
    arrival: int = field(default_factory=_arrivals.__next__)  # counts requests as they come
    row: Row | None = None  # its pages while it runs
    # The log with those of its tokens that nobody has asked for since they were read, its place in there, and how many
    # tokens it had before.
    _followed: tuple[TokenLog, int, int] | None = field(default=None, init=False)
    # of the prefix cache when it was last admitted; others may not begin with its pages in another one
    generation: int = 0
    # how many of its prompt's tokens came from the prefix cache when it first ran. submitted, admitted, first_token,
    # finished: when it came, first ran, got a token and ended, on ``time.monotonic``'s clock
    cached: int | None = None
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None  # when its latest one was before it went on in its present group (``Latencies``)
    finished: float | None = None
    listeners: Listeners | None = None  # to its tokens as they come
    preemptions: int = 0  # how often it lost its pages
    # after how many tokens of its text a launch ends, so that others can begin with the state there
    checkpoints: tuple[int, ...] = ()
    # All that is known of its text when it was last admitted; computed as far as the row is long.
    known: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property  # type: ignore[misc]  # of a log, until somebody asks: the dataclass only sets it, once
    def tokens(self) -> list[int]:
        """Sampled and read; any thread may ask."""
        if (followed := self._followed) is not None:
            log, place, start = followed
            log.read(self._tokens, place, start)
        return self._tokens

    @tokens.setter
    def tokens(self, tokens: list[int]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._tokens = tokens

    def add_run(self, run: Sequence[int]) -> tuple[int, FinishReason | None]:
        """Have more tokens, up to its end; return how many these are, and why it ends, if it does."""
        # The loop alone calls it. With ``NOT_A_TOKEN``, which no other follows, it fails.
        tokens = self.tokens
        self._followed = None
        for count, token in enumerate(run):
            if token == NOT_A_TOKEN:
                return count, "error"
            tokens.append(token)
            if token in self.stop_token_ids:
                self.stop_reason = token if token in self.stop_ids else None
                return count + 1, "stop"
            if len(tokens) == self.max_tokens:
                return count + 1, "length"
        return len(run), None

    def follow(self, log: TokenLog, place: int) -> None:
        """Have the tokens at a place of the steps that a log takes from now on; the loop alone calls it."""
        self._followed = log, place, len(self.tokens)

    @property
    def order(self) -> tuple[int, int]:
        """By priority, then by arrival."""
        return self.priority, self.arrival

    @property
    def expires(self) -> float:
        """When it ends with what it has, on ``time.monotonic``'s clock; ``inf`` for never."""
        return math.inf if self.deadline is None else self.deadline

    @property
    def ready(self) -> bool:
        """Whether its form can be followed, if it has one."""
        return self.constraint is None or self.constraint.ready

    @property
    def keeps_slot(self) -> bool:
        """Whether its slot holds what it has seen, and cannot go to another row before it ends."""
        return self.sampling is not None and not self.sampling.forgets

    @property
    def place(self) -> str:
        """Its state, while it has not ended."""
        return "waiting" if self.row is None else "running"

    @property
    def running_row(self) -> Row:
        assert self.row is not None, "the request does not run"
        return self.row

    @property
    def prefilled(self) -> bool:
        """Whether all that was known of it at its admission is computed, or queued to be."""
        return self.row is not None and self.row.length_at_most >= len(self.known)

    @property
    def fed(self) -> bool:
        """Whether its row has all the tokens that it ever will for certain, and the last token follows from them."""
        return self.row is not None and self.row.length_at_least >= self.stored

    def cut_after(self, start: int, end: int) -> int:
        """Return where a chunk from ``start`` to ``end`` has to end: at the first checkpoint in between."""
        return min((at for at in self.checkpoints if start < at < end), default=end)

    @property
    def checkpoints_ahead(self) -> list[int]:
        """The checkpoints up to which its text is still to be computed."""
        length = len(self.known) if self.row is None else self.row.length_at_most
        return [at for at in self.checkpoints if at > length]

    def upcoming_prefix_len(self, text: NDArray[np.int64]) -> int:
        """Return after how many tokens of another text it is about to compute a state that is that one's, too."""
        checkpoints = (at for at in self.checkpoints_ahead if at < len(text))
        return max((at for at in checkpoints if np.array_equal(self.known[:at], text[:at])), default=0)

    def part(self, name: str) -> Any:
        """Return what it has of a feature; None if it asks for nothing of it."""
        return self.parts.get(name)

    def unseen(self, start: int) -> int | None:
        """Return the first token, from ``start`` on, that is computed with all logits; None if none is."""
        found = [part.unseen(start) for part in self.parts.values()]
        return min((at for at in found if at is not None), default=None)

    def runs_apart(self, start: int) -> Any:
        """Return who computes a chunk from ``start`` on in launches of its own (``RunsApart``); None for steps."""
        return next(filter(None, (part.runs_apart(start) for part in self.parts.values())), None)

    @property
    def beginning(self) -> NDArray[np.int64]:
        """Its text, or the part up to the first token that has to be computed, whatever the prefix cache has of it."""
        needed = [part.needed for part in self.parts.values()]
        first = min((at for at in needed if at is not None), default=None)
        return self.text if first is None else self.text[: first + 1]

    @property
    def prompt_ids(self) -> NDArray[np.int64]:
        """``[T]`` int64, its prompt as the model takes it."""
        found = (part.prompt_ids for part in self.parts.values())
        return next((ids for ids in found if ids is not None), self.prompt)

    def position_after(self, length: int) -> int:
        """Return the rotary position of the token after the first ``length`` of its text."""
        found = (part.position_after(length) for part in self.parts.values())
        return next((position for position in found if position is not None), length)

    @property
    def stored(self) -> int:
        """How many tokens its row holds in the end: the last one is sampled and never fed in."""
        return len(self.prompt) + max(1, self.max_tokens) - 1

    @property
    def text_ids(self) -> NDArray[np.int64]:
        """``[T + G]`` int64, its text as the model takes it."""
        ids, text = self.prompt_ids, self.text
        return text if ids is self.prompt else np.concatenate([ids, text[len(ids) :]])

    @property
    def text(self) -> NDArray[np.int64]:
        """``[T + G]`` int64, the prompt and the tokens read so far."""
        return np.concatenate([self.prompt, np.array(self.tokens, dtype=np.int64)])
