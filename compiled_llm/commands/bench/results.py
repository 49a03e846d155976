"""What one contender did, in each of the bench's commands."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from compiled_llm.commands.bench.timing import Percentiles, Spread
from compiled_llm.commands.bench.workload import Workload
from compiled_llm.explaining.profile.breakdown import Breakdown


@dataclass(frozen=True)
class Latency:
    """One contender under one workload.

    Attributes:
        contender: its name.
        batch: rows.
        prompt: tokens in each prompt.
        new: new tokens of each row.
        sampled: whether tokens were sampled.
        first_s: each run's time to the first token, in seconds.
        total_s: each run's whole time, in seconds.
        ready_s: what compiling and warming up took, in seconds.
        ceiling: tokens/s that the read bandwidth allows; None if it is not known.
    """

    contender: str
    batch: int
    prompt: int
    new: int
    sampled: bool
    first_s: list[float]
    total_s: list[float]
    ready_s: float
    ceiling: float | None

    @property
    def workload(self) -> Workload:
        """What was asked."""
        return Workload(self.batch, self.prompt, self.new, self.sampled)

    @property
    def first(self) -> Spread:
        """Time to first token, in seconds."""
        return Spread.of_times(self.first_s)

    @property
    def decode(self) -> Spread:
        """Tokens/s after the first."""
        tokens = self.batch * (self.new - 1)
        return Spread.of_rates(
            tokens / (total - first) for first, total in zip(self.first_s, self.total_s, strict=True)
        )

    @property
    def end_to_end(self) -> Spread:
        """Tokens/s of the whole call."""
        return Spread.of_rates(self.batch * self.new / total for total in self.total_s)

    @property
    def of_ceiling(self) -> float | None:
        """The median decode rate as a share of the ceiling."""
        return None if self.ceiling is None else self.decode.median / self.ceiling

    def figures(self) -> dict[str, Any]:
        """What is computed from the times; repeated in JSON for those who read it."""
        return {
            "context": self.workload.context,
            "first_s": asdict(self.first),
            "decode_tokens_per_s": asdict(self.decode),
            "end_to_end_tokens_per_s": asdict(self.end_to_end),
            "of_ceiling": self.of_ceiling,
        }


@dataclass(frozen=True)
class Startup:
    """How long one contender takes to start and to generate, in processes of its own.

    Attributes:
        contender: its name.
        cache: ``cold`` (empty cache folders in every run), ``warm`` (those of an earlier run), or ``artifacts`` (empty
            ones, and a folder as `compiled-llm compile` writes it).
        stages: seconds from the start of the process to each stage, for every run: ``imported``, ``loaded``,
            ``first token``, ``all tokens``.
    """

    contender: str
    cache: str
    stages: dict[str, list[float]]

    def stage(self, name: str) -> Spread:
        """Summarise one stage."""
        return Spread.of_times(self.stages[name])

    def figures(self) -> dict[str, Any]:
        """What is computed from the times."""
        return {name: asdict(self.stage(name)) for name in self.stages}


@dataclass(frozen=True)
class Roofline(Breakdown):
    """Where the time of one decode step goes.

    Attributes:
        contender: its name.
        batch: rows.
        prompt: tokens in each prompt.
        new: new tokens of each row.
        sampled: whether tokens were sampled.
    """

    contender: str
    batch: int
    prompt: int
    new: int
    sampled: bool

    @property
    def workload(self) -> Workload:
        """What was asked."""
        return Workload(self.batch, self.prompt, self.new, self.sampled)


@dataclass(frozen=True)
class Task:
    """One contender at one task of ``bench beams-and-drafts``.

    Attributes:
        contender: its name.
        task: what was run.
        tokens: generated or scored in one run.
        seconds: of each run.
    """

    contender: str
    task: str
    tokens: int
    seconds: list[float]

    @property
    def rate(self) -> Spread:
        """Tokens/s."""
        return Spread.of_rates(self.tokens / seconds for seconds in self.seconds)

    def figures(self) -> dict[str, Any]:
        """What is computed from the times."""
        return {"tokens_per_s": asdict(self.rate)}


@dataclass(frozen=True)
class Offline:
    """One contender that got many requests at once.

    Attributes:
        contender: its name.
        workload: what was asked, in words.
        requests: how many it got.
        of_requests: how many the workload has; one that is too slow for all of them gets the first ones.
        prompt_tokens: of its requests' prompts.
        new_tokens: of their answers.
        seconds: of each run.
        counts: of each run, as far as the contender says: ``steps``, ``preemptions``, ``cached tokens``.
        busy: the share of a stretch in the middle in which any kernel ran, in a run that is not timed; None if it
            cannot be seen.
        ready_s: what compiling, recording and the pass that is not timed took, in seconds.
    """

    contender: str
    workload: str
    requests: int
    of_requests: int
    prompt_tokens: int
    new_tokens: int
    seconds: list[float]
    counts: dict[str, list[int]]
    busy: float | None
    ready_s: float

    @property
    def rate(self) -> Spread:
        """New tokens/s over the whole."""
        return Spread.of_rates(self.new_tokens / seconds for seconds in self.seconds)

    @property
    def prompt_rate(self) -> Spread:
        """Tokens of prompts a second, over the whole."""
        return Spread.of_rates(self.prompt_tokens / seconds for seconds in self.seconds)

    def figures(self) -> dict[str, Any]:
        """What is computed from the times."""
        return {
            "tokens_per_s": asdict(self.rate),
            "prompt_tokens_per_s": asdict(self.prompt_rate),
            "seconds": asdict(Spread.of_times(self.seconds)),
        }


@dataclass(frozen=True)
class Online:
    """One contender that got requests as they arrived, at one rate; several runs are put together.

    Attributes:
        contender: its name.
        workload: what was asked, in words, without the rate.
        rate: requests that arrive in a second, on average.
        requests: how many arrived.
        prompt_tokens: of their prompts.
        new_tokens: of their answers.
        seconds: of each run, from its begin to the last token.
        first_s: from when a request was to arrive to its first token.
        between_s: from a token to the next one of the same request.
        end_s: from when a request was to arrive to its last token.
        counts: as far as the contender says: ``steps``, ``preemptions``, ``cached tokens``.
        ready_s: what compiling, recording and the pass that is not timed took, in seconds.
    """

    contender: str
    workload: str
    rate: float
    requests: int
    prompt_tokens: int
    new_tokens: int
    seconds: list[float]
    first_s: Percentiles
    between_s: Percentiles
    end_s: Percentiles
    counts: dict[str, int]
    ready_s: float

    @property
    def throughput(self) -> float:
        """New tokens/s."""
        return self.new_tokens / sum(self.seconds)

    @property
    def hit_rate(self) -> float | None:
        """The share of the prompts' tokens that came from the prefix cache; None if the contender does not say."""
        cached = self.counts.get("cached tokens")
        return None if cached is None else cached / self.prompt_tokens

    def figures(self) -> dict[str, Any]:
        """What is computed from these."""
        return {"tokens_per_s": self.throughput, "hit_rate": self.hit_rate}


