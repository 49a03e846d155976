"""Engines that answer requests: ours in this process, and vLLM's in a worker."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

import numpy as np
from models import vocabulary_of
from peers import Peer
from processes import Worker

import compiled_llm
from compiled_llm.commands.bench.contenders import Contender, Setup
from compiled_llm.commands.bench.load import Asked, LoadAnswer, answered
from compiled_llm.config import Mode
from compiled_llm.engine.admission.policies import POLICIES
from compiled_llm.engine.admission.state import AdmissionState, Requests
from compiled_llm.engine.engine import Engine
from compiled_llm.requests.sampling_params import SamplingParams


class UnknownLengths:
    """The engine's own policy of admission, which is not told how long answers will be at most."""

    def __init__(self) -> None:
        self._policy = POLICIES["auto"]()

    def plan(self, state: AdmissionState) -> bool:
        return self._policy.plan(_Hidden(state))


class _Hidden(AdmissionState):
    def __init__(self, state: AdmissionState) -> None:
        self._state, self.step, self.page_size = state, state.step, state.page_size
        self.pages, self.max_rows, self.lengths = state.pages, state.max_rows, state.lengths
        self.running, self.next = _hidden(state.running), _hidden(state.next)

    @property
    def waiting(self) -> Requests:
        return _hidden(self._state.waiting)


def _hidden(requests: Requests) -> Requests:
    return requests._replace(left=np.full_like(requests.left, LONGEST), exact=np.zeros_like(requests.exact))


OURS, VLLM, CASCADE, NO_CASCADE, FP8 = "compiled-llm:engine", "vllm", "cascade", "no-cascade", "fp8"
OF_WRAP: dict[str, dict[str, Any]] = {
    **{mode: {"mode": mode} for mode in get_args(Mode)},
    NO_CASCADE: {"cascade": False},
    "batch-invariant": {"batch_invariant": True},
    FP8: {"kv_dtype": "fp8_e4m3"},
}
"""Options that are not the defaults, by what a name says of them after a colon; 8 bits have no scales."""
OF_ENGINE: dict[str, dict[str, Any]] = {
    "mixed": {"mixed": True},
    "no-prefix-cache": {"prefix_cache": False},
    "unknown-lengths": {"admission": "unknown-lengths"},
}
POLICIES["unknown-lengths"] = UnknownLengths
COUNTS = {"steps": "steps", "preemptions": "preemptions", "cached tokens": "cached_tokens"}
"""What is counted of a pass, and the fields of the engine's `stats`."""
PAGE_SIZE = 16
LONGEST = 8192
"""Tokens that an answer may have, for all that a policy is told."""


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
    """`compiled_llm.Engine`; its name says what is not the default, after colons. `options` are the engine's."""

    def __init__(self, name: str = OURS, pages: int | None = None, **options: Any) -> None:
        self.name, self._options = name, options
        self._wrap = {} if pages is None else {"kv_memory": f"{pages * PAGE_SIZE} tokens", "page_size": PAGE_SIZE}
        for part in parts_of(name, OURS, {**OF_WRAP, **OF_ENGINE}):
            self._wrap |= OF_WRAP.get(part, {})
            self._options |= OF_ENGINE.get(part, {})

    @contextmanager
    def engine(self, setup: Setup) -> Iterator[OurSession]:
        setup.free_memory()  # whoever measured the last contender held its engine until now
        model = setup.model()
        compiled_llm.wrap(model, **self._wrap, progress=False)
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

    def __init__(self, python: str, streams: bool, name: str = VLLM, pages: int | None = None) -> None:
        self.name, parts = name, parts_of(name, VLLM, (CASCADE, FP8))
        self._peer = Peer(python, streams, CASCADE in parts, FP8 in parts, pages)

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


def parts_of(name: str, kind: str, known: Iterable[str]) -> list[str]:
    """Return what a name says after its kind; raises SystemExit if it is of another kind, or says something else."""
    parts = [part for part in name.removeprefix(kind).split(":") if part]
    if not set(parts) <= {*known}:
        raise SystemExit(f"--contenders: no {name}; there are {OURS}, {VLLM}, and {kind} with :{', :'.join(known)}")
    return parts


def engines_of(
    names: str, vllm: str, streams: bool, cascade: bool, fp8: bool, pages: int | None = None, **options: Any
) -> list[EngineContender]:
    """Return engines by their comma-separated names.

    Args:
        vllm: a Python that has it.
        streams: of vLLM's, the one that takes requests as they arrive.
        cascade: also each with the other choice about pages that requests share: ours reads them for each of these.
        fp8: also each with keys and values in 8 bits.
        pages: how many there are; None for as many as each engine takes.
        options: of our engines.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if cascade:
        wanted = [more for one in wanted for more in (one, f"{one}:{CASCADE if one == VLLM else NO_CASCADE}")]
    if fp8:
        wanted = [more for one in wanted for more in (one, f"{one}:{FP8}")]
    return [
        VllmEngine(vllm, streams, one, pages) if one.startswith(VLLM) else OurEngine(one, pages, **options)
        for one in wanted
    ]


def params_of(request: Asked, temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=request.new, ignore_eos=True)


def check(lengths: Sequence[int], asked: Sequence[Asked]) -> None:
    for number, (length, request) in enumerate(zip(lengths, asked, strict=True)):
        if length != request.new:
            raise RuntimeError(f"request {number}: {length} tokens came instead of {request.new}")
