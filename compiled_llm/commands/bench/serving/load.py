"""What ``bench serve`` asks of everybody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from compiled_llm.commands.bench.serving.workloads import Lengths, OfflineWorkload, OnlineWorkload
from compiled_llm.commands.bench.workload import Workload
from compiled_llm.commands.options.choices import integers

_PROMPT = 100
"""Tokens of each prompt, if many are asked at once."""


class LoadOptions(NamedTuple):
    """What the command says of it; None for what suits the device, and an empty text for nothing."""

    prompts: str | None
    new: int | None
    requests: int | None
    streams: str | None
    stream_tokens: int | None
    rates: str | None
    seconds: float
    arriving_prompts: str
    arriving_answers: str
    seed: int
    runs: int

    def load(self, cuda: bool) -> Load:
        """Return the load.

        Raises:
            ValueError: an option is none that it can be.
        """
        usual: dict[str, Any] = _ON_CUDA if cuda else _ON_CPU
        wanted = self._replace(**{name: value for name, value in usual.items() if getattr(self, name) is None})
        return wanted._load()

    def _load(self) -> Load:
        listed = {name: getattr(self, name) for name in ("prompts", "streams", "rates")}
        prompts, streams, rates = (integers(f"--{name}", text) for name, text in listed.items())
        arriving = (
            Lengths.parse("--arriving-prompts", self.arriving_prompts),
            Lengths.parse("--arriving-answers", self.arriving_answers),
        )
        return Load(
            alone=[self._equal(self.requests or 1, length, self.new or 2) for length in prompts],
            together=[self._equal(count, _PROMPT, self.stream_tokens or 2) for count in streams],
            rates=[OnlineWorkload(rate, self.seconds, *arriving, seed=self.seed) for rate in rates],
            runs=self.runs,
        )

    def _equal(self, requests: int, prompt: int, answer: int) -> OfflineWorkload:
        return OfflineWorkload(requests, Lengths(prompt, prompt), Lengths(answer, answer), self.seed)


_ON_CUDA = {
    "prompts": "10,50,100,150,200,250,300,350,400",
    "new": 64,
    "requests": 30,
    "streams": "64,256",
    "stream_tokens": 256,
    "rates": "4,16,64",
}
_ON_CPU = {"prompts": "10,100", "new": 16, "requests": 5, "streams": "8", "stream_tokens": 32, "rates": "2"}


class Load(NamedTuple):
    """What is asked.

    Attributes:
        alone: requests one after the other; a workload for each prompt length.
        together: requests all at once; a workload for each number of them.
        rates: requests that arrive at random; a workload for each rate.
        runs: timed passes over ``together``.
    """

    alone: Sequence[OfflineWorkload]
    together: Sequence[OfflineWorkload]
    rates: Sequence[OnlineWorkload]
    runs: int

    @property
    def bounds(self) -> list[Workload]:
        """Calls that are at least as long, to check positions with."""
        return [*(one.bounds for one in (*self.alone, *self.together)), *(one.bounds for one in self.rates)]
