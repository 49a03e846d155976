"""One call of `compiled-llm generate`: what was asked, checked before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiled_llm.commands.options.prompt import check_system
from compiled_llm.commands.options.sampling import SamplingFlags, check_range
from compiled_llm.config import WrapConfig


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
