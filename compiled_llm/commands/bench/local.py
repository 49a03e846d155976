"""Sessions in this process: everything that runs through HuggingFace's ``generate``."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from compiled_llm.commands.bench.contender import Setup
from compiled_llm.commands.bench.peer import WORKERS
from compiled_llm.commands.bench.timing import Timing, TokenClock, timed
from compiled_llm.commands.bench.workload import SAMPLING, Workload

_WARM_TOKENS = 16


class LocalSession:
    """A model of this process, and how ``generate`` is called on it.

    Attributes:
        setup: the run's.
        model: the model.
        versions: empty; this process's own are known.
    """

    def __init__(
        self, setup: Setup, model: PreTrainedModel, warm_calls: int = 1, compiles: bool = True, **options: Any
    ) -> None:
        """Remember the model.

        Args:
            setup: the run's.
            model: the model.
            warm_calls: calls until nothing is compiled or recorded any more.
            compiles: whether there is anything to compile; if not, a few tokens are enough to warm up.
            options: further arguments of ``generate``.
        """
        self.setup = setup
        self.model: Any = model
        self.versions: dict[str, str] = {}
        self._warm_calls = warm_calls
        self._compiles = compiles
        self._options = options
        self._numbers = itertools.count()
        if setup.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(setup.device)

    def prepare(self, workload: Workload) -> None:
        """Run until nothing is compiled any more."""
        if not self._compiles:
            workload = replace(workload, new=min(_WARM_TOKENS, workload.new))
        for _ in range(self._warm_calls):
            self.run(workload)

    def run(self, workload: Workload) -> Timing:
        """Run the workload once, with new prompts."""
        return self.run_with(TokenClock(), workload)

    def run_with(self, clock: TokenClock, workload: Workload) -> Timing:
        """Run the workload once, with new prompts and a streamer of the caller's."""
        prompts = workload.prompts(self.vocabulary, next(self._numbers))
        ids = torch.tensor(prompts, device=self.setup.device)
        return timed(lambda: self._generate(ids, workload, clock), clock, workload.new, self.setup.synchronize)

    @property
    def vocabulary(self) -> int:
        """How many token ids there are."""
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    def memory(self) -> dict[str, int]:
        """The most that was allocated at once."""
        if self.setup.device.type != "cuda":
            return {}
        return {"peak": torch.cuda.max_memory_allocated(self.setup.device)}

    def host_us(self, workload: Workload) -> float | None:
        """What launching a decode step costs the host, in microseconds; None if that is not known."""
        return None

    def _generate(self, ids: torch.Tensor, workload: Workload, streamer: TokenClock) -> None:
        sampling = {"do_sample": True, **SAMPLING} if workload.sampled else {"do_sample": False}
        out = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=workload.new,
            streamer=streamer,
            **sampling,
            **self._options,
        )
        wanted = (workload.batch, workload.prompt + workload.new)
        if tuple(out.shape) != wanted:
            raise RuntimeError(f"{tuple(out.shape)} tokens came back instead of {wanted}")


@contextmanager
def local_worker(setup: Setup, contender: str) -> Iterator[list[str]]:
    """Yield the command for a contender of this environment; see ``workers/local_worker.py``."""
    yield _command("local_worker.py", setup, contender)


def artifacts_worker(setup: Setup, contender: str) -> list[str]:
    """Return the command that writes the setup's artifacts, for a contender; see ``workers/artifacts_worker.py``."""
    return _command("artifacts_worker.py", setup, contender)


def _command(worker: str, setup: Setup, contender: str) -> list[str]:
    job = {
        "contender": contender,
        "model": setup.name,
        "device": str(setup.device),
        "dtype": str(setup.dtype).removeprefix("torch."),
        "workloads": [[work.batch, work.prompt, work.new, work.sampled] for work in setup.workloads],
        "artifacts": setup.artifacts,
    }
    # By its path: with -m, Python would look for modules in the current folder first.
    return [sys.executable, os.fspath(WORKERS / worker), json.dumps(job)]


def setup_of(job: dict[str, Any]) -> Setup:
    """Return the setup that a worker's job describes."""
    return Setup(
        name=job["model"],
        device=torch.device(job["device"]),
        dtype=getattr(torch, job["dtype"]),
        workloads=[Workload(*fields) for fields in job["workloads"]],
        artifacts=job["artifacts"],
    )


def tokens_to_hold(workloads: Sequence[Workload], page_size: int) -> int:
    """Return how many tokens of pages the largest workload needs, with a page to spare in each row."""
    return max(work.batch * (-(-(work.prompt + work.new) // page_size) + 1) * page_size for work in workloads)
