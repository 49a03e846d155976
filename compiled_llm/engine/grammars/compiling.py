"""Grammars are compiled in threads of their own while their requests wait, and all others go on."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from compiled_llm.engine.grammars.constraint import Constraint
from compiled_llm.engine.grammars.source import GrammarSource, said
from compiled_llm.engine.request import FinishReason, Request, RequestError

if TYPE_CHECKING:
    import xgrammar

_KEPT = 2**28
"""Bytes of compiled grammars that are kept, and of parts that they share with later ones."""
_MOST_COMPILERS = 4
"""Of a model there is one, and one for tags; others, if the tokens that end answers are those that users name."""
_MOST_THREADS = 16
_LONG = 0.5
"""Seconds after which another thread compiles the next grammar, beside one that takes longer."""


@dataclass(eq=False)
class _Job:
    """A grammar that is to be compiled.

    Attributes:
        constraint: of one of the requests; those of the others have the same source.
        waiting: the requests, and until when each waits, on ``time.monotonic``'s clock.
        started: when a thread has begun to compile it.
        long: whether that takes so long that another thread has taken its thread's place.
    """

    constraint: Constraint
    waiting: dict[Request, float] = field(default_factory=dict)
    started: float | None = None
    long: bool = False


class Grammars:
    """Compiles an engine's grammars, and knows the latest ones.

    Nothing can stop a thread that compiles. So one that takes long does not count any more, and another one is started.
    """

    def __init__(
        self,
        tokenizer: Any,
        timeout: float,
        arrive: Callable[[Sequence[Request]], None],
        end: Callable[[Sequence[Request], FinishReason, BaseException | None], None],
    ) -> None:
        """Begin with none, and without a thread.

        Args:
            tokenizer: of HuggingFace's, whose tokens grammars are about.
            timeout: seconds that a request waits for its grammar.
            arrive: a method that lets requests wait for their turn; its object is not kept alive.
            end: a method that ends requests; neither is its object.
        """
        self._tokenizer = tokenizer
        self._timeout = timeout
        self._arrive, self._end = weakref.WeakMethod(arrive), weakref.WeakMethod(end)
        self._kept: OrderedDict[_Key, xgrammar.CompiledGrammar] = OrderedDict()
        self._compilers: OrderedDict[tuple[int, frozenset[int], bool], xgrammar.GrammarCompiler] = OrderedDict()
        self._making = threading.Lock()
        self._changed = threading.Condition()
        self._jobs: dict[_Key, _Job] = {}
        self._queue: deque[_Job] = deque()
        self._threads = self._long = 0
        self._watched = False

    def close(self) -> None:
        """Let nobody wait any longer; what is being compiled is finished, for nobody."""
        with self._changed:
            for job in self._jobs.values():
                job.waiting.clear()
            self._kept.clear()
            self._changed.notify_all()
        self._compilers.clear()

    # ---- requests

    def begin(self, requests: Sequence[Request]) -> None:
        """Give the answers to one prompt their grammar, if it was compiled before."""
        constraint = requests[0].constraint
        if constraint is None or constraint.source is None:
            return
        with self._changed:
            grammar = self._kept.get(_key(constraint))
            if grammar is not None:
                self._kept.move_to_end(_key(constraint))
        if grammar is not None:
            _begin(requests, grammar)

    def await_grammar(self, requests: Sequence[Request]) -> None:
        """Have the grammar of the answers to one prompt compiled, and let them arrive then."""
        constraint = requests[0].constraint
        if constraint is None or constraint.ready:
            return
        with self._changed:
            job = self._jobs.get(_key(constraint))
            if job is None:
                job = self._jobs[_key(constraint)] = _Job(constraint)
                self._queue.append(job)
            job.waiting |= dict.fromkeys(requests, time.monotonic() + self._timeout)
            self._start_threads()
            if not self._watched:
                self._watched = True
                threading.Thread(target=self._watch, name="compiled_llm grammars' clock", daemon=True).start()
            self._changed.notify_all()

    def prepare(self, vocabulary: int, stops: frozenset[int]) -> None:
        """Learn the tokenizer's tokens, which the first grammar has to wait for otherwise."""
        self._compiler(vocabulary, stops)

    # ---- threads

    def _start_threads(self) -> None:
        if self._queue and self._threads < self._limit:
            self._threads += 1
            threading.Thread(target=self._work, name="compiled_llm grammars", daemon=True).start()

    @property
    def _limit(self) -> int:
        return min(_most_at_once() + self._long, _MOST_THREADS)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                grammar, error = self._compiled(job.constraint), None
            except BaseException as failure:  # of the tokenizer, too, whose library may panic
                grammar, error = None, failure
            self._finish(job, grammar, error)

    def _next(self) -> _Job | None:
        """Return the next job that somebody waits for; None if this thread, or one too many, is to end."""
        with self._changed:
            while self._queue and self._threads <= self._limit:
                job = self._queue.popleft()
                if any(not request.done for request in job.waiting):
                    job.started = time.monotonic()
                    self._changed.notify_all()
                    return job
                del self._jobs[_key(job.constraint)]
            self._threads -= 1
            return None

    def _finish(self, job: _Job, grammar: xgrammar.CompiledGrammar | None, error: BaseException | None) -> None:
        with self._changed:
            del self._jobs[_key(job.constraint)]
            self._long -= job.long
            waiting = list(job.waiting)
            if grammar is not None:
                self._keep(_key(job.constraint), grammar)
            self._changed.notify_all()
        if grammar is None:
            why = said(error) if isinstance(error, (RuntimeError, ValueError)) else repr(error)
            self._give_up(waiting, "error", RequestError(f"structured_outputs: no grammar could be compiled: {why}"))
        elif waiting and (arrive := self._arrive()) is not None:
            _begin(waiting, grammar)
            with contextlib.suppress(RuntimeError):  # the engine is closed
                arrive(waiting)

    def _keep(self, key: _Key, grammar: xgrammar.CompiledGrammar) -> None:
        self._kept[key] = grammar
        while len(self._kept) > 1 and sum(kept.memory_size_bytes for kept in self._kept.values()) > _KEPT:
            self._kept.popitem(last=False)

    # ---- the clock

    def _watch(self) -> None:
        """End requests that wait for too long, as long as there are any."""
        while True:
            with self._changed:
                late, expired, due = self._late(time.monotonic())
                if due is None:
                    self._watched = False
                elif not (late or expired):
                    self._changed.wait(max(0.0, due - time.monotonic()))
            self._give_up(expired, "timeout", None)
            message = (
                f"structured_outputs: the grammar was not compiled within grammar_timeout={self._timeout:g} s; "
                "simplify it, or give the engine more time"
            )
            self._give_up(late, "error", RequestError(message))
            if due is None:
                return

    def _late(self, now: float) -> tuple[list[Request], list[Request], float | None]:
        """Return the requests whose grammar takes too long, those whose own time is over, and when to look again."""
        late: list[Request] = []
        expired: list[Request] = []
        for job in self._jobs.values():
            late += [request for request, due in job.waiting.items() if due <= now]
            expired += [request for request in job.waiting if request.deadline is not None and request.deadline <= now]
            if job.started is not None and not job.long and job.started + _LONG <= now:
                job.long = True
                self._long += 1
            gone = {*late, *expired}
            job.waiting = {each: due for each, due in job.waiting.items() if not (each.done or each in gone)}
        self._start_threads()
        dues = [min(due, each.deadline or due) for job in self._jobs.values() for each, due in job.waiting.items()]
        if dues:
            started = [job.started for job in self._jobs.values() if not job.long]
            dues += [begun + _LONG for begun in started if begun is not None]
        return late, expired, min(dues, default=None)

    def _give_up(self, requests: Sequence[Request], reason: FinishReason, error: BaseException | None) -> None:
        if requests and (end := self._end()) is not None:
            end(requests, reason, error)

    # ---- compile

    def _compiled(self, constraint: Constraint) -> xgrammar.CompiledGrammar:
        assert constraint.source is not None, "there is no grammar"
        tags = constraint.source.kind == "structural_tag"
        grammar = constraint.source.compiled(self._compiler(constraint.vocabulary, constraint.stops, tags))
        constraint.begin(grammar)  # what does not go here would go for none of those that wait
        return grammar

    def _compiler(self, vocabulary: int, stops: frozenset[int], tags: bool = False) -> xgrammar.GrammarCompiler:
        """Return what compiles for a vocabulary, which may have more tokens than the tokenizer."""
        from xgrammar import GrammarCompiler

        with self._making:
            if (compiler := self._compilers.get((vocabulary, stops, tags))) is None:
                tokens = self._tokens(vocabulary, sorted(stops), tags)
                compiler = GrammarCompiler(tokens, max_threads=_most_at_once(), cache_limit_bytes=_KEPT)
                while len(self._compilers) >= _MOST_COMPILERS:
                    self._compilers.popitem(last=False)
                self._compilers[vocabulary, stops, tags] = compiler
            return compiler

    def _tokens(self, vocabulary: int, stops: list[int], tags: bool) -> xgrammar.TokenizerInfo:
        """Return what the tokens spell; special ones, which are left out of texts, only tags may have."""
        from xgrammar import TokenizerInfo, VocabType

        tokens = TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=vocabulary, stop_token_ids=stops)
        special = [token for token in self._tokenizer.all_special_ids if token < vocabulary]
        if tags or not special:
            return tokens
        spelled = tokens.decoded_vocab
        for token in special:
            spelled[token] = b""
        return TokenizerInfo(
            spelled,
            VocabType.RAW,
            vocab_size=vocabulary,
            stop_token_ids=stops,
            add_prefix_space=tokens.add_prefix_space,
        )


_Key = tuple[GrammarSource | None, int, frozenset[int]]


def _key(constraint: Constraint) -> _Key:
    return constraint.source, constraint.vocabulary, constraint.stops


def _begin(requests: Sequence[Request], grammar: xgrammar.CompiledGrammar) -> None:
    for request in requests:
        if request.constraint is not None:
            request.constraint.begin(grammar)


def _most_at_once() -> int:
    """Return how many grammars are compiled at once: others need the cores, too."""
    return max(1, min(4, (os.cpu_count() or 1) // 2))
