"""What takes part in a measurement: a contender opens a session, and the session runs workloads.

A new one is a file in ``contenders/`` with a class of these two protocols' shape, and a line in ``contenders.ALL``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from transformers import PreTrainedModel

from compiled_llm.commands.bench import models
from compiled_llm.commands.bench.timing import Timing
from compiled_llm.commands.bench.workload import Workload

Log = Callable[[str], object]


@dataclass
class Setup:
    """What all contenders of a run share.

    Attributes:
        name: the model's, as given on the command line.
        device: where it runs.
        dtype: of its weights, keys and values.
        workloads: all that will be asked, so that memory can be set aside.
        commands: how to run engines that live in environments of their own: a contender's name, and a command that
            takes a Python file and its arguments.
        log: takes one line about what is being done.
        patience: seconds in which something has to come while requests wait.
        artifacts: folder that ``compiled-llm compile`` would write for the model; ours starts with it.
    """

    name: str
    device: torch.device
    dtype: torch.dtype
    workloads: Sequence[Workload]
    commands: dict[str, str] = field(default_factory=dict)
    log: Log = lambda line: None
    patience: float = 60.0
    artifacts: str | None = None
    _model: PreTrainedModel | None = None

    def model(self) -> PreTrainedModel:
        """Return the model, built at the first call; contenders in this process share it.

        Raises:
            ValueError: a workload is longer than the model allows.
        """
        if self._model is None:
            self.log(f"{self.name}: building the model")
            self._model = models.build(self.name, self.device, self.dtype)
            self._check_lengths(self._model)
        return self._model

    def drop_model(self) -> None:
        """Give the model's memory back, for another process or because its state is in doubt."""
        self._model = None
        free_memory(self.device)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _check_lengths(self, model: PreTrainedModel) -> None:
        longest, most = max(work.prompt + work.new for work in self.workloads), models.most_positions(model)
        if most is not None and longest > most:
            raise ValueError(f"{self.name} has {most} positions; {longest} tokens of prompt and output are too many")


def free_memory(device: torch.device) -> None:
    """Give back what nothing refers to."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Session(Protocol):
    """A contender that has its model loaded.

    Attributes:
        versions: of packages that this process does not have.
    """

    versions: dict[str, str]

    def prepare(self, workload: Workload) -> None:
        """Compile, record and run until the workload is warm."""

    def run(self, workload: Workload) -> Timing:
        """Run it once."""
        ...

    def memory(self) -> dict[str, int]:
        """Return bytes on the device by what they are for; empty if that is not known."""
        ...


class Participant(Protocol):
    """What contenders of every experiment have.

    Attributes:
        name: as on the command line.
        summary: what it is, in one line.
    """

    name: str
    summary: str

    def obstacle(self, setup: Setup) -> str | None:
        """Return why it cannot take part here, or None."""
        ...


class Contender(Participant, Protocol):
    """Something that generates text."""

    def opened(self, setup: Setup) -> AbstractContextManager[Session]:
        """Load the model for the block."""
        ...

    def worker(self, setup: Setup) -> AbstractContextManager[list[str]]:
        """Yield a command that starts it in a process of its own, which speaks as ``peer.Peer`` expects."""
        ...
