"""Engines that answer requests: ours in this process, and vLLM's in a worker."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from peers import Peer, Worker
from shapes import vocabulary_of

import compiled_llm
from compiled_llm.commands.bench.contenders import Contender, Setup
from compiled_llm.commands.bench.load import Asked, LoadAnswer, answered
from compiled_llm.config import Mode, WrapConfig
from compiled_llm.engine.engine import Engine
from compiled_llm.requests.sampling_params import SamplingParams

OURS, CASCADE, NO_CASCADE, INVARIANT, FP8 = "compiled-llm:engine", "cascade", "no-cascade", "batch-invariant", "fp8"
COUNTS = {"steps": "steps", "preemptions": "preemptions", "cached tokens": "cached_tokens"}
"""What is counted of a pass, and the fields of the engine's `stats`."""


@dataclass
class Served:
    """One pass over requests: its seconds, and what the engine counted meanwhile."""

    seconds: float
    counts: dict[str, int] = field(default_factory=dict)


class EngineContender(Contender):
    """Opens engines, not sessions of `generate`."""

    @contextmanager
    def engine(self, setup: Setup) -> Iterator[Any]:
        raise NotImplementedError
        yield


class OurEngine(EngineContender):
    """`compiled_llm.Engine`; a mode that is not named is `wrap`'s choice. Its name says what is not the default."""

    def __init__(
        self,
        mode: Mode | None = None,
        *,
        cascade: bool = True,
        batch_invariant: bool = False,
        fp8: bool = False,
        **options: Any,
    ) -> None:
        """`fp8`: keys and values in 8 bits, without scales. `options` are the engine's."""
        said = ["mixed" if options.get("mixed") is True else None, None if cascade else NO_CASCADE]
        said += [None if options.get("prefix_cache", True) else "no-prefix-cache"]
        said += [INVARIANT if batch_invariant else None, FP8 if fp8 else None]
        self.name = ":".join(filter(None, [OURS, mode, *said]))
        self._mode: Mode = WrapConfig.mode if mode is None else mode
        self._wrap: dict[str, Any] = {"cascade": "auto" if cascade else False, "batch_invariant": batch_invariant}
        self._wrap["kv_dtype"] = "fp8_e4m3" if fp8 else None
        self._options = options

    @contextmanager
    def engine(self, setup: Setup) -> Iterator[OurSession]:
        setup.free_memory()  # whoever measured the last contender held its engine until now
        model = setup.model()
        compiled_llm.wrap(model, mode=self._mode, **self._wrap, progress=False)
        try:
            with Engine(model, **self._options) as engine:
                setup.log(f"{self.name}: compiling and capturing")
                engine.warmup()
                gc.collect()
                gc.freeze()  # as `compiled-llm serve` and vLLM do
                yield OurSession(setup, engine)
        finally:
            gc.unfreeze()
            compiled_llm.unwrap(model)
            setup.free_memory()


class OurSession:
    """An engine of this process, asked in one call, or through `submit` as requests arrive."""

    profiled = True

    def __init__(self, setup: Setup, engine: Engine) -> None:
        self.setup, self.engine = setup, engine

    def all(self, asked: Sequence[Asked], temperature: float) -> Served:
        before = asdict(self.engine.stats())
        params = [params_of(request, temperature) for request in asked]
        self.setup.synchronize()
        start = time.perf_counter()
        outputs = self.engine.generate([request.prompt for request in asked], params)
        seconds = time.perf_counter() - start
        check([len(output.token_ids) for output in outputs], asked)
        after = asdict(self.engine.stats())
        return Served(seconds, {name: after[field] - before[field] for name, field in COUNTS.items()})

    def stream(self, asked: Sequence[Asked], concurrency: int | None) -> list[LoadAnswer]:
        return asyncio.run(answered(asked, self._ask, concurrency))

    async def _ask(self, request: Asked) -> LoadAnswer:
        handle = self.engine.submit(request.prompt, params_of(request, 0.0))
        times = [time.perf_counter() async for _ in handle]
        return LoadAnswer(times, len(times), (await handle).cached_tokens)


class VllmEngine(EngineContender):
    """vLLM's `LLM`, or with `streams` its `AsyncLLM`, in a worker."""

    def __init__(self, python: str, streams: bool, cascade: bool = False, fp8: bool = False) -> None:
        self.name = ":".join(filter(None, ["vllm", CASCADE if cascade else None, FP8 if fp8 else None]))
        self._peer = Peer(python, streams, cascade, fp8)

    def obstacle(self, setup: Setup) -> str | None:
        return self._peer.obstacle(setup)

    @contextmanager
    def engine(self, setup: Setup) -> Iterator[VllmSession]:
        with self._peer.worker(setup) as worker:
            yield VllmSession(setup, worker)


class VllmSession:
    profiled = False

    def __init__(self, setup: Setup, worker: Worker) -> None:
        self.worker, self._vocabulary = worker, vocabulary_of(setup.name)

    def all(self, asked: Sequence[Asked], temperature: float) -> Served:
        answer = self._ask(asked, temperature)
        return Served(answer["seconds"], {"cached tokens": sum(number or 0 for number in answer["cached"])})

    def stream(self, asked: Sequence[Asked], concurrency: int | None) -> list[LoadAnswer]:
        assert concurrency is None, "requests that arrive at a rate"
        answer = self._ask(asked, 0.0)
        rows = zip(answer["times"], answer["lengths"], answer["cached"], asked, strict=True)
        return [LoadAnswer(times, length, cached, request.arrival) for times, length, cached, request in rows]

    def _ask(self, asked: Sequence[Asked], temperature: float) -> dict[str, Any]:
        more = {"arrivals": [request.arrival for request in asked], "sampling": {"temperature": temperature}}
        return self.worker.ask([request.prompt for request in asked], [request.new for request in asked], **more)


def with_cascade(contenders: str) -> str:
    """Add to each engine the one that does otherwise with pages which requests share: ours reads them for each."""
    return ",".join(f"{name},{name}:{CASCADE if name == 'vllm' else NO_CASCADE}" for name in contenders.split(","))


def with_fp8(contenders: str) -> str:
    """Add to each engine the same one with keys and values in 8 bits."""
    return ",".join(f"{name},{name}:{FP8}" for name in contenders.split(","))


def params_of(request: Asked, temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=request.new, ignore_eos=True)


def check(lengths: Sequence[int], asked: Sequence[Asked]) -> None:
    for number, (length, request) in enumerate(zip(lengths, asked, strict=True)):
        if length != request.new:
            raise RuntimeError(f"request {number}: {length} tokens came instead of {request.new}")
