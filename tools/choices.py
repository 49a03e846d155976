"""What the settings of requests cost: an engine's tokens/s with all rows alike, and with rows without any.

Each round measures every kind once, after one that warms up; the medians are compared. The vocabulary is made up, and
texts are drawn from random weights, so forms are followed through whatever tokens they allow. Needs the extra
`structured`.

    python tools/choices.py --model qwen3-0.6b --json choices.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import compiled_llm
from compiled_llm import Engine, SamplingParams, StructuredOutputsParams

sys.path.insert(0, str(Path(__file__).resolve().parent / "bench"))
from common import checkout
from models import build, made_up_tokenizer, vocabulary_of
from shapes import SHAPES

from compiled_llm.commands.bench.report import describe_machine

ITEM = {"name": {"type": "string"}, "count": {"type": "integer"}, "kind": {"enum": ["red", "green", "blue"]}}
BOUNDED = {**ITEM, "name": {"type": "string", "minLength": 3, "maxLength": 60}}


def array_of(properties: dict[str, Any]) -> StructuredOutputsParams:
    """A form that no answer gets to the end of."""
    item = {"type": "object", "properties": properties, "required": list(properties)}
    schema = {"type": "array", "minItems": 1000, "items": item}
    return StructuredOutputsParams(json=schema, disable_any_whitespace=True)


def kinds(vocabulary: int) -> dict[str, dict[str, Any]]:
    biased = range(vocabulary // 2 - 150, vocabulary // 2 + 150)
    return {
        "nothing": {},
        "penalties": {"presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1},
        "300 biases": {"logit_bias": dict.fromkeys(biased, 1.0)},
        "log-probabilities": {"logprobs": 0},
        "top 5 log-probabilities": {"logprobs": 5},
        "top 20 log-probabilities": {"logprobs": 20},
        "regex": {"structured_outputs": StructuredOutputsParams(regex=r"([a-z ]+[0-9]{1,3}, )+\.")},
        "JSON schema": {"structured_outputs": array_of(ITEM)},
        "JSON schema, bounded strings": {"structured_outputs": array_of(BOUNDED)},
    }


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens/s of each round, by kind."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    vocabulary = vocabulary_of(options.model)
    plain = build(options.model, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    plain.generation_config.eos_token_id = vocabulary - 1
    model = compiled_llm.wrap(plain, mode=options.mode, max_batch_size=options.rows)
    measured = kinds(vocabulary)
    found: dict[str, list[float]] = {kind: [] for kind in measured}
    limits: dict[str, Any] = {"max_num_seqs": options.rows, "prefix_cache": False}
    with Engine(model, tokenizer=made_up_tokenizer(vocabulary), **limits) as engine:
        engine.warmup([options.rows], structured=True)
        for number in range(-1, options.rounds):
            for kind, settings in measured.items():
                rate = tokens_per_second(engine, settings, vocabulary, number, options)
                found[kind] += [rate] if number >= 0 else []
                print(f"{kind}: {rate:,.0f} tokens/s{'' if number >= 0 else ' (not counted)'}", file=sys.stderr)
    return found


def tokens_per_second(
    engine: Engine, settings: dict[str, Any], vocabulary: int, seed: int, options: argparse.Namespace
) -> float:
    draw = random.Random(seed)
    prompts = [[draw.randrange(256, vocabulary - 1) for _ in range(options.prompt)] for _ in range(options.rows)]
    ending = {} if "structured_outputs" in settings else {"ignore_eos": True}
    params = SamplingParams(temperature=1.0, max_tokens=options.new, **ending, **settings)
    began = time.perf_counter()
    outputs = engine.generate(prompts, params)
    seconds = time.perf_counter() - began
    if failed := [output.error for output in outputs if output.error is not None]:
        raise failed[0]
    return sum(len(output.token_ids) for output in outputs) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--mode", default="cuda-graphs" if torch.cuda.is_available() else "eager")
    parser.add_argument("--rows", type=int, default=64, help="requests at once")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=512, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commit", help="what to capture, whatever git says")
    parser.add_argument("--json", type=Path, help="where to write all of it")
    options = parser.parse_args()
    found = measure(options)
    base = statistics.median(found["nothing"])
    print("| all rows have | tokens/s | lost |\n| --- | ---: | ---: |")
    for kind, rates in found.items():
        print(f"| {kind} | {statistics.median(rates):,.0f} | {100 * (1 - statistics.median(rates) / base):.1f}% |")
    if options.json is not None:
        described = {"machine": {**describe_machine(), "commit": options.commit or checkout()}, "command": sys.argv}
        options.json.write_text(json.dumps({**described, "tokens_per_second": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
