"""The pipeline of steps that are launched and whose tokens are not read: nothing else holds any."""

# A step is launched before the tokens of the previous one are read, so the device never waits for the host.

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from compiled_llm.compilation.sampling.sampling import NOT_A_TOKEN
from compiled_llm.execution.accepted import AcceptedTokens
from compiled_llm.execution.batch import Batch, Drafting, StepOutput, Tap
from compiled_llm.execution.decode.deferred_sampling import Masks
from compiled_llm.execution.decode.persistent_batch import PersistentBatch
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.state.staging import Readback
from compiled_llm.kvcache.row import Row

N = TypeVar("N")
T = TypeVar("T")

_NOTHING: Mapping[Row, Tensor] = {}


class SampledTokens(NamedTuple):
    """The tokens of one step, by its rows."""

    rows: Sequence[Row]
    tokens: list[int]  # the next one of each row
    runs: list[list[int]] | None = None  # all that count of each of the first rows, if these have fed in drafts

    def by_row(self) -> Iterator[tuple[Row, list[int]]]:
        """Yield each row with all its tokens."""
        more = itertools.chain((run[1:] for run in self.runs or ()), itertools.repeat([]))
        for row, token, later in zip(self.rows, self.tokens, more, strict=False):
            yield row, [token, *later]


@dataclass(slots=True)
class Ticket(Generic[N]):
    """A step whose tokens have not been read.

    Attributes:
        note: what its caller keeps with it.
        rows: the rows that get a token, in the order of ``SampledTokens``.
        late: those of them whose tokens are sampled once the host has read all earlier ones.
    """

    note: N
    rows: Sequence[Row]
    late: Sequence[Row]
    readbacks: list[Readback]  # of rows after those of ``accepted``; of no launch before whose end all are late
    accepted: AcceptedTokens | None = None
    drafting: Drafting | None = None  # who reads ``accepted``
    late_tokens: Tensor | None = None  # on the device
    late_readback: Readback | None = None

    @property
    def arrived(self) -> bool:
        """Whether all tokens that were sampled with its launch are on the host."""
        here = self.accepted is None or self.accepted.arrived
        return here and all(readback.arrived for readback in self.readbacks)

    def tokens(self) -> SampledTokens:
        """Return its tokens, once, waiting for them."""
        assert not self.late or self.late_readback is not None, "late tokens are sampled before they are read"
        runs = None
        if self.accepted is not None:
            assert self.drafting is not None, "who has drafted reads what counts"
            runs = self.drafting.read(self.accepted)
        tokens = [run[0] for run in runs or ()]
        for readback in self.readbacks:
            tokens += readback.result()
        if self.late_readback is not None:
            tokens = self._with_late(tokens, self.late_readback.result())
        return SampledTokens(self.rows, tokens, runs)

    def _with_late(self, tokens: list[int], late: list[int]) -> list[int]:
        if len(late) == len(self.rows):
            return late
        unread = len(self.rows) - len(tokens)  # at the beginning, all of them late
        own = dict(zip(self.late, late, strict=True))
        return [own.get(row, token) for row, token in zip(self.rows, [NOT_A_TOKEN] * unread + tokens, strict=True)]


class Pipeline(Generic[N]):
    """The steps of one loop on their way.

    Attributes:
        persistent: the loop's rows in the decode buffers.
        unread: what was launched and not read, oldest first; read-only.
    """

    def __init__(self, model_runner: ModelRunner, exact: bool = False) -> None:
        """``exact`` is that of ``PersistentBatch``."""
        self._model_runner = model_runner
        self._readbacks = model_runner.readbacks
        self.persistent = PersistentBatch(model_runner.state, model_runner.steps, model_runner.readbacks, exact)
        self.unread: deque[Ticket[N]] = deque()

    # ---- launch

    def repeat(self, batch: Batch, note: N) -> Ticket[N] | None:
        """Launch the last decode step once more, in the executor, briefly; None if it is not that of ``batch``."""
        step = self.persistent.step
        if step is None or not (step.alone and step.is_valid_for(batch)):
            return None
        return self._add([step.launch(batch, self.persistent.discard_after_failure)], batch.drafting, note)

    def launch(self, batch: Batch, note: N, apart: Iterable[StepOutput] = ()) -> Ticket[N]:
        """Launch a batch, and after it what runs ``apart`` as one is asked for, in the executor; nothing waits.

        Raises:
            OutOfPagesError: as ``ModelRunner.run``; nothing has changed.
        """
        first = [self._model_runner.run(batch, self.persistent)] if batch.decode or batch.extend else []
        return self._add(itertools.chain(first, apart), batch.drafting, note)

    def sample_from(self, rows: Sequence[Row], logits: Tensor, taps: Sequence[Tap], note: N) -> Ticket[N]:
        """Sample the next tokens of rows from logits ``[B, V]`` computed elsewhere, as a step, in the executor."""
        return self._add([self._model_runner.sample(rows, logits, self.persistent, taps)], None, note)

    def start_reading(self, rows: Sequence[Row], tokens: Tensor, note: N) -> Ticket[N]:
        """Have the tokens ``[B]`` of a step that were sampled elsewhere on their way to the host, in the executor."""
        return self._add([StepOutput(rows, None, tokens)], None, note)

    def _add(self, outputs: Iterable[StepOutput], drafting: Drafting | None, note: N) -> Ticket[N]:
        ticket = Ticket(note, [], (), [])
        for output in outputs:  # one after the other: the next launch may overwrite the tokens of the one before
            ticket.rows = [*ticket.rows, *output.rows] if ticket.rows else output.rows
            tokens = output.tokens
            if output.accepted is not None:
                ticket.accepted = output.accepted
                ticket.drafting = drafting
                tokens = tokens[len(output.accepted.rows) * output.accepted.new_tokens :]
            if self.persistent.deferred.unsampled:
                ticket.late = self.persistent.deferred.rows
            if len(tokens) and len(ticket.late) < len(ticket.rows):  # there are tokens to read by now
                ticket.readbacks.append(self._readbacks.start(tokens))
        self.unread.append(ticket)
        return ticket

    def sample_late(self, masks: Masks | None = None, processed: Mapping[Row, Tensor] = _NOTHING) -> None:
        """Sample the late tokens of the newest step, as ``ModelRunner.sample_deferred``, in the executor.

        After a failure, what was done before it is not repeated.
        """
        ticket = self.unread[-1]
        if ticket.late_tokens is None:
            ticket.late_tokens = self._model_runner.sample_deferred(self.persistent, masks, processed).tokens
        ticket.late_readback = self._readbacks.start(ticket.late_tokens)

    # ---- read

    def read(self, take: Callable[[Ticket[N], SampledTokens], T]) -> T:
        """Have the tokens of the oldest step taken, waiting for them; it counts as unread until they are."""
        ticket = self.unread[0]
        if ticket.late or ticket.accepted is not None or len(ticket.readbacks) != 1:
            tokens = ticket.tokens()
        else:  # here, and no call: most steps are such
            tokens = SampledTokens(ticket.rows, ticket.readbacks[0].result())
        taken = take(ticket, tokens)
        self.unread.popleft()
        return taken

    def restart(self, rows: Sequence[Row] = ()) -> None:
        """Forget all steps that are not read; go on with rows that have no next tokens."""
        self.unread.clear()
        self.persistent.restart(rows)
