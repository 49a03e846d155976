"""An engine without a model: requests that arrive at random, steps whose times are made up, and a policy of chunks."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from compiled_llm.engine.chunks.state import ChunkPolicy, ChunkState
from compiled_llm.engine.chunks.step_times import SIZES, StepTimes, place_of

EVERY = 16
"""One of so many steps without prompts is timed, as in the engine."""


class Device(NamedTuple):
    """What steps cost, in milliseconds: measured at a few sizes, and on the line between them."""

    decode: Sequence[tuple[float, float]]  # rows, and what a step of them takes
    alone: float  # a step of prompts without rows takes so much more than beside them
    longer: Sequence[tuple[float, float]]  # tokens of prompts, and by how much they make a step longer
    host: float = 1.0  # from the plan of a step with prompts to its launch

    def step(self, rows: int, tokens: int) -> float:
        decode = float(np.interp(rows, *zip(*self.decode, strict=True))) if rows else self.alone
        return decode + (float(np.interp(tokens, *zip(*self.longer, strict=True))) if tokens else 0.0)


# The engine itself has timed an H200's, with 24 requests a second for 8B and 64 for 0.6B. What is larger than these
# had is as slow for each token. An H100 computes as fast, and reads weights in 1.35 times the time.
_DECODE_8B = ((1, 4.02), (2, 4.16), (4, 4.21), (8, 4.37), (16, 4.62), (32, 4.85), (64, 5.1), (256, 7.5))
_LONGER_8B = (
    *((16, 0.45), (64, 0.45), (96, 0.9), (128, 0.9), (160, 1.6), (192, 1.9), (256, 3.1), (320, 4.3)),
    *((384, 5.4), (512, 6.8), (640, 8.4), (768, 10.1), (1024, 21.9), (8192, 190.0)),
)
H200_8B = Device(_DECODE_8B, 4.0, _LONGER_8B)
H100_8B = Device([(rows, 1.35 * took) for rows, took in _DECODE_8B], 5.4, _LONGER_8B)
H200_06B = Device(
    ((1, 0.72), (2, 0.75), (4, 0.8), (8, 0.88), (16, 1.13), (32, 1.21), (256, 3.0)),
    0.0,
    (
        *((16, 1.18), (32, 1.17), (48, 1.18), (64, 1.24), (80, 1.49), (96, 1.54), (128, 1.51), (160, 1.66)),
        *((192, 1.66), (256, 1.48), (320, 1.92), (384, 2.11), (512, 2.18), (640, 2.39), (768, 2.77)),
        *((1024, 3.05), (8192, 25.0)),
    ),
    host=1.5,
)


class Waits(NamedTuple):
    """Percentiles in milliseconds, and the sizes of chunks beside running rows."""

    first_p50: float
    first_p99: float
    gap_p50: float
    gap_p99: float
    chunks: list[int]


class _Request:
    def __init__(self, arrival: float, draw: random.Random) -> None:
        self.arrival, self.left, self.answer = arrival, draw.randint(64, 512), draw.randint(32, 256)
        self.got, self.last = 0, 0.0


class KnownState(ChunkState):
    """A state whose facts are given."""

    def __init__(
        self,
        times: StepTimes,
        rows: int,
        left: int = 1,
        *,
        step: int = 0,
        begun: int = 0,
        followed: bool = True,
        most: int = 8192,
        padding: int = 0,
    ) -> None:
        self.times, self.rows, self.step, self.begun, self.most, self.padding = times, rows, step, begun, most, padding
        self._left, self._followed = left, followed

    @property
    def followed(self) -> bool:
        return self._followed

    @property
    def left(self) -> int:
        return self._left


def played(
    policy: ChunkPolicy,
    device: Device,
    rate: float,
    seed: int,
    seconds: float = 30.0,
    followed: bool = True,
    late: float = 0.0,
    odd: Callable[[int], float] = lambda step: 1.0,
) -> Waits:
    """Let requests arrive at a ``rate`` a second, with prompts of 64 to 512 tokens and answers of 32 to 256.

    A step is planned when the one before the last has been read, as in the engine, which launches one while another
    runs; so many milliseconds before the end of the last one if that is not 0, and no prompt is left (``late``).
    ``odd`` says how many times as long as usual a step takes, by its number.
    """
    draw, coming, at = random.Random(f"{seed} {rate}"), deque[_Request](), 0.0
    while (at := at + draw.expovariate(rate / 1000)) < 1000 * seconds:
        coming.append(_Request(at, draw))
    running, waiting, times = list[_Request](), list[_Request](), StepTimes()
    first, gaps, chunks = list[float](), list[float](), list[int]()
    read = end = 0.0
    step = begun = untimed = 0
    while coming or running or waiting:
        if not (running or waiting):
            read = max(read, coming[0].arrival)
        elif late and not waiting and not any(request.left for request in running) and end - read > 2.5:
            due = max(read, end - late)
            read = min(due, max(read, coming[0].arrival)) if coming else due
        while coming and coming[0].arrival <= read:
            waiting.append(coming.popleft())
        decode = [request for request in running if not request.left]
        left, step = sum(request.left for request in (*running, *waiting)), step + 1
        state = KnownState(times, len(decode), left, step=step, begun=begun, followed=followed)
        room = policy.plan(state) if left else 0
        tokens, ending = 0, list[_Request]()
        for request in [*running, *waiting]:
            if request.left and room > tokens:
                if request in waiting:
                    waiting.remove(request)
                    running.append(request)
                    begun += 1
                chunk = min(room - tokens, request.left)
                request.left, tokens = request.left - chunk, tokens + chunk
                ending += [] if request.left else [request]
        if not (decode or tokens):
            read = end = max(read, end)
            continue
        size = SIZES[place_of(tokens)] if tokens else 0
        took = device.step(len(decode), size) * draw.uniform(1, 1.05) * odd(step)
        begin = max(end, read + (device.host if tokens else 0.1))
        read, end, untimed = end, begin + took, untimed + 1
        for request in decode:
            gaps.append(end - request.last)
        for request in ending:
            first.append(end - request.arrival)
        for request in (*decode, *ending):
            request.got, request.last = request.got + 1, end
        running = [request for request in running if request.left or request.got < request.answer]
        if tokens or untimed >= EVERY or not times.knows(len(decode)):
            times.learn(len(decode), size, took / 1000)
            untimed = 0
        if tokens and decode:
            chunks.append(tokens)
    return Waits(*map(float, np.percentile(first, [50, 99])), *map(float, np.percentile(gaps, [50, 99])), chunks)
