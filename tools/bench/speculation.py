"""An engine with guesses beside one without, on one model in one go: tokens a second, and what was accepted.

python tools/bench/speculation.py --model qwen3-0.6b --rows 1,32 --tokens 7,3
python tools/bench/speculation.py --model qwen3-8b --rows 1,8 --guesses wrong

``synthetic``: a rule on the device counts each guess right with probability 0.8, whatever the model says, as vLLM's
``synthetic``; its tokens are not the model's. ``wrong``: tokens are drawn from 64 at temperature 1, so that guesses are
found and mostly wrong. ``own``: the model's own greedy tokens, of which guesses are as right as they are.
"""

from __future__ import annotations

import json as jsons
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import torch
import typer
from common import DeviceName, Json, Model, integers
from models import build, vocabulary_of
from torch import Tensor

import compiled_llm
from compiled_llm.commands.loading.load import device_of, dtype_of
from compiled_llm.compilation import drafts
from compiled_llm.engine.engine import Engine
from compiled_llm.requests.sampling_params import SamplingParams

Guesses = Literal["synthetic", "wrong", "own"]
RIGHT = 0.8
FEW = 64


def synthetic(share: float) -> Any:
    """Return an acceptance that counts each guess right with this probability, by its position and what it stands for.

    A position of a row is asked about once, so guesses are right independently of each other, as a hash is of another.
    """
    accept = drafts.accept_drafts

    def accepted(sampled: Tensor, guesses: Tensor, offered: Tensor, slots: Tensor, first: Tensor, *tables: Any) -> Any:
        count = guesses.shape[1]
        at = first[:, None] + torch.arange(count, device=first.device)
        right = mixed(sampled[:, :count] + mixed(at + mixed(slots[:, None]))) < int(share * 2**32)
        sampled = torch.cat([torch.where(right, guesses, sampled[:, :count]), sampled[:, count:]], dim=1)
        return accept(sampled, guesses, torch.full_like(offered, count), slots, first, *tables)

    return accepted


def mixed(numbers: Tensor) -> Tensor:
    """Return a number from 0 to 2^32 - 1 for each, any two of which have as little in common as random ones."""
    # 32 of 64 bits are in use, and factors have 31, so that no product overflows. After the rounds of
    # https://github.com/skeeto/hash-prospector, whose second factor has 32.
    numbers = numbers & 0xFFFFFFFF
    for factor in (0x7FEB352D, 0x45D9F3B, 0x7FEB352D):
        numbers = (numbers ^ (numbers >> 16)) * factor & 0xFFFFFFFF
    return numbers ^ (numbers >> 16)


@contextmanager
def counted_as(guesses: Guesses) -> Iterator[None]:
    """Have programs that are compiled in the block accept as is asked for."""
    before = drafts.accept_drafts
    if guesses == "synthetic":
        drafts.accept_drafts = synthetic(RIGHT)
    try:
        yield
    finally:
        drafts.accept_drafts = before


def prompts_of(vocabulary: int, rows: int, length: int, run: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(run)
    prompts: list[list[int]] = torch.randint(0, vocabulary, (rows, length), generator=generator).tolist()
    return prompts


def params_of(guesses: Guesses, new: int, sampled: bool) -> SamplingParams:
    if guesses == "wrong":
        return SamplingParams(
            temperature=1.0, seed=1, max_tokens=new, ignore_eos=True, allowed_token_ids=list(range(FEW))
        )
    drawn: dict[str, Any] = {"temperature": 0.6, "top_p": 0.95, "seed": 1} if sampled else {"temperature": 0.0}
    return SamplingParams(max_tokens=new, ignore_eos=True, **drawn)


def main(
    model: Model = "qwen3-0.6b",
    rows: Annotated[str, typer.Option(help="Requests at once, comma-separated.")] = "1,32",
    tokens: Annotated[str, typer.Option(help="num_speculative_tokens, one for each of --rows.")] = "7,3",
    guesses: Annotated[str, typer.Option(help="synthetic, wrong or own.")] = "synthetic",
    sampled: Annotated[bool, typer.Option(help="Draw with temperature 0.6 and top_p 0.95.")] = False,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 128,
    new: Annotated[int, typer.Option(help="Tokens of an answer.")] = 512,
    runs: Annotated[int, typer.Option(min=1, help="Timed runs of each, in turns.")] = 5,
    mode: Annotated[str, typer.Option(help="Of wrap.")] = "cuda-graphs",
    device: DeviceName = "auto",
    json: Json = None,
) -> None:
    """Measure an engine with guesses and one without in turns."""
    if guesses not in ("synthetic", "wrong", "own"):
        raise SystemExit(f"--guesses {guesses}: give synthetic, wrong or own")
    kind: Guesses = guesses  # type: ignore[assignment]
    where, sizes, found = device_of(device), integers(rows), list[dict[str, Any]]()
    plain = build(model, dtype_of("auto", where), where)
    wrapped = compiled_llm.wrap(
        plain, mode=mode, max_batch_size=max(sizes), kv_memory=f"{2 * max(sizes) * (prompt + new + 16)} tokens"
    )
    params, vocabulary = params_of(kind, new, sampled), FEW if kind == "wrong" else vocabulary_of(model)
    with counted_as(kind):
        for count, most in zip(sizes, integers(tokens), strict=True):
            asked = [prompts_of(vocabulary, count, prompt, run) for run in range(runs + 1)]
            result = {"requests": count, "num_speculative_tokens": most, "guesses": kind, "sampled": sampled}
            found.append(result | measured(wrapped, asked, params, most))
            tell(found[-1])
            if json is not None:
                json.write_text(jsons.dumps({"model": model, "results": found}, indent=1))


def measured(model: Any, asked: Sequence[list[list[int]]], params: SamplingParams, most: int) -> dict[str, Any]:
    """Run the prompts of each turn without guesses and with them; the first turn prepares."""
    rows, config = len(asked[0]), {"method": "ngram", "num_speculative_tokens": most}
    speeds: dict[str, list[float]] = {"without": [], "with": []}
    with (
        Engine(model, max_num_seqs=rows, prefix_cache=False) as without,
        Engine(model, max_num_seqs=rows, prefix_cache=False, speculative_config=config) as guessing,
    ):
        for turn, prompts in enumerate(asked):
            for name, engine in (("without", without), ("with", guessing)):
                began = time.perf_counter()
                outputs = engine.generate(prompts, params)
                seconds = time.perf_counter() - began
                speeds[name] += [sum(len(output.token_ids) for output in outputs) / seconds] if turn else []
        stats = guessing.stats().drafts
    assert stats is not None
    medians = {name: statistics.median(own) for name, own in speeds.items()}
    return {**medians, "runs": speeds, "drafts": stats._asdict()}


def tell(result: dict[str, Any]) -> None:
    drafted, without, speed = result["drafts"], result["without"], result["with"]
    what = f"{result['requests']} requests, k = {result['num_speculative_tokens']}"
    print(f"{what}: {without:,.0f} tok/s, with guesses {speed:,.0f}, {speed / without:.2f} x")
    accepted = f"{drafted['accepted_tokens']:,} of {drafted['draft_tokens']:,}"
    print(f"    accepted {accepted}: {drafted['accepted_per_position']}", flush=True)


if __name__ == "__main__":
    typer.run(main)
