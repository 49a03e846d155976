"""Plans each step: admission, chunks of prompts next to decode, preemption, and which requests have ended."""

# Host facts only: nothing here knows of a device. The loop asks for a plan, launches it, says so, and brings the tokens
# once it has read them, mostly after it has launched the next plan.

from __future__ import annotations

import bisect
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from compiled_llm.compilation.sampling.sampling import NOT_A_TOKEN
from compiled_llm.engine.admission.greedy import Greedy
from compiled_llm.engine.admission.state import Admission
from compiled_llm.engine.steps.admissions import Admissions
from compiled_llm.engine.steps.plan import Chunk, StepPlan
from compiled_llm.engine.steps.queue import Queue
from compiled_llm.engine.steps.request import Request, RequestError
from compiled_llm.engine.steps.timing.latencies import Latencies
from compiled_llm.engine.steps.token_log import TokenLog
from compiled_llm.kinds.rows import NO_ENTRY
from compiled_llm.kvcache.errors import OutOfPagesError, OutOfStatesError
from compiled_llm.kvcache.pool import PagePool
from compiled_llm.kvcache.prefix_tree import PrefixTree
from compiled_llm.kvcache.row import Row
from compiled_llm.requests.outputs import FinishReason

logger = logging.getLogger("compiled_llm.engine")

_MORE = 64
"""Tokens that rows are promised pages for at a time, if all can have as many."""
_APART = 256
"""Tokens of a prompt that run apart at a time: of each there are as many logits as the vocabulary is large."""
_LOOKED_AT = 16
"""How many queued requests are searched for a common prefix, where a launch ends."""
_COUNTED = 64
"""How many queued requests have their tokens counted."""
_OFTEN = 2
"""A request that was preempted so often goes on as long as another can be preempted."""


