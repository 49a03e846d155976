"""One call of `compiled-llm generate`: what was asked, checked before a model is loaded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_llm.commands.prompt import check_system
from compiled_llm.config import WrapConfig

if TYPE_CHECKING:
    from compiled_llm.requests.sampling_params import SamplingParams

_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "max_new_tokens": (lambda value: value >= 1, "at least 1"),
    "temperature": (lambda value: 0 < value < math.inf, "above 0; --greedy takes the most likely token"),
    "top_k": (lambda value: 0 <= value < 2**31, "at least 0, which is all tokens"),
    "top_p": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "min_p": (lambda value: 0 <= value <= 1, "from 0 to 1"),
    "repetition_penalty": (lambda value: 0 < value < math.inf, "above 0"),
    "seed": (lambda value: 0 <= value < 2**64, "from 0 to 2**64 - 1"),
}


@dataclass(frozen=True)
class SamplingFlags:
    """How to choose tokens; None if the model's own generation config decides.

    Attributes:
        sample: sample, or take the most likely token; None: sample if any other option is given.
    """

    sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            ValueError: one is out of range, or contradicts ``--greedy``.
        """
        for name, value in self._given().items():
            check_range(name, value)
        drawing = [_flag(name) for name in self._given() if name != "repetition_penalty"]
        if self.sample is False and drawing:
            raise ValueError(f"--greedy draws nothing, so it does not go with {', '.join(drawing)}")

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn."""
        return bool(self._given()) if self.sample is None else self.sample

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of ``generate``."""
        settings = {name: value for name, value in self._given().items() if name != "seed"}
        return {"do_sample": self.draws, **settings}

    def params(self, max_tokens: int, stop: Sequence[str]) -> SamplingParams:
        """Return the settings of an engine's request."""
        from compiled_llm.requests.sampling_params import SamplingParams

        settings = self.options()
        drawn: dict[str, Any] = {"seed": self.seed} if settings.pop("do_sample") else {"temperature": 0.0}
        return SamplingParams(**drawn, **settings, max_tokens=max_tokens, stop=list(stop) or None)

    def _given(self) -> dict[str, float]:
        values = dataclasses.asdict(self)
        del values["sample"]
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Request:
    """One call of `compiled-llm generate`, its prompt read.

    Attributes:
        prompt: the text to continue, or with ``chat`` the message to answer.
        system: the system message of the chat, if there is one.
        stop: texts that end the answer.
        artifacts: what was compiled before, if it is to be taken from there.
        as_json: write one JSON object in place of the text.
        quiet: show neither progress nor figures.
    """

    prompt: str
    chat: bool
    system: str | None
    sampling: SamplingFlags
    max_new_tokens: int
    stop: Sequence[str]
    model: str
    mode: str
    backend: str
    dtype: str
    device: str
    as_json: bool
    quiet: bool
    artifacts: Path | None = None

    def __post_init__(self) -> None:
        """Check what can be checked before a model is loaded.

        Raises:
            ValueError: a value is impossible, or two do not go together.
        """
        check_range("max_new_tokens", self.max_new_tokens)
        check_system(self.system, self.chat)
        if "" in self.stop:
            raise ValueError("--stop '': an empty text stops nothing; leave it out")
        self.wrap_config("cpu")

    def wrap_options(self, device: str) -> dict[str, Any]:
        """Return the options of ``wrap`` on a kind of device.

        On a CPU room for rows costs nothing before it is used, and with the default the code is what ``wrap(model)``
        compiles: each finds the other's in the cache. On CUDA pages for one row leave others most of the memory.
        """
        rows = {"max_batch_size": 1} if device == "cuda" else {}
        artifacts = {} if self.artifacts is None else {"artifacts": self.artifacts}
        return {"mode": self.mode, "backend": self.backend, "progress": not self.quiet, **rows, **artifacts}

    def wrap_config(self, device: str) -> WrapConfig:
        """Return the options of ``wrap`` on a kind of device, checked."""
        return WrapConfig.from_options(self.wrap_options(device))

    def generate_options(self) -> dict[str, Any]:
        """Return the keyword arguments of ``generate``, tensors and streamer aside."""
        stopping = {"stop_strings": list(self.stop)} if self.stop else {}
        return {"max_new_tokens": self.max_new_tokens, **self.sampling.options(), **stopping}


def check_range(name: str, value: float) -> None:
    """Check one number of the command line.

    Raises:
        ValueError: it is out of range.
    """
    holds, wanted = _RANGES[name]
    if not holds(value):
        raise ValueError(f"{_flag(name)} {value}: must be {wanted}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
