"""A cold engine in a process of its own: requests come from its first second on, and each answer is judged.

python -m support.combined.cold "drafts" "mixed" --seed 3 --requests 200     # from tests/, with caches that are empty
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from random import Random
from typing import Any

import torch
import transformers

import compiled_llm
from compiled_llm.engine.engine import Engine
from support.combined.asked import Asked
from support.combined.feature import Feature
from support.combined.features import BY_NAME, bias
from support.combined.judge import Judge
from support.combined.subjects import LARGER, ON_GPU, SPECIAL, TINY, WORDS, Sizes, three_of
from support.engine.text_tokenizers import byte_level
from support.execution.twins import SMALL, random_model
from support.huggingface.families import FAMILIES
from support.images import SampleImage, prompt_of

ROWS = 32
LONGEST_STEP = 60.0
"""Seconds: no request waits longer for its next token."""
TIES = 0.2
"""Of the answers of a mixture of experts: where two experts are as good, 16 bits choose either, far beyond noise."""

ON_GPU["experts"] = lambda seed: random_model(
    transformers.Qwen3MoeConfig(**{**SMALL, **FAMILIES["Qwen3Moe"], "num_experts": 16, **WORDS}), seed, (1, 2)
)
BY_NAME["experts"] = Feature("experts", subject="experts")
for _count in (1, 7):
    _drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": _count}}
    BY_NAME[f"{_count} drafts"] = Feature(f"{_count} drafts", "speculative_config", engine=_drafts)


class Heard(logging.Handler):
    """Keeps what the package warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def requests_of(subject: str, features: Sequence[Feature], count: int, draw: Random, sizes: Sizes) -> list[Asked]:
    """Make requests for texts that repeat themselves, or go on from a common beginning, or with an image."""
    found = []
    for _ in range(count):
        words = draw.choices(range(3, 100), k=draw.randint(*sizes.prompts))
        if subject == "images" and draw.random() < 0.5:
            inputs = prompt_of("Qwen3VL", *words[:3], SampleImage(draw.randrange(3)), *words[3:])
            own = Asked(inputs["input_ids"][0].tolist(), draw.randint(8, 40), inputs=inputs)
        else:
            text = (words[: draw.randint(2, 5)] * len(words))[: len(words)] if draw.random() < 0.6 else words
            own = Asked(text, draw.randint(8, 40))
        if subject == "images":
            bias(own, dict.fromkeys(SPECIAL, -100.0))
        for feature in features:
            if feature.asks is not None and draw.random() < 0.7:
                feature.asks(own, draw)
        found.append(own)
    return found


def run(features: Sequence[Feature], count: int, seed: int) -> dict[str, Any]:
    """Return what went wrong, and how long the longest request waited for its next token."""
    draw, began, gpu = Random(seed), time.monotonic(), torch.cuda.is_available()
    sizes = LARGER if gpu else TINY
    subject = next((own.subject for own in features if own.subject), "full attention")
    three = three_of(subject, "".join(own.weights for own in features), seed, gpu)
    options = {key: value for own in features for key, value in own.wrap.items()}
    usual = {"page_size": sizes.page_size, "max_batch_size": ROWS, "progress": False, "kv_memory": "20000 tokens"}
    compiled_llm.wrap(three.own, **{**usual, **options})
    of_engine = {key: value for own in features for key, value in own.engine.items()}
    judge, asked = (
        Judge(three.exact, three.bare, "kv_dtype" in options),
        requests_of(subject, features, count, draw, sizes),
    )
    failed, faults = list[str](), list[str]()
    waits = Waits()
    with Engine(three.own, tokenizer=byte_level(), max_num_seqs=ROWS, **of_engine) as engine:
        handles = []
        for number, own in enumerate(asked):
            handles.append(handle := own.prepared(engine))
            waits.watch(handle)
            engine.begin(handle)
            time.sleep(draw.random() * (0.1 if number < count // 2 else 0.3))
            if number == count // 2:
                handles[0].result(600)
        for own, handle in zip(asked, handles, strict=True):
            try:
                output = handle.result(600)
            except Exception as error:
                failed.append(f"{type(error).__name__}: {str(error)[:200]}")
                continue
            faults += judge.faults(own, output, "logprobs_mode" in of_engine)
        three.own.compiled.model_runner().graph_manager.beside.wait()
        drafts = engine.stats().drafts
    stats = three.own.compiled.stats()
    rows = three.own.compiled.cuda_graphs.rows
    return {
        "features": [own.name for own in features],
        "seed": seed,
        "failed": failed,
        "faults": faults if subject != "experts" or len(faults) > TIES * count else [],
        "longest_wait": round(waits.longest, 1),
        "captures_failed": sum(row.failures for row in rows),
        "captured": sum(row.captures for row in rows),
        "uncompiled": stats.uncompiled,
        "drafts": None if drafts is None else drafts.accepted_tokens,
        "seconds": round(time.monotonic() - began, 1),
    }


class Waits:
    """The longest time between two tokens of a request, and between its first and its end."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._last: dict[int, float] = {}

    def watch(self, handle: Any) -> None:
        handle.when_changed(lambda: self._note(id(handle)))

    def _note(self, request: int) -> None:
        now = time.monotonic()
        self.longest = max(self.longest, now - self._last.get(request, now))
        self._last[request] = now


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("features", nargs="*")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=200)
    given = parser.parse_args()
    heard = Heard()
    logging.getLogger("compiled_llm").addHandler(heard)
    found = run([BY_NAME[name] for name in given.features], given.requests, given.seed)
    print(json.dumps({**found, "said": heard.said}))
    bad = found["failed"] or found["faults"] or found["captures_failed"] or found["uncompiled"]
    sys.exit(bool(bad or found["longest_wait"] > LONGEST_STEP or any("has failed" in said for said in heard.said)))


if __name__ == "__main__":
    main()