class Scheduler:
    """The scheduler of an engine's requests; one thread at a time.

    First come, first served within a priority. A request is admitted once there are a slot for it and pages for its
    text, and the policy of admission lets it begin. If pages run out nevertheless, the request that has computed least
    of the lowest priority gives its pages back, waits at the front of its queue, and goes on with the same draws.

    Attributes:
        rows: rows that have not given all back; none while nothing runs.
        admission_deadline: when others began to wait for pages, on ``time.monotonic``'s clock; later requests wait.
        lets_pass: later requests may run before the next one, which lacks pages or slots.
        step: counts the plans that were asked for.
        begun: counts the requests that began to run, and those that went on after they had lost their pages.
        generation: of the prefix cache when the model was last looked at; pages computed since are of this one.
        short_since: when the next request came, if the last plan had too few pages or slots for it; else None.
        lacks_states: why it had too few states of rows for a request; empty if it had enough.
    """

    def __init__(
        self,
        pool: PagePool,
        max_num_seqs: int,
        budget: Callable[[Scheduler, Sequence[Request]], int],
        prefixes: PrefixTree | None = None,
        slots: Callable[[int, int], bool] = lambda new, keeping: True,
        admission: Admission | None = None,
        new_tokens: Callable[[Sequence[Request], int], int] | None = None,
        max_positions: int | None = None,
    ) -> None:
        """Begin without requests."""
        # ``budget`` says how many tokens of prompts to run next to these decoding rows, at least 1; ``slots``, whether
        # ``new`` rows may begin together, of which ``keeping`` retain their slots. Without a policy, whatever fits
        # begins. ``new_tokens`` says how many tokens each of these rows feeds in next: all but the first one are
        # guesses, which are given back if they are wrong. None for one each. No row has more than ``max_positions``.
        self._slots = slots
        self._new_tokens, self._max_positions = new_tokens, max_positions
        self._due = 1  # by how many tokens rows that decode may grow in the next step
        self._beginning: list[bool] = []  # in the plan that is made, and whether they keep their slots
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._budget = budget
        self._prefixes = prefixes
        self.generation = 0 if prefixes is None else prefixes.generation
        # Whether texts are in the prefix cache from their plan on: others of the same step begin with their pages. Not
        # where they would lack the state after these.
        self._keeps_planned = prefixes is not None and pool.states is None
        self._unlaunched: set[Request] = set()  # whose text is there, and their chunks not launched
        self._queue = Queue(waits=not self._keeps_planned)
        self.next_deadline = math.inf
        self._admissions = Admissions(Greedy() if admission is None else admission, pool, max_num_seqs)
        # Those whose tokens were read last, as one list, if none of them has ended; and the log of their later steps.
        self._sampled: list[Request] | None = None
        self._log: TokenLog | None = None
        self._plan = StepPlan([], [])  # the last one; it holds for so many more steps, unless requests come or go:
        self._same = self.step = self.begun = 0
        self.rows: set[Row] = set()
        self.running: list[Request] = []
        self.preemptions = self.finished = 0
        self.prompt_tokens = self.cached_tokens = self.new_tokens = 0
        self.latencies = Latencies()
        self.admission_deadline = math.inf
        self.short_since: float | None = None
        self.lacks_states = ""
        self.lets_pass = False

    @property
    def waiting(self) -> list[Request]:
        """Requests without a row, the next one first; those that wait for another's prompt at the end."""
        return list(self._queue)

    @property
    def has_room_for_more(self) -> bool:
        """Whether a request that comes would be the next to begin, and there is a place for it."""
        return len(self.running) < self._max_num_seqs and not self._queue

    @property
    def tokens_left(self) -> int:
        """The tokens of prompts that are not computed, of requests that run and of the next ones that wait."""
        running = sum(len(each.known) - each.running_row.exact_length for each in self.running if not each.prefilled)
        return running + sum(len(each.prompt) + len(each.tokens) for each in self._queue.ready[:_COUNTED])

    @property
    def idle(self) -> bool:
        """Whether no request runs or waits."""
        return not (self.running or self._queue)

    def goes_on(self) -> bool:
        """Whether an answer that has begun is still to end, be it without a row for now."""
        return any(request.tokens for request in (*self.running, *self._queue))

    def next_goes_on(self, until: float) -> bool:
        """Whether the next request goes on with an answer, and was submitted ``until`` then."""
        return any(request.tokens and request.submitted <= until for request in self._queue.ready[:1])

    # ---- requests come and go

    def add(self, request: Request) -> None:
        """Let a request wait for its turn."""
        if request.done:  # cancelled before it came here
            return
        self.next_deadline = min(self.next_deadline, request.expires)
        self._queue.add(request)

    def add_all(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.add(request)

    def end(self, request: Request, reason: FinishReason, error: BaseException | None = None) -> None:
        """End a request, wherever it is; one that has ended stays as it is."""
        if request.done:
            return
        request.finish_reason, request.error = reason, error
        self.finished += 1
        self._sampled = None  # a step that still runs may have a token for it
        if request.row is not None:
            self._retire(request)
        else:
            self._queue.remove(request)
        self._queue.release(request)
        if reason in ("stop", "length") and request.max_tokens:
            self._admissions.ended(request)

    def expire(self, now: float) -> list[Request]:
        """End requests whose deadline is over, and return them; ``now`` is on ``time.monotonic``'s clock."""
        late = [entry for entry in (*self.running, *self.waiting) if entry.expires <= now]
        for request in late:
            self.end(request, "timeout")
        self.next_deadline = min((entry.expires for entry in (*self.running, *self.waiting)), default=math.inf)
        return late

    # ---- plan

    def plan(self) -> StepPlan:
        """Return what to run next; empty if nothing can run."""
        self.step += 1
        self.short_since, self.lacks_states = None, ""
        goes_on = self._same and not self._has_room()
        if goes_on and (self._new_tokens is None or self._wanted(self._plan.decode) == self._plan.new_tokens):
            return self._plan
        before, self._beginning = self.preemptions, []
        decode, new_tokens = self._decoding_within_pages()
        room = self._budget(self, decode)
        extend: list[Chunk] = []
        for request in self.running:
            if room > 0 and not request.prefilled:
                room = self._add_chunk(extend, request, room)
        while room > 0 and self.preemptions == before and (admitted := self._admit()) is not None:
            room = self._add_chunk(extend, admitted, room)
        extend.sort(key=lambda chunk: chunk.apart is not None)
        self._plan, self._same = StepPlan(decode, extend, new_tokens), 0
        return self._plan

    def _has_room(self) -> bool:
        """Return whether a request waits that may begin to run, if there are pages."""
        waiting, has_room = self._queue.ready, len(self.running) < self._max_num_seqs
        if not (waiting and has_room and waiting[0].submitted <= self.admission_deadline):
            return False
        if self.running and self._admissions.refuses(waiting[0], self.step):
            self.short_since = waiting[0].submitted
            return False
        return True

    def _wanted(self, decode: Sequence[Request]) -> int:
        """Return how many tokens each of these requests should feed in."""
        return 1 if self._new_tokens is None or not decode else self._new_tokens(decode, self.step)

    def _decoding_within_pages(self) -> tuple[list[Request], int]:
        """Return the requests that go on, and by how many tokens, once there are pages for all of them."""
        while True:
            decode = [request for request in self.running if request.prefilled and not request.fed]
            self._due = self._wanted(decode)
            if self._have_pages(decode, self._due):
                return decode, self._due
            if self._due > 1:  # guesses take no pages from others
                self._due = 1
                self._regain_promised()
                if self._have_pages(decode, 1):
                    return decode, 1
            if not (_sync(decode) or self._regain_promised()):
                self.preempt()

    def _have_pages(self, decode: Sequence[Request], new_tokens: int) -> bool:
        """Promise pages for so many more tokens of each request; return whether there are pages, and positions."""
        rows, most = [request.running_row for request in decode], self._max_positions
        if most is not None and not all(row.length_at_most + new_tokens <= most for row in rows):
            return False
        short = [row for row in rows if row.room < new_tokens and row.limit < row.length_at_most + new_tokens]
        if not all(self._reserved(row, row.length_at_most + new_tokens) for row in short):
            return False
        if short:
            self._look_ahead(decode)
        return True

    def _look_ahead(self, decode: Sequence[Request]) -> None:
        """Promise pages that rows enter soon, to all at once: until then the plan need not be made again."""
        # No more than half of what is available: who comes may find the rest in the prefix cache.
        wanted = sum(self._pool.pages_for(len(each.prompt) + len(each.tokens)) for each in self._queue.ready[:1])
        share = self._pool.tokens_in(max(0, self._pool.available - wanted) // (2 * len(self.running)))
        for request in decode if share else ():
            row = request.running_row
            self._reserved(row, min(request.stored, row.length_at_most + min(_MORE, share)))

    def _regain_promised(self) -> bool:
        """Take back what rows were promised for later than the next step; return whether that was anything."""
        before = self._pool.available
        for request in self.running:
            if request.prefilled:
                request.running_row.give_promises_back(request.running_row.length_at_most + self._due)
        self._same = 0
        return self._pool.available > before

    def _add_chunk(self, extend: list[Chunk], request: Request, room: int) -> int:
        """Add as much of a prompt as there is room for, and return the room that is left."""
        start = request.running_row.exact_length
        if (by := request.runs_apart(start)) is not None and by.end is not None:  # computed whole
            extend.append(Chunk(request, request.known[start : by.end], False, by))
            return room - len(extend[-1].ids)
        unseen = request.unseen(start)
        apart = unseen == start
        end = start + (min(room, _APART) if apart else room)
        if unseen is not None and not apart:
            end = min(end, unseen)
        left = self._left_for_next(request, end) if not apart and start + room == end < len(request.known) else 0
        ids = request.known[start : request.cut_after(start, end - left)]
        extend.append(Chunk(request, ids, start + len(ids) == len(request.known), by))
        if self._keeps_planned and by is None:
            self._keep_planned(request, start + len(ids))
        return room - len(ids) - left

    def _left_for_next(self, request: Request, end: int) -> int:
        """Return how many tokens a chunk leaves to the next step, so as to end with a page, if others begin alike."""
        # Those begin with what is in the prefix cache, which a page is once it is full; they compute the rest again.
        size, start = self._pool.page_size, request.running_row.exact_length
        left, beginning = end % size, request.prompt[:size]
        if not self._keeps_planned or left >= end - start:
            return 0
        alike = (np.array_equal(other.prompt[:size], beginning) for other in self._queue.ready[:_LOOKED_AT])
        return left if any(alike) else 0

    def _keep_planned(self, request: Request, end: int) -> None:
        """Let others of the same plan begin with a text up to ``end``, as far as that fills pages."""
        # It runs before them or in the same launch, where in each layer all keys and values are stored before any row
        # attends. A page that the row has begun to fill is its own until it is full.
        row = request.running_row
        if row.exact_length % self._pool.page_size == 0:
            self._unlaunched.add(request)
            row.enter_pages(end)
            self._keep(request, request.known[:end], _no_state)

    def _admit(self) -> Request | None:
        """Give the next waiting request its row; None if none may begin."""
        if self._prefixes is not None and self._pool.states is not None:
            self._let_wait(self._prefixes)
        if not self._has_room():
            return None
        ready = self._queue.ready
        for request in ready if self.lets_pass else ready[:1]:
            if (row := self._row_for(request)) is not None:
                break
            self.short_since = ready[0].submitted
        else:
            if self.running:
                self._admissions.refuse(ready[0], self.step)
            return None
        request.row = row
        self.begun += 1
        self._beginning.append(request.keeps_slot)
        ready.remove(request)
        bisect.insort(self.running, request, key=lambda entry: entry.order)
        return request

    def _row_for(self, request: Request) -> Row | None:
        """Return a row with the text's cached pages and a promise of the others, or None if it does not begin yet."""
        keeping = sum(self._beginning) + request.keeps_slot
        if not self._slots(len(self._beginning) + 1, keeping):
            return None
        known, row = request.text, Row(self._pool, 0)
        row.name = f"request {request.arrival}"
        self.rows.add(row)
        if self._prefixes is not None:
            self._begin_with_known(request, row, known, self._prefixes)
            request.generation = self.generation
        elif row.states is None and (owner := request.prefix_owner) and owner.row is not None and owner.prefilled:
            row.begin_from(self._shared_with(owner.row, len(request.prompt)))
        row.identify(request.text_ids)
        row.exact_position = request.position_after(row.exact_length)
        try:
            begins = not self.running or self._admissions.allow(request, row, self.running, self._queue, self.step)
        except BaseException:  # Ctrl-C inside of a user's policy
            self._free(row)
            raise
        fits = begins and (
            self._reserved(row, len(known)) or (self._regain_promised() and self._reserved(row, len(known)))
        )
        if not fits:
            self._free(row)
            return None
        if request.cached is None:
            request.cached = row.exact_length
            self.prompt_tokens += len(request.prompt)
            self.cached_tokens += row.exact_length
        request.known = known
        return row

    def _begin_with_known(self, request: Request, row: Row, known: NDArray[np.int64], prefixes: PrefixTree) -> None:
        for part in request.parts.values():  # first: what is known need not be computed for them
            part.recall(prefixes, again=request.generation != self.generation)  # the model may have changed
        match = prefixes.match(request.beginning, request.salt)
        try:
            row.begin_from(match.pages, match.state, match.tokens)
        except OutOfPagesError:  # it may have just enough room without
            prefixes.give_back(match)
        request.checkpoints = ()
        if self._pool.states is not None:
            request.checkpoints = self._checkpoints_for_next(
                request, known, row.exact_length, match.checkpoints, prefixes.least_saving
            )

    def _checkpoints_for_next(
        self, request: Request, known: NDArray[np.int64], start: int, checkpoints: Sequence[int], least: int
    ) -> tuple[int, ...]:
        """Return the checkpoints of a text from ``start`` on, and where it parts from the next that begins alike."""
        for other in self._queue.ready[:_LOOKED_AT]:
            if other is not request and other.salt == request.salt:
                border = self._pool.tokens_in(self._pool.filled_by(_alike(known[:-1], other.beginning[:-1])))
                if border - max([start, *(at for at in checkpoints if at <= border)]) >= least:
                    return tuple(sorted({border, *(at for at in checkpoints if not 0 < at - border < least)}))
                if border > start:
                    break
        return tuple(checkpoints)

    def _let_wait(self, prefixes: PrefixTree) -> None:
        """Hold back requests whose prefix a running request is about to compute."""
        ready = self._queue.ready
        while ready and (owner := self._prefix_owner_of(ready[0], prefixes)) is not None:
            self._queue.wait(ready[0], owner)

    def _prefix_owner_of(self, request: Request, prefixes: PrefixTree) -> Request | None:
        """Return the running request that a waiting one had better wait for; None if there is none."""
        owners = [
            other
            for other in self.running
            if other.checkpoints_ahead and (other.salt, other.generation) == (request.salt, prefixes.generation)
        ]
        if not owners:
            return None
        text = request.beginning
        soon = [(other.upcoming_prefix_len(text), other) for other in owners]
        most, owner = max(soon, key=lambda entry: entry[0])
        return owner if most and most - prefixes.known(text[:-1], request.salt) >= prefixes.least_saving else None

    def _reserved(self, row: Row, tokens: int) -> bool:
        """Promise a row pages for so many tokens, and its states; False if there are too few."""
        try:
            row.reserve(tokens)
        except OutOfStatesError as error:
            self.lacks_states = str(error)
            return False
        except OutOfPagesError:
            return False
        return True

    def _shared_with(self, row: Row, tokens: int) -> list[int]:
        """Return the pages of a row that its first ``tokens`` fill, shared; at least one token is left to compute."""
        pages = row.pages[: self._pool.filled_by(tokens - 1)]
        self._pool.share(pages)
        return pages

    # ---- preemption

    def preempt(self) -> None:
        """Take the pages of the request that has computed least of the lowest priority, or raise OutOfPagesError.

        One that was preempted twice goes on as long as another of its priority runs.
        """
        if not self.running:
            raise OutOfPagesError("no page is free, and no request has any")
        victim = max(self.running, key=_dispensable)
        self._retire(victim)
        self._queue.release(victim)
        victim.preemptions += 1
        self.preemptions += 1
        self.add(victim)
        logger.debug("request %d gives its pages back after %d tokens", victim.arrival, len(victim.tokens))

    def park(self) -> list[Request]:
        """Take the pages of all that run, and return all requests, to go on in another scheduler."""
        for request in tuple(self.running):
            self._retire(request)
            self.add(request)
        return self.waiting

    def restart(self, lost: Sequence[Request]) -> None:
        """Take the pages of all that run, after a step that failed; the next tokens of those ``lost`` are not read."""
        if self._unlaunched and self._prefixes is not None:  # nothing may have been written into pages that it has
            self._prefixes.clear()
        self._unlaunched.clear()
        while self.running:
            self.preempt()
        for request in lost:  # which may have given their pages back before
            if not request.done and request.row is None and request not in self.waiting:
                self.add(request)

    # ---- what has happened

    def launched(self, plan: StepPlan) -> list[Request]:
        """Note that a plan is queued; return the requests whose last step it was, and free their pages."""
        if self._same:
            self._same -= 1
            return []
        for chunk in plan.extend:
            request, row = chunk.request, chunk.request.running_row
            is_checkpoint = row.exact_length in request.checkpoints
            if request not in self._unlaunched:
                state = partial(_lent, row) if is_checkpoint else _no_state
                self._keep(request, request.known[: row.exact_length], state)
            if chunk.is_last or is_checkpoint:
                self._queue.release(request)
        self._unlaunched.clear()
        ended = [request for request in plan.sampled if request.fed]
        for request in ended:
            if request.constraint is None:  # the others' last tokens are sampled later, by rows with slots
                self._retire(request)
        if not (plan.extend or ended):
            self._same = max(0, min(map(_steps_alike, plan.decode)) // plan.new_tokens)
        return ended

    def read(self, requests: list[Request], tokens: list[int], now: float) -> list[Request]:
        """Take the tokens that a step has sampled, unless their request has ended; return who got one or ended.

        The same list as in the step before if these are the same requests, and none has ended.
        """
        if requests is self._sampled:  # once more, none has ended, and a plan never holds up to a request's last step
            if self._log is None:
                self._log = TokenLog({request.stop_token_ids for request in requests})
                for place, request in enumerate(requests):
                    request.follow(self._log, place)
            if self._log.take(tokens):
                self.new_tokens += len(tokens)
                self.latencies.read(requests, now)
                return requests
        return self.read_runs(requests, [(token,) for token in tokens], now)

    def read_runs(self, requests: list[Request], runs: Sequence[Sequence[int]], now: float) -> list[Request]:
        """Take the tokens of a step that has sampled several for some requests, at least one each; else as ``read``."""
        # What comes after the end of a request is dropped.
        got: list[Request] = []
        failed: list[Request] = []
        ended: list[tuple[Request, FinishReason]] = []
        for request, run in zip(requests, runs, strict=True):
            if request.finish_reason is not None:
                continue
            if request.max_tokens == 0 and run[0] != NOT_A_TOKEN:  # it was only computed
                ended.append((request, "length"))
                continue
            count, reason = request.add_run(run)
            self.new_tokens += count
            if count:
                got.append(request)
            if reason == "error":
                failed.append(request)
            elif reason is not None:
                ended.append((request, reason))
        self.latencies.read(got, now)
        self._sampled, self._log = requests if len(got) == len(requests) else None, None
        for request, reason in ended:
            self.end(request, reason)
        for request in failed:
            self._fail(request)
        if len(got) == len(requests) and not (ended or failed):
            return requests
        return got + [request for request, _ in ended if not request.max_tokens] + failed

    def _fail(self, request: Request) -> None:
        """End a request whose logits no token can be drawn from."""
        error = RequestError(
            f"no token can be drawn after {len(request.tokens)} new ones, because the logits are NaN, +inf or all "
            "-inf; check the weights and their dtype"
        )
        self.end(request, "error", error)
        if self._prefixes is not None:
            self._prefixes.clear()  # there may be NaN in what others would begin with

    # ---- rows

    def _retire(self, request: Request) -> None:
        """Take a request's row, and keep its pages, and its last state, for others to begin with."""
        # A step that is still queued may write after what is known of the text, never into pages that it fills, and
        # another state.
        row = request.running_row
        text = request.text[: row.length_at_most]
        self._keep(request, text, partial(self._last_state, request, text))
        self.running.remove(request)
        self._admissions.gave_back(request)
        self._same = 0
        request.row = None
        self._free(row)

    def _free(self, row: Row) -> None:
        row.free()
        self.rows.discard(row)

    def _keep(self, request: Request, ids: NDArray[np.int64], state: Callable[[], int]) -> None:
        """Keep the pages of a request's text, and the state after it."""
        if self._prefixes is not None and request.generation == self._prefixes.generation:
            self._prefixes.insert(ids, request.running_row.pages, request.salt, state())

    def _last_state(self, request: Request, ids: NDArray[np.int64]) -> int:
        """Return the entry of the state after a text that ends, now the caller's: a chat goes on from there."""
        # ``NO_ENTRY`` if there is none, or it would save others too little.
        prefixes, states = self._prefixes, request.running_row.states
        if states is None or prefixes is None:
            return NO_ENTRY
        saves = len(ids) - prefixes.known(ids, request.salt)
        return states.hand_over(len(ids)) if saves >= prefixes.least_saving else NO_ENTRY


def _alike(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Return how many tokens two texts have in common at their beginning."""
    both = min(len(one), len(other))
    different = np.flatnonzero(one[:both] != other[:both])
    return int(different[0]) if len(different) else both


def _no_state() -> int:
    return NO_ENTRY


def _lent(row: Row) -> int:
    """Return the entry of a row's state, which the caller owns as well; ``NO_ENTRY`` if too few are left."""
    try:
        return row.lend_state()
    except OutOfPagesError:
        return NO_ENTRY


def _steps_alike(request: Request) -> int:
    """Return how many more steps a request takes part in without new pages or its end, whatever its tokens are."""
    row = request.running_row
    return min(row.limit, request.stored - 1) - row.length_at_most


def _sync(requests: Sequence[Request]) -> bool:
    """Have the lengths of requests' rows exact, waiting for steps that have not been read; False if all were."""
    unread = [request.running_row for request in requests if request.running_row.speculation.unread]
    for row in unread:
        row.sync()
    return bool(unread)


def _dispensable(request: Request) -> tuple[int, bool, int, int]:
    often = request.preemptions >= _OFTEN
    return request.priority, not often, -request.running_row.length_at_most, request.arrival
