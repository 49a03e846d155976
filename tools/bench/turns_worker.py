"""One checkout of `turns.py`: loads its model and engine, and measures what stdin asks for.

It uses the public API alone, since what PYTHONPATH names may be an older commit.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from shapes import SHAPES
from transformers import AutoModelForCausalLM

import compiled_llm
from compiled_llm import Engine, SamplingParams

VOCABULARY = 500
BATCHES, PROMPTS = (1, 8, 32, 64), (128, 400, 1024)
FIRST_CALLS = 60


class Measured:
    """The model of one checkout; each measurement returns figures by name."""

    def __init__(self, job: dict[str, Any]) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(0)
        with torch.device(device):
            config, dtype = SHAPES[job["size"]].config(), getattr(torch, job["dtype"])
            plain = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        options = {"max_batch_size": max(BATCHES), "kv_memory": job["kv_memory"], "progress": False}
        self.model: Any = compiled_llm.wrap(plain, mode=job["mode"], **options)
        self.engine = Engine(self.model)
        self.device, self.new, self.requests = device, job["new"], job["requests"]
        self.rate, self.seconds = job["rate"], job["seconds"]
        self.chance = random.Random(1)

    def ids(self, length: int) -> list[int]:
        return [self.chance.randrange(1, VOCABULARY) for _ in range(length)]

    def call(self, rows: int, length: int, new: int) -> float:
        ids = torch.tensor([self.ids(length) for _ in range(rows)], device=self.device)
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
        self._synchronize()
        begin = time.perf_counter()
        self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
        self._synchronize()
        return time.perf_counter() - begin

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def warm(self) -> dict[str, float]:
        """Whatever is measured has run, and what is captured beside the steps is there."""
        begin = time.perf_counter()
        for _ in range(2):
            for rows in BATCHES:
                self.call(rows, PROMPTS[0], min(16, self.new))
            for length in PROMPTS:
                self.call(1, length, 1)
            time.sleep(1)
        self.engine.warmup()
        self.offline()
        self.online()
        return {"seconds": time.perf_counter() - begin}

    def generate(self) -> dict[str, float]:
        return {f"{rows} rows, tok/s": rows * self.new / self.call(rows, PROMPTS[0], self.new) for rows in BATCHES}

    def first(self) -> dict[str, float]:
        return self._of_prompts(lambda length: self.call(1, length, 1))

    def submit(self) -> dict[str, float]:
        def answered(length: int) -> float:
            prompt, begin = self.ids(length), time.perf_counter()
            self.engine.submit(prompt, SamplingParams(max_tokens=1, ignore_eos=True)).result()
            return time.perf_counter() - begin

        return self._of_prompts(answered)

    def _of_prompts(self, one: Callable[[int], float]) -> dict[str, float]:
        figures: dict[str, float] = {}
        for length in PROMPTS:
            times = [one(length) * 1000 for _ in range(FIRST_CALLS)]
            deciles = statistics.quantiles(times, n=10)
            figures |= {f"{length} tokens, p50 ms": deciles[4], f"{length} tokens, p90 ms": deciles[8]}
        return figures

    def offline(self) -> dict[str, float]:
        lengths = random.Random(0)
        asked = [
            (self.ids(lengths.randint(100, 1024)), lengths.randint(self.new // 2, self.new))
            for _ in range(self.requests)
        ]
        begin = time.perf_counter()
        handles = [self.engine.submit(ids, SamplingParams(max_tokens=new, ignore_eos=True)) for ids, new in asked]
        for handle in handles:
            handle.result()
        return {f"{self.requests} requests, tok/s": sum(new for _, new in asked) / (time.perf_counter() - begin)}

    def online(self) -> dict[str, float]:
        first: list[float] = []
        gaps: list[float] = []

        def ask(ids: list[int], new: int) -> None:
            before, times = time.perf_counter(), first
            for _ in self.engine.submit(ids, SamplingParams(max_tokens=new, ignore_eos=True)):
                now = time.perf_counter()
                times.append((now - before) * 1000)
                before, times = now, gaps

        chance, threads, begin, due = random.Random(7), [], time.perf_counter(), 0.0
        while (due := due + chance.expovariate(self.rate)) < self.seconds:
            asked = self.ids(chance.randint(64, 512)), chance.randint(self.new // 4, self.new)
            time.sleep(max(0.0, begin + due - time.perf_counter()))
            threads.append(threading.Thread(target=ask, args=asked))
            threads[-1].start()
        for thread in threads:
            thread.join()
        figures: dict[str, float] = {}
        for name, times in (("first token", first), ("gap", gaps)):
            if len(times) > 1:
                percentiles = statistics.quantiles(times, n=100, method="inclusive")
                figures |= {f"{name}, p50 ms": percentiles[49], f"{name}, p99 ms": percentiles[98]}
        stats = vars(self.model.compiled.stats())  # older commits have another name
        if graphs := stats.get("prefill_cuda_graphs", stats.get("prefill_recordings", 0)):  # the more, the less padding
            figures["CUDA graphs of prefills"] = graphs
        return figures


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # stdout is for answers alone
    measured = Measured(json.loads(sys.argv[1]))
    for line in sys.stdin:
        answers.write(json.dumps(getattr(measured, json.loads(line)["measure"])()) + "\n")
    measured.engine.close()


if __name__ == "__main__":
    main()
