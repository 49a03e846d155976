"""``bench serve``: requests one after the other, many at once, or as they arrive, and how long each waits."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from compiled_llm.commands.bench.report import BenchReport, Log, Result, Save, failure
from compiled_llm.commands.bench.timing import BenchPercentiles, Spread

VOCABULARY = 10_000  # any model that is worth measuring has so many tokens
_STRIDE = 101  # added to each token of a pass, so that no prefix cache knows it from the pass before
_TOGETHER = 50e-6
"""Seconds between pieces that came together and were only read one after the other; a step takes longer."""
_UNTIMED = 2.0  # seconds of arrivals that come first and are not timed, at most


class Lengths(NamedTuple):
    """Tokens, sampled uniformly from ``least`` to ``most``."""

    least: int
    most: int

    @classmethod
    def parse(cls, option: str, text: str) -> Lengths:
        """Read ``100-1024``, or one length; raises ValueError if the text is no range from 1."""
        found = re.fullmatch(r"\s*([1-9]\d*)(?:-(\d+))?\s*", text)
        if found is None or int(found[1]) > int(found[2] or found[1]):
            raise ValueError(f"{option} {text!r}: give a range of tokens, such as 100-1024, or one length")
        return cls(int(found[1]), int(found[2] or found[1]))

    def __str__(self) -> str:
        return f"{self.least:,} to {self.most:,}" if self.least < self.most else f"{self.least:,}"


class Asked(NamedTuple):
    """One request: token ids, the tokens of its answer, and when it arrives, in seconds after the begin."""

    prompt: list[int]
    new: int
    arrival: float = 0.0


class LoadAnswer(NamedTuple):
    """The times in seconds at which pieces of an answer came, its tokens, and how much of the prompt was ``cached``."""

    times: list[float]
    tokens: int
    cached: int | None = None
    begun: float = 0.0


Ask = Callable[[Asked], Awaitable[LoadAnswer]]
Run = Callable[[Sequence[Asked], int | None], list[LoadAnswer]]
"""Takes requests and how many of them may run at once; None: each begins when it arrives."""


@dataclass(frozen=True)
class Load:
    """The load on a server: ``requests``, ``concurrency`` at once, or Poisson arrivals of ``rate`` a second."""

    prompts: Lengths
    answers: Lengths
    requests: int = 30
    concurrency: int | None = None
    rate: float | None = None
    seconds: float = 8.0
    system_prompt: int = 0
    seed: int = 0
    vocabulary: int = VOCABULARY

    def arrivals(self) -> list[float]:
        if self.rate is None:
            return [0.0] * max(self.requests, self.concurrency or 1)
        generator = random.Random(f"{self.seed} {self.rate:g}")
        times = [generator.expovariate(self.rate)]
        while (following := times[-1] + generator.expovariate(self.rate)) < self.seconds:
            times.append(following)
        return times

    def drawn(self, number: int) -> list[Asked]:
        """Return the requests of pass ``number``: the same arrivals and lengths in each, and other tokens."""
        generator = random.Random(self.seed)

        def prompt(tokens: int) -> list[int]:
            drawn = (generator.randint(0, VOCABULARY) for _ in range(tokens))
            return [(token + number * _STRIDE) % self.vocabulary for token in drawn]

        shared = prompt(self.system_prompt)
        asked = []
        for arrival in self.arrivals():
            own = prompt(generator.randint(*self.prompts))
            asked.append(Asked(shared + own, generator.randint(*self.answers), arrival))
        return asked

    def __str__(self) -> str:
        if self.rate is not None:
            return f"{self.rate:g} requests/s"
        return "one after the other" if self.concurrency == 1 else f"{self.concurrency} at once"


async def answered(asked: Sequence[Asked], ask: Ask, concurrency: int | None) -> list[LoadAnswer]:
    """Send requests, and return when their answers came, from the begin of the pass."""
    slots = asyncio.Semaphore(concurrency or len(asked))
    begin = time.perf_counter()

    async def one(request: Asked) -> LoadAnswer:
        await asyncio.sleep(begin + request.arrival - time.perf_counter())
        async with slots:
            begun = time.perf_counter() if concurrency else begin + request.arrival
            answer = await ask(request)
        return answer._replace(begun=begun - begin, times=[when - begin for when in answer.times])

    return await asyncio.gather(*map(one, asked))


def measure_all(
    servers: Mapping[str, Run], loads: Sequence[Load], runs: int, report: BenchReport, save: Save, log: Log
) -> None:
    """Measure every load with each server, into the report; one that fails is asked nothing more."""
    numbers = itertools.count()
    failed = set()
    for load, (name, run) in itertools.product(loads, servers.items()):
        if name not in failed:
            doing = f"{name}, {load}, prompts of {load.prompts} tokens"
            log(doing)
            try:
                report.add("serve", _measure(name, run, load, runs, numbers))
                save()
            except (OSError, RuntimeError) as error:
                failed.add(name)
                report.failures.append(failure(doing, error))


def _measure(name: str, run: Run, load: Load, runs: int, numbers: itertools.count[int]) -> Result:
    """Let a load be answered, once without timing it, then ``runs`` times; ``numbers`` are of passes not yet seen."""
    untimed = replace(load, requests=min(3, load.requests), seconds=min(_UNTIMED, load.seconds))
    run(untimed.drawn(next(numbers)), load.concurrency)
    asked = [load.drawn(next(numbers)) for _ in range(runs)]
    passes = [run(requests, load.concurrency) for requests in asked]
    requests = [one for part in asked for one in part]
    answers = [one for part in passes for one in part]
    pieces = [pieces_of(answer.times) for answer in answers]
    gaps = [later - earlier for times in pieces for earlier, later in itertools.pairwise(times)]
    seconds = [max(answer.times[-1] for answer in one) for one in passes]
    tokens = sum(answer.tokens for answer in answers)
    cached = sum(answer.cached or 0 for answer in answers)
    rates = [sum(answer.tokens for answer in one) / spent for one, spent in zip(passes, seconds, strict=True)]
    return {
        "contender": name,
        "load": str(load),
        "prompts": f"{load.system_prompt:,} shared and {load.prompts}" if load.system_prompt else str(load.prompts),
        "answers": str(load.answers),
        "seed": load.seed,
        "requests": len(answers),
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "new_tokens": tokens,
        "short": sum(answer.tokens < request.new for answer, request in zip(answers, requests, strict=True)),
        "cached_tokens": cached if any(answer.cached is not None for answer in answers) else None,
        "seconds": seconds,
        "first_s": BenchPercentiles.from_times(answer.times[0] - answer.begun for answer in answers)._asdict(),
        "between_s": BenchPercentiles.from_times(gaps or [0.0])._asdict(),
        "end_s": BenchPercentiles.from_times(answer.times[-1] - answer.begun for answer in answers)._asdict(),
        "figures": {
            "tokens_per_s": Spread.of_rates(rates)._asdict(),
            "tokens_a_piece": tokens / max(1, sum(map(len, pieces))),
        },
    }


def pieces_of(times: Sequence[float]) -> list[float]:
    """Return when pieces came, by when their events were read; the last event of an answer may have no text."""
    return [now for last, now in itertools.pairwise([float("-inf"), *times]) if now - last > _TOGETHER]
