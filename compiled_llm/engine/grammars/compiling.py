"""Compiles grammars in threads of their own while their requests wait and all others go on."""

from __future__ import annotations

import contextlib
import reprlib
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from compiled_llm.compat.condition import Condition
from compiled_llm.engine.apart.unwanted import UnwantedError
from compiled_llm.engine.grammars.compilers import KEPT, Compilers, max_at_once
from compiled_llm.engine.grammars.ends import ends_of
from compiled_llm.engine.grammars.form import GrammarForm
from compiled_llm.engine.grammars.forms.grammar_source import GrammarSource, message_of
from compiled_llm.engine.grammars.mask_writer import MaskWriter
from compiled_llm.engine.steps.request import InvalidRequestError, Request, RequestError
from compiled_llm.requests.outputs import FinishReason
from compiled_llm.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    import xgrammar
    from transformers import PreTrainedTokenizerBase

_MAX_THREADS = 16
"""One place of them is kept for grammars that begin: one that takes long there is put off, and begins again later."""
_LONG = 0.5
"""Seconds after which another thread compiles the next grammar, while one goes on that takes longer."""


@dataclass(eq=False)
class _GrammarJob:
    """A grammar to compile."""

    form: GrammarForm  # of one of the requests; those of the others have the same source
    # the requests, and until when each waits, on ``time.monotonic``'s clock
    waiting: dict[Request, float] = field(default_factory=dict)
    started: float | None = None  # when a thread has begun to compile it
    long: bool = False  # it takes so long that another thread has taken its thread's place
    heavy: bool = False  # it has taken long, and was put off: it waits until fewer others take long

    @property
    def wanted(self) -> bool:
        """Whether a request still waits for it."""
        return any(not request.done for request in self.waiting)


