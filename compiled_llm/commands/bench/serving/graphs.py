"""``bench graphs``: how long requests wait whose CUDA graphs are recorded, are recorded for them, or had to go."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, get_args

from compiled_llm.commands.bench.contender import Setup
from compiled_llm.commands.bench.experiment import Save, run_each
from compiled_llm.commands.bench.graph_results import GraphTimes
from compiled_llm.commands.bench.report import Report
from compiled_llm.commands.bench.serving.contender import ServingContender, ServingSession
from compiled_llm.commands.bench.serving.mode_engine import ROWS, ModeEngine, ModeSession
from compiled_llm.commands.bench.serving.vllm import StreamingVLLM
from compiled_llm.commands.bench.serving.workloads import Asked, Lengths, OfflineWorkload
from compiled_llm.commands.bench.timing import Percentiles
from compiled_llm.commands.bench.workload import Workload
from compiled_llm.config import Mode

PREPARED, ON_DEMAND, EVICTED = "prepared", "on demand", "evicted"


class GraphLoad(NamedTuple):
    """What is asked of everybody.

    Attributes:
        prompts: their lengths, in tokens.
        new: tokens of each answer.
        requests: of each length, at most.
        seconds: after which no more are begun, with graphs in one state.
        few: how many graphs there may be where others are to take their place.
    """

    prompts: Sequence[int]
    new: int
    requests: int
    seconds: float
    few: int

    @property
    def longer(self) -> int:
        """The length of a prompt that shares no graph with the others."""
        return 2 * max(self.prompts) + 1

    @property
    def bounds(self) -> list[Workload]:
        """A call that is at least as long as any, to set memory aside for."""
        return [Workload(ROWS, self.longer, self.new)]

    def in_turn(self) -> list[int]:
        """Return the lengths, neighbours far apart: they may share a graph, which is to be gone when it is needed."""
        ascending = sorted(set(self.prompts))
        return [*ascending[::2], *ascending[1::2]]

    def rounds(self) -> Iterator[int]:
        """Yield as many numbers as there is time for, at least one."""
        end = time.perf_counter() + self.seconds
        for number in range(self.requests):
            if number and time.perf_counter() > end:
                return
            yield number


def choose(names: str) -> list[ServingContender]:
    """Return contenders by name, in the order in which they run.

    Args:
        names: comma-separated; ``default`` or ``all`` for every one.

    Raises:
        ValueError: there is no such contender.
    """
    known: list[ServingContender] = [*map(ModeEngine, get_args(Mode)), StreamingVLLM()]
    if names in ("default", "all"):
        return known
    there, wanted = [one.name for one in known], [name.strip() for name in names.split(",")]
    if unknown := [name for name in wanted if name not in there]:
        raise ValueError(f"--contenders: no {', '.join(unknown)}; there are {', '.join(there)}, all and default")
    return [one for one in known if one.name in wanted]


def measure(contenders: Iterable[ServingContender], setup: Setup, load: GraphLoad, report: Report, save: Save) -> None:
    """Measure one contender after the other, into the report.

    Args:
        contenders: who takes part; modes that record graphs of ours are measured with these in each state.
        setup: model and device.
        load: what is asked.
        report: gets results, obstacles and failures.
        save: called after each state.
    """

    def measure_one(contender: ServingContender) -> None:
        setup.log(f"{contender.name}: loading")
        for _ in _states(contender, Asking(contender.name, setup, load, report)):
            save()

    run_each(contenders, setup, report, save, measure_one)


def _states(contender: ServingContender, asking: Asking) -> Iterator[None]:
    """Measure a contender with its graphs in one state after the other, as far as it has them."""
    setup, load = asking.setup, asking.load
    records = isinstance(contender, ModeEngine) and contender.records(setup)
    with contender.opened(setup) as session:
        if records:
            assert isinstance(session, ModeSession)
            asking.begin(session, ON_DEMAND)
            session.compile(asking.request(load.longer))
            asking.ask(load._replace(requests=1), warm=False, beside=False)
            yield
        asking.begin(session, PREPARED)
        session.prepare()
        asking.ask(load)
        yield
    if records:
        assert isinstance(contender, ModeEngine)
        with contender.opened(setup, max_graphs=load.few) as session:
            asking.begin(session, EVICTED)
            session.prepare()
            asking.ask(load)
            yield


class Asking:
    """Asks a contender, one request after the other, and notes how long they wait.

    Attributes:
        setup: model and device.
        load: what is asked.
    """

    _session: ServingSession
    _state: str
    _begun: float

    def __init__(self, name: str, setup: Setup, load: GraphLoad, report: Report) -> None:
        """Ask nothing yet; ``name`` is the contender's."""
        self.setup = setup
        self.load = load
        self._name = name
        self._report = report
        self._numbers = itertools.count()

    def begin(self, session: ServingSession, state: str) -> None:
        """Say that a session is made ready from now on, its graphs being in this state then."""
        self.setup.log(f"{self._name}, {state}: compiling and recording")
        self._session, self._state, self._begun = session, state, time.perf_counter()

    def ask(self, load: GraphLoad, *, warm: bool = True, beside: bool = True) -> None:
        """Ask, and note results.

        Args:
            load: what.
            warm: ask once for a short answer of each length before, which is not timed.
            beside: ask once more of each length while another request runs.
        """
        ready = time.perf_counter() - self._begun
        for prompt in load.in_turn() if warm else ():
            self._session.run([self.request(prompt)._replace(new=2)], 0.0)
        self.setup.log(f"{self._name}, {self._state}: requests one after the other")
        alone: dict[int, list[list[float]]] = defaultdict(list)
        for prompt in (prompt for _ in load.rounds() for prompt in load.in_turn()):
            alone[prompt] += self._session.run([self.request(prompt)], 0.0).times
        running = self._running(load) if beside else {}
        for prompt in sorted(alone):
            self._note(prompt, alone[prompt], running.get(prompt, []), ready)
        self._note_graphs()

    def request(self, prompt: int) -> Asked:
        """Return one that there has not been."""
        workload = OfflineWorkload(1, Lengths(prompt, prompt), Lengths(self.load.new, self.load.new))
        (asked,) = workload.drawn(self._session.vocabulary, next(self._numbers))
        return asked

    def _running(self, load: GraphLoad) -> dict[int, list[float]]:
        """Return the longest waits of a request in the midst of its answer while others come, by their lengths."""
        waits: dict[int, list[float]] = defaultdict(list)
        if not isinstance(self._session, ModeSession):
            return waits
        self.setup.log(f"{self._name}, {self._state}: requests while another one runs")
        shortest, part = min(load.prompts), load.new // 4
        for prompt in (prompt for _ in load.rounds() for prompt in load.in_turn()):
            times = self._session.run_beside(self.request(shortest), self.request(prompt)._replace(new=part), part)
            waits[prompt].append(max(_gaps([times[part - 1 :]])))
        return waits

    def _note(self, prompt: int, alone: list[list[float]], running: list[float], ready: float) -> None:
        first, between = [times[0] for times in alone], Percentiles.of(_gaps(alone))
        result = GraphTimes(self._name, self._state, prompt, self.load.new, first, between, running, ready)
        self._report.graph_times.append(result)

    def _note_graphs(self) -> None:
        self._report.machine["versions"].update(self._session.versions)
        if isinstance(self._session, ModeSession) and (use := self._session.graph_use(self._name, self._state)):
            self._report.graph_use.append(use)


def _gaps(answers: Iterable[Sequence[float]]) -> list[float]:
    return [later - earlier for times in answers for earlier, later in itertools.pairwise(times)]
