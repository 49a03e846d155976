"""``compiled_llm.Engine``, as it is by default, on a model that is wrapped as it is by default."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import compiled_llm
from compiled_llm.commands.bench.contender import Setup, free_memory
from compiled_llm.commands.bench.serving.contender import Served, check_answers
from compiled_llm.commands.bench.serving.workloads import Asked
from compiled_llm.commands.bench.workers.silence import Silence
from compiled_llm.config import Mode, WrapConfig
from compiled_llm.engine.engine import Engine
from compiled_llm.engine.metrics import EngineStats
from compiled_llm.requests.sampling_params import SamplingParams

OURS = "compiled-llm:engine"
_COUNTS = {"steps": "steps", "preemptions": "preemptions", "cached tokens": "cached_tokens"}
"""What is counted of a pass, and the fields of the engine's ``stats``."""


class OurEngine:
    """The engine; a mode that is not named is ``wrap``'s own choice."""

    def __init__(self, mode: Mode | None = None, max_step_ms: float | None = None, watch_model: bool = True) -> None:
        """Take the ``mode`` of ``wrap``, and options of the engine's."""
        self.name = OURS if mode is None else f"{OURS}:{mode}"
        self.summary = "this package's engine" if mode is None else f"this package's engine, mode {mode}"
        self._options: dict[str, Any] = {"max_step_ms": max_step_ms, "watch_model": watch_model}
        self._mode: Mode = WrapConfig.mode if mode is None else mode

    def obstacle(self, setup: Setup) -> str | None:
        """It runs anywhere."""
        return None

    @property
    def session(self) -> type[EngineSession]:
        """How it is asked."""
        return EngineSession

    @contextmanager
    def opened(self, setup: Setup) -> Iterator[EngineSession]:
        """Wrap the model, and unwrap it again."""
        model = setup.model()
        compiled_llm.wrap(model, mode=self._mode, progress=False)
        try:
            with Engine(model, **self._options) as engine:
                yield self.session(setup, model, engine)
        finally:
            compiled_llm.unwrap(model)
            free_memory(setup.device)


class OurStreamingEngine(OurEngine):
    """The engine, asked through ``submit`` and ``async for``."""

    @property
    def session(self) -> type[EngineSession]:
        """How it is asked."""
        return StreamingSession


class EngineSession:
    """An engine of this process."""

    profiled = True

    def __init__(self, setup: Setup, model: Any, engine: Engine) -> None:
        """Remember the engine of a wrapped model."""
        self.versions: dict[str, str] = {}
        self.vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
        self.engine = engine
        self._compiled = model.compiled
        self._setup = setup

    def prepare(self) -> None:
        """Compile and record all sizes."""
        self.engine.warmup()

    def run(self, asked: Sequence[Asked], temperature: float) -> Served:
        """Answer all of them in one call."""
        before = self.engine.stats()
        params = [params_of(request, temperature) for request in asked]
        self._setup.synchronize()
        start = time.perf_counter()
        outputs = self.engine.generate([request.prompt for request in asked], params)
        seconds = time.perf_counter() - start
        check_answers([len(output.token_ids) for output in outputs], asked)
        return Served(seconds, counts_since(before, self.engine.stats()))


class StreamingSession(EngineSession):
    """Requests are submitted as they arrive, and a coroutine for each takes its tokens."""

    def run(self, asked: Sequence[Asked], temperature: float) -> Served:
        """Answer them when they arrive."""
        before = self.engine.stats()
        times = asyncio.run(self._answered(asked, temperature))
        check_answers([len(one) for one in times], asked)
        return Served(max(one[-1] for one in times), counts_since(before, self.engine.stats()), times)

    async def _answered(self, asked: Sequence[Asked], temperature: float) -> list[list[float]]:
        silence, begin = Silence(self._setup.patience), time.perf_counter()

        async def answered(request: Asked) -> list[float]:
            await asyncio.sleep(begin + request.arrival - time.perf_counter())
            return await silence.broken_by(times_of(request))

        async def times_of(request: Asked) -> list[float]:
            times = []
            async for _ in self.engine.submit(request.prompt, params_of(request, temperature)):
                silence.heard = now = time.perf_counter()
                times.append(now - begin)
            return times

        return await silence.watched(asyncio.gather(*map(answered, asked)))


def params_of(request: Asked, temperature: float) -> SamplingParams:
    """Return what asks for an answer of that length."""
    return SamplingParams(temperature=temperature, max_tokens=request.new, ignore_eos=True)


def counts_since(before: EngineStats, after: EngineStats) -> dict[str, int]:
    """Return what has happened between two looks."""
    first, last = asdict(before), asdict(after)
    return {name: last[field] - first[field] for name, field in _COUNTS.items()}
