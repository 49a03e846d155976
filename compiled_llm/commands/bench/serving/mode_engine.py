"""The engine in one mode, with room for two rows: what a request alone, and one beside another, wait for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import compiled_llm
from compiled_llm.commands.bench.contender import Setup, free_memory
from compiled_llm.commands.bench.contenders.ours import obstacle_of
from compiled_llm.commands.bench.graph_results import GraphUse
from compiled_llm.commands.bench.local import tokens_to_hold
from compiled_llm.commands.bench.serving.contender import check_answers
from compiled_llm.commands.bench.serving.our_engine import StreamingSession, params_of
from compiled_llm.commands.bench.serving.workloads import Asked
from compiled_llm.config import Mode, WrapConfig
from compiled_llm.engine.engine import Engine

ROWS = 2


class ModeEngine:
    """The engine on a model that is wrapped in a mode; as many CUDA graphs as are asked for."""

    def __init__(self, mode: Mode) -> None:
        """Take the ``mode`` of ``wrap``."""
        self.mode: Mode = mode
        self.name = f"compiled-llm:{mode}"
        self.summary = f"this package's engine, mode {mode}"

    def obstacle(self, setup: Setup) -> str | None:
        """Return why the mode cannot run there."""
        return obstacle_of(self.mode, setup)

    def records(self, setup: Setup) -> bool:
        """Whether graphs of ours are recorded, which may be there or not."""
        return WrapConfig(mode=self.mode).captures_on(setup.device.type)

    @contextmanager
    def opened(self, setup: Setup, max_graphs: int | None = None) -> Iterator[ModeSession]:
        """Wrap the model, and unwrap it again.

        Args:
            setup: model, device and workloads.
            max_graphs: how many graphs there may be; None for any number.
        """
        model = setup.model()
        tokens = tokens_to_hold(setup.workloads, WrapConfig.page_size)
        compiled_llm.wrap(
            model,
            mode=self.mode,
            max_batch_size=ROWS,
            kv_memory=f"{tokens} tokens",
            max_graphs=max_graphs,
            progress=False,
        )
        try:
            with Engine(model, max_rows=ROWS, prefix_cache=False, watch_model=False) as engine:  # as a server's
                yield ModeSession(setup, model, engine)
        finally:
            compiled_llm.unwrap(model)
            free_memory(setup.device)


class ModeSession(StreamingSession):
    """Is asked through ``submit``, and tells what graphs there are."""

    def prepare(self) -> None:
        """Compile, and record all that there may be."""
        self.engine.warmup(range(1, ROWS + 1))

    def compile(self, asked: Asked) -> None:
        """Compile everything, and record what one request needs."""
        self.engine.generate([asked.prompt], params_of(asked, 0.0))

    def run_beside(self, running: Asked, other: Asked, tokens: int) -> list[float]:
        """Answer a request, and another one that comes when the first one has so many tokens.

        Returns:
            When each token of the first one came, in seconds from the begin.
        """
        return asyncio.run(self._run_beside(running, other, tokens))

    async def _run_beside(self, running: Asked, other: Asked, tokens: int) -> list[float]:
        begin, times, others = time.perf_counter(), [], []
        async for _ in self.engine.submit(running.prompt, params_of(running, 0.0)):
            times.append(time.perf_counter() - begin)
            if len(times) == tokens:
                others.append(asyncio.ensure_future(self._answered_alone(other)))
        await asyncio.gather(*others)
        check_answers([len(times)], [running])
        return times

    async def _answered_alone(self, request: Asked) -> None:
        async for _ in self.engine.submit(request.prompt, params_of(request, 0.0)):
            pass

    def graph_use(self, name: str, recordings: str) -> GraphUse | None:
        """Return what graphs there are, if there are any.

        Of cudagraph trees it is known how many there are, and what recording them took from the allocator.
        """
        if table := self._compiled.cuda_graphs:
            seconds = sum(row.capture_seconds for row in table)
            return GraphUse(name, recordings, table.ready, table.nbytes, table.captures, table.evictions, seconds)
        stats = self._compiled.stats()
        count, nbytes = stats.cuda_graphs, stats.memory.get("graphs", 0)
        return GraphUse(name, recordings, count, nbytes, count, 0, None) if count else None
