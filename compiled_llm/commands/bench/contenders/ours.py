"""compiled-llm, in each mode, and with a backend of choice."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import compiled_llm
from compiled_llm.commands.bench.contender import Setup, free_memory
from compiled_llm.commands.bench.local import LocalSession, local_worker, tokens_to_hold
from compiled_llm.commands.bench.workload import Workload
from compiled_llm.config import Backend, Mode, WrapConfig
from compiled_llm.execution.runner import Runner

_HOST_STEPS = 64


def obstacle_of(mode: Mode, setup: Setup) -> str | None:
    """Return why a mode cannot run there, or None."""
    if mode not in ("eager", "compile") and setup.device.type != "cuda":
        return "a CPU has no CUDA graphs: this mode is compiled-llm:compile there"
    return None


class Ours:
    """The wrapped model, with pages for the largest workload."""

    def __init__(self, mode: Mode, backend: Backend = "auto") -> None:
        """Take the ``mode`` and the ``backend`` of ``wrap``."""
        self.mode: Mode = mode
        self.name = f"compiled-llm:{mode}"
        self.summary = f"this package, mode {mode}"
        self.backend: Backend = backend
        if backend != "auto":
            self.name += f":{backend}"
            self.summary += f", backend {backend}"

    def obstacle(self, setup: Setup) -> str | None:
        """Return why the mode or the backend cannot run there; what a model lacks, ``wrap`` says."""
        if self.backend != "auto" and setup.device.type != "cuda":
            return f"backend {self.backend} runs on CUDA only"
        return obstacle_of(self.mode, setup)

    @contextmanager
    def opened(self, setup: Setup) -> Iterator[LocalSession]:
        """Wrap the model, and unwrap it again."""
        model = setup.model()
        tokens = tokens_to_hold(setup.workloads, WrapConfig.page_size)
        compiled_llm.wrap(
            model,
            mode=self.mode,
            max_batch_size=max(work.batch for work in setup.workloads),
            kv_memory=f"{tokens} tokens",
            progress=False,
            backend=self.backend,
            artifacts=setup.artifacts,
        )
        try:
            yield _WrappedSession(setup, model, compiles=self.mode != "eager")
        finally:
            compiled_llm.unwrap(model)
            free_memory(setup.device)

    def worker(self, setup: Setup) -> AbstractContextManager[list[str]]:
        """Run in a process of this environment."""
        return local_worker(setup, self.name)


class _WrappedSession(LocalSession):
    def prepare(self, workload: Workload) -> None:
        """Compile and record, then run once."""
        self.model.compiled.warmup([workload.batch])
        super().prepare(workload)

    def memory(self) -> dict[str, int]:
        """By what it is for, and the most that was allocated at once."""
        return {**self.model.compiled.stats().memory, **super().memory()}

    def host_us(self, workload: Workload) -> float | None:
        """The mean of ``generate``'s steps with an idle device: each launches a greedy step and reads the last."""
        steps = min(_HOST_STEPS, workload.new - 2)
        if steps < 1 or workload.sampled:
            return None
        runner = self.model.compiled.runner()
        try:
            for prompt in workload.prompts(self.vocabulary, 0):
                runner.admit(prompt, workload.new)
            runner.step()  # prefill
            runner.step()  # looks whether the model is as it was recorded; the others of a call need not
            return 1e6 * statistics.fmean(self._seconds_of_step(runner) for _ in range(steps))
        finally:
            self.setup.synchronize()
            runner.close()

    def _seconds_of_step(self, runner: Runner) -> float:
        self.setup.synchronize()
        start = time.perf_counter()
        runner.step(unchanged=True)
        return time.perf_counter() - start