@dataclass(frozen=True)
class OneStream:
    """One contender that got requests one after the other.

    Attributes:
        contender: its name.
        prompt: tokens of each prompt.
        new: tokens of each answer.
        first_s: from sending each request to its first token, in seconds.
        between_s: from each piece of an answer to the next.
        pieces: how many there were; fewer than tokens, if some came together.
        ready_s: what it took until it could be measured, in seconds.
    """

    contender: str
    prompt: int
    new: int
    first_s: list[float]
    between_s: Percentiles
    pieces: int
    ready_s: float

    @property
    def first(self) -> Percentiles:
        """Time to first token."""
        return Percentiles.of(self.first_s)

    @property
    def together(self) -> float:
        """Tokens a piece."""
        return len(self.first_s) * self.new / self.pieces

    def figures(self) -> dict[str, Any]:
        """What is computed from these."""
        return {"first_s": asdict(self.first), "tokens_a_piece": self.together}


@dataclass(frozen=True)
class ManyStreams:
    """One contender that got so many requests at once, all of one length.

    Attributes:
        contender: its name.
        streams: how many.
        prompt: tokens of each prompt.
        new: tokens of each answer.
        seconds: of each run.
        first_s: what passes until each request has its first token, over all runs.
        pieces: in which the answers came, in all runs.
        ready_s: what it took until it could be measured, in seconds.
    """

    contender: str
    streams: int
    prompt: int
    new: int
    seconds: list[float]
    first_s: Percentiles
    pieces: int
    ready_s: float

    @property
    def rate(self) -> Spread:
        """New tokens/s over the whole."""
        return Spread.of_rates(self.streams * self.new / seconds for seconds in self.seconds)

    @property
    def together(self) -> float:
        """Tokens a piece."""
        return len(self.seconds) * self.streams * self.new / self.pieces

    def figures(self) -> dict[str, Any]:
        """What is computed from these."""
        return {"tokens_per_s": asdict(self.rate), "tokens_a_piece": self.together}