class Grammars:
    """An engine's grammars: compiles them, and keeps the latest ones."""

    # A thread that compiles cannot be stopped. So one that takes long is no longer counted, and another is started.

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        compilers: Compilers,
        timeout: float,
        arrive: Callable[[Sequence[Request]], None],
        end: Callable[[Sequence[Request], FinishReason, BaseException | None], None],
    ) -> None:
        """``timeout`` is in seconds; ``arrive`` and ``end`` are methods whose objects are not kept alive."""
        self._tokenizer = tokenizer
        self._compilers = compilers
        self._writer = MaskWriter()
        self._timeout = timeout
        self._arrive, self._end = weakref.WeakMethod(arrive), weakref.WeakMethod(end)
        self._kept: OrderedDict[_Key, xgrammar.CompiledGrammar] = OrderedDict()
        self._changed = Condition()
        self._jobs: dict[_Key, _GrammarJob] = {}
        self._queue: deque[_GrammarJob] = deque()
        self._threads = self._long = 0
        self._watched = False

    def close(self) -> None:
        """Drop all that wait; a grammar that is being compiled is finished and dropped."""
        with self._changed:
            for job in self._jobs.values():
                job.waiting.clear()
            self._kept.clear()
            self._changed.notify_all()
        self._compilers.close()

    # ---- requests

    def forms_of(self, params: SamplingParams, eos: frozenset[int], vocabulary: int) -> Sequence[GrammarForm | None]:
        """Return the form of each of the ``n`` answers to a prompt, None for any text; raises as ``ends_of``."""
        if params.structured_outputs is None:
            return [None] * params.n
        others = params.stop_token_ids or ()
        form = GrammarForm(
            source=cast(GrammarSource, params.structured_outputs.source),
            stops=ends_of(eos, others, vocabulary, self._tokenizer),
            vocabulary=vocabulary,
            writer=self._writer,
            stop_token_ids=frozenset(token for token in (*eos, *others) if token < vocabulary),
            least=params.min_tokens,
        )
        return [replace(form) for _ in range(params.n)]

    def begin(self, requests: Sequence[Request], params: SamplingParams) -> None:
        """Give the answers to one prompt a grammar that was compiled before; ValueError if there surely is none."""
        if (asked := params.structured_outputs) is None:
            return
        form = _form(requests[0])
        with self._changed:
            grammar = self._kept.get(_key(form))
            if grammar is not None:
                self._kept.move_to_end(_key(form))
        if grammar is not None:
            _begin(requests, grammar)
            return
        try:
            self._compilers.check(form.source)
        except ValueError as error:
            value = reprlib.repr(getattr(asked, asked.name))
            raise ValueError(f"structured_outputs: could not compile {asked.name}={value}: {error}") from error

    def compile(self, requests: Sequence[Request]) -> None:
        """Have the grammar of the answers to one prompt compiled, and let them arrive then."""
        form = _form(requests[0])
        with self._changed:
            job = self._jobs.get(_key(form))
            if job is None:
                job = self._jobs[_key(form)] = _GrammarJob(form)
                self._queue.append(job)
            job.waiting |= dict.fromkeys(requests, time.monotonic() + self._timeout)
            self._start_threads()
            if not self._watched:
                self._watched = True
                threading.Thread(target=self._watch, name="compiled_llm grammars' clock", daemon=True).start()
            self._changed.notify_all()

    def prepare(self, vocabulary: int, eos: frozenset[int]) -> None:
        """Learn the tokenizer's tokens, which the first grammar has to wait for otherwise; raises as ``ends_of``."""
        self._compilers.prepare(vocabulary, ends_of(eos, (), vocabulary, self._tokenizer))

    # ---- threads

    def _start_threads(self) -> None:
        if self._threads < self._limit and self._first() is not None:
            self._threads += 1
            threading.Thread(target=self._work, name="compiled_llm grammars", daemon=True).start()

    @property
    def _limit(self) -> int:
        return min(max_at_once() + self._long, _MAX_THREADS)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                grammar, error = self._compiled(job), None
            except BaseException as failure:  # of the tokenizer, too, whose library may panic
                grammar, error = None, failure
            self._finish(job, grammar, error)

    def _compiled(self, job: _GrammarJob) -> xgrammar.CompiledGrammar:
        grammar = self._compilers.compile(job.form, lambda: self._is_wanted(job))
        job.form.begin(grammar)  # what does not go here would go for none of those that wait
        return grammar

    def _is_wanted(self, job: _GrammarJob) -> bool:
        """Whether to go on with a grammar, as far as a thread can be stopped."""
        with self._changed:
            return job.wanted and (job.long or not job.heavy)

    def _next(self) -> _GrammarJob | None:
        """Return the next job that a request waits for; None if this thread, or one too many, is to end."""
        with self._changed:
            while self._threads <= self._limit and (job := self._first()) is not None:
                self._queue.remove(job)
                if job.wanted:
                    job.started = time.monotonic()
                    job.long = job.heavy
                    self._long += job.long
                    self._changed.notify_all()
                    return job
                del self._jobs[_key(job.form)]
            self._threads -= 1
            return None

    def _first(self) -> _GrammarJob | None:
        """Return the next job in the queue: those that have taken long are the last, and leave a place to others."""
        heavy = self._long < _MAX_THREADS - 1
        return min((job for job in self._queue if heavy or not job.heavy), key=lambda job: job.heavy, default=None)

    def _finish(self, job: _GrammarJob, grammar: xgrammar.CompiledGrammar | None, error: BaseException | None) -> None:
        with self._changed:
            self._long -= job.long
            if isinstance(error, UnwantedError) and job.wanted:  # again, by a request that has come meanwhile
                job.started, job.long = None, False
                self._queue.append(job)
                self._changed.notify_all()
                return
            del self._jobs[_key(job.form)]
            waiting = list(job.waiting)
            if grammar is not None:
                self._keep(_key(job.form), grammar)
            self._changed.notify_all()
        if grammar is None:
            self._give_up(waiting, "error", _failure(error))
        elif waiting and (arrive := self._arrive()) is not None:
            _begin(waiting, grammar)
            with contextlib.suppress(RuntimeError):  # the engine is closed
                arrive(waiting)

    def _keep(self, key: _Key, grammar: xgrammar.CompiledGrammar) -> None:
        self._kept[key] = grammar
        while len(self._kept) > 1 and sum(kept.memory_size_bytes for kept in self._kept.values()) > KEPT:
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
            self._give_up(late, "error", InvalidRequestError(message))
            if due is None:
                return

    def _late(self, now: float) -> tuple[list[Request], list[Request], float | None]:
        """Return the requests whose grammar takes too long, those whose own time is over, and when to look again."""
        late: list[Request] = []
        expired: list[Request] = []
        for job in self._jobs.values():
            late += [request for request, due in job.waiting.items() if due <= now]
            expired += [request for request in job.waiting if request.deadline is not None and request.deadline <= now]
            if job.started is not None and not (job.long or job.heavy) and job.started + _LONG <= now:
                self._take_long(job)
            gone = {*late, *expired}
            job.waiting = {each: due for each, due in job.waiting.items() if not (each.done or each in gone)}
        self._start_threads()
        dues = [min(due, each.deadline or due) for job in self._jobs.values() for each, due in job.waiting.items()]
        if dues:
            started = [job.started for job in self._jobs.values() if not (job.long or job.heavy)]
            dues += [begun + _LONG for begun in started if begun is not None]
        return late, expired, min(dues, default=None)

    def _take_long(self, job: _GrammarJob) -> None:
        """Count a job as one that takes long; put it off if too many do."""
        if self._long < _MAX_THREADS - 1:
            job.long = True
            self._long += 1
        else:
            job.heavy = True

    def _give_up(self, requests: Sequence[Request], reason: FinishReason, error: BaseException | None) -> None:
        if requests and (end := self._end()) is not None:
            end(requests, reason, error)


def _failure(error: BaseException | None) -> RequestError:
    """Return the failure of requests whose grammar was not compiled."""
    why = message_of(error) if isinstance(error, (OSError, RuntimeError, ValueError)) else repr(error)
    kind = InvalidRequestError if isinstance(error, (RuntimeError, ValueError)) else RequestError
    return kind(f"structured_outputs: no grammar could be compiled: {why}")


_Key = tuple[GrammarSource, int, frozenset[int]]


def _key(form: GrammarForm) -> _Key:
    return form.source, form.vocabulary, form.stops


def _form(request: Request) -> GrammarForm:
    assert request.constraint is not None, "its answer has a form"
    return cast("GrammarForm", request.constraint.form)


def _begin(requests: Sequence[Request], grammar: xgrammar.CompiledGrammar) -> None:
    for request in requests:
        _form(request).begin(grammar)
