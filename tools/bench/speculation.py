"""An engine, or `generate`, with guesses beside one without, on one model in one go, and what was accepted.

python tools/bench/speculation.py --model qwen3-0.6b --rows 1,32 --tokens 7,3
python tools/bench/speculation.py --model qwen3-8b --rows 1,8 --guesses wrong --by engine,generate
python tools/bench/speculation.py --texts edits

``synthetic``: a rule on the device counts each guess right with probability 0.8, whatever the model says, as vLLM's
``synthetic``; its tokens are not the model's. ``wrong``: tokens are drawn from 64 at temperature 1, so that guesses are
found and mostly wrong. ``own``: the model's own greedy tokens, of which guesses are as right as they are.

``--texts edits`` takes the demo model and twenty edits of documents in place of all that, and ends answers where the
model does. ``--vllm PYTHON`` adds vLLM in a process of its own, without guesses and with those of n-grams; it has no
rule that counts guesses as right without a draft model, so of ``synthetic`` it has none.
"""

from __future__ import annotations

import json as jsons
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, NamedTuple, get_args

import torch
import typer
from common import DeviceName, Json, Model, Vllm, integers
from edits import messages
from models import build, vocabulary_of
from peers import Peer
from torch import Tensor

import compiled_llm
from compiled_llm.commands.bench.contenders import Setup
from compiled_llm.commands.bench.timing import Workload
from compiled_llm.commands.loading.load import device_of, dtype_of
from compiled_llm.compilation import drafts
from compiled_llm.engine.engine import Engine
from compiled_llm.requests.sampling_params import SamplingParams

Guesses = Literal["synthetic", "wrong", "own"]
RIGHT = 0.8
FEW = 64
LIKELY = 1000.0
"""What is added to the logits of these tokens, in `generate`."""
DRAWN: dict[str, Any] = {"temperature": 0.6, "top_p": 0.95}


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


def edits_of(tokenizer: Any) -> list[list[int]]:
    """Return the tokens of each edit of a document, as a chat."""
    chats = (tokenizer.apply_chat_template(one, add_generation_prompt=True, tokenize=False) for one in messages())
    return [tokenizer(chat, add_special_tokens=False)["input_ids"] for chat in chats]


class Load(NamedTuple):
    """What is asked of each contender.

    Attributes:
        turns: the prompts of each turn, of which the first prepares; those that do not run at once run one after the
            other.
        rows: how many run at once.
        most: guesses of a request in a step, at most.
    """

    turns: list[list[list[int]]]
    rows: int
    most: int
    new: int
    guesses: Guesses
    sampled: bool
    ends: bool  # answers end where the model ends them

    @property
    def params(self) -> SamplingParams:
        ends: dict[str, Any] = {"max_tokens": self.new, "ignore_eos": not self.ends}
        if self.guesses == "wrong":
            return SamplingParams(temperature=1.0, seed=1, allowed_token_ids=list(range(FEW)), **ends)
        return SamplingParams(**({"seed": 1} | DRAWN if self.sampled else {"temperature": 0.0}), **ends)

    def options(self, guesses: bool) -> dict[str, Any]:
        """Return those of `generate`."""
        own: dict[str, Any] = {"do_sample": self.guesses == "wrong" or self.sampled, "max_new_tokens": self.new}
        if self.guesses == "wrong":  # no others are drawn
            likely = [[[token], LIKELY] for token in range(1, FEW)]  # HuggingFace takes no bias of token 0
            own |= {"temperature": 1.0, "top_k": 0, "sequence_bias": likely}
        elif self.sampled:
            own |= {"top_k": 0, **DRAWN}
        if not self.ends:
            own |= {"eos_token_id": None}
        return own | ({"prompt_lookup_num_tokens": self.most, "max_matching_ngram_size": 4} if guesses else {})


Answering = Callable[[list[list[int]]], int]
"""Answers prompts, and returns how many tokens that gave."""


@contextmanager
def an_engine(model: Any, load: Load, guesses: bool) -> Iterator[tuple[Answering, Callable[[], dict[str, Any]]]]:
    config = {"method": "ngram", "num_speculative_tokens": load.most, "prompt_lookup_max": 4} if guesses else None
    with Engine(model, max_num_seqs=load.rows, prefix_cache=False, speculative_config=config) as engine:
        engine.warmup(load.rows)  # a size of steps that is first tried in a timed run would be compiled there

        def answer(prompts: list[list[int]]) -> int:
            return sum(len(output.token_ids) for output in engine.generate(prompts, load.params))

        def counts() -> dict[str, Any]:
            stats = engine.stats().drafts
            return {} if stats is None else stats._asdict()

        yield answer, counts


@contextmanager
def a_generate(model: Any, load: Load, guesses: bool) -> Iterator[tuple[Answering, Callable[[], dict[str, Any]]]]:
    options = load.options(guesses)
    if not load.ends:
        model.generation_config.eos_token_id = None

    def answer(prompts: list[list[int]]) -> int:
        new = 0
        for first in range(0, len(prompts), load.rows):
            ids = torch.tensor(prompts[first : first + load.rows], device=model.device)
            torch.manual_seed(1)
            out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
            new += len(ids) * (out.shape[1] - ids.shape[1])
        return new

    yield answer, dict


OURS = {"engine": an_engine, "generate": a_generate}


def main(
    model: Model = "qwen3-0.6b",
    rows: Annotated[str, typer.Option(help="Requests at once, comma-separated.")] = "1,32",
    tokens: Annotated[str, typer.Option(help="num_speculative_tokens, one for each of --rows.")] = "7,3",
    guesses: Annotated[str, typer.Option(help="synthetic, wrong or own.")] = "synthetic",
    texts: Annotated[str, typer.Option(help="edits: the demo model edits documents; else random tokens.")] = "",
    edits: Annotated[int, typer.Option(min=1, max=20, help="How many.")] = 20,
    by: Annotated[str, typer.Option(help="engine, generate, or both.")] = "engine",
    sampled: Annotated[bool, typer.Option(help="Draw with temperature 0.6 and top_p 0.95.")] = False,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 128,
    new: Annotated[int, typer.Option(help="Tokens of an answer.")] = 512,
    runs: Annotated[int, typer.Option(min=1, help="Timed runs of each, in turns.")] = 5,
    mode: Annotated[str, typer.Option(help="Of wrap.")] = "cuda-graphs",
    device: DeviceName = "auto",
    vllm: Vllm = "",
    json: Json = None,
) -> None:
    """Measure with guesses and without in turns."""
    if guesses not in get_args(Guesses) or texts not in ("", "edits") or not {*by.split(",")} <= OURS.keys():
        raise SystemExit(f"--guesses {', '.join(get_args(Guesses))}; --texts edits or none; --by {', '.join(OURS)}")
    kind: Guesses = "own" if texts else guesses  # type: ignore[assignment]
    model, where = "demo" if texts else model, device_of(device)
    sizes, found = [1] if texts else integers(rows), list[dict[str, Any]]()
    loads = [
        Load(
            turns_of(model, edits if texts else 0, kind, count, prompt, runs),
            count,
            most,
            new,
            kind,
            sampled,
            bool(texts),
        )
        for count, most in zip(sizes, integers(tokens), strict=False)
    ]
    longest = max(len(one) for load in loads for turn in load.turns for one in turn)
    plain = build(model, dtype_of("auto", where), where)
    # room for both engines, each row with guesses beyond its end
    kv_memory = f"{2 * max(sizes) * (longest + new + 16)} tokens"
    wrapped = compiled_llm.wrap(plain, mode=mode, max_batch_size=max(sizes), kv_memory=kv_memory)  # type: ignore[arg-type]

    def note(result: dict[str, Any]) -> None:
        found.append(result)
        tell(result)
        if json is not None:
            json.write_text(jsons.dumps({"model": model, "results": found}, indent=1))

    with counted_as(kind):
        for load in loads:
            for name in by.split(","):
                note(measured(name, wrapped, load))
    if vllm:
        compiled_llm.unwrap(wrapped)
        del plain, wrapped
        for load in loads:
            note(of_vllm(vllm, model, where, load))


def turns_of(model: str, edits: int, kind: Guesses, rows: int, prompt: int, runs: int) -> list[list[list[int]]]:
    if edits:
        return [edits_of(compiled_llm.demo()[1])[:: 20 // edits][:edits]] * (runs + 1)
    vocabulary = FEW if kind == "wrong" else vocabulary_of(model)
    return [prompts_of(vocabulary, rows, prompt, run) for run in range(runs + 1)]


def measured(name: str, model: Any, load: Load) -> dict[str, Any]:
    """Run the prompts of each turn without guesses and with them; the first turn prepares."""
    speeds: dict[str, list[float]] = {"without": [], "with": []}
    opened = OURS[name]
    with opened(model, load, False) as (plain, _), opened(model, load, True) as (guessing, counts):
        for turn, prompts in enumerate(load.turns):
            for own, answer in (("without", plain), ("with", guessing)):
                if not turn:  # what a thread compiles for guesses meanwhile is there, and captured, in the next turns
                    answer(prompts)
                    model.compiled.model_runner().graph_manager.beside.wait()
                began = time.perf_counter()
                answered = answer(prompts)
                seconds = time.perf_counter() - began
                speeds[own] += [answered / seconds] if turn else []
        return result_of(name, load, speeds) | {"drafts": counts()}


def of_vllm(python: str, model: str, where: torch.device, load: Load) -> dict[str, Any]:
    """Measure vLLM, once without guesses and once with them, and say what it cannot run."""
    if load.guesses == "synthetic":
        return {"contender": "vllm", "unavailable": "vLLM counts guesses as right of draft models alone"}
    speeds: dict[str, list[float]] = {"without": [], "with": []}
    workloads = [Workload(load.rows, max(map(len, load.turns[0])), load.new)]
    for own, method in (("without", None), ("with", "ngram_gpu"), ("with", "ngram")):
        if speeds[own]:
            continue
        setup = Setup(model, where, dtype_of("auto", where), workloads, print, build)
        config = method and {"method": method, "num_speculative_tokens": load.most, "prompt_lookup_max": 4}
        try:
            with Peer(python, speculation=config).worker(setup) as worker:
                for turn, prompts in enumerate(load.turns):
                    answer = worker.ask(prompts, [load.new] * len(prompts), sampling=of_peer(load))
                    speeds[own] += [sum(answer["lengths"]) / answer["seconds"]] if turn else []
        except RuntimeError as error:  # it cannot run that
            print(f"vllm, {method or 'no guesses'}: {error}", flush=True)
    if not all(speeds.values()):
        return {"contender": "vllm", "unavailable": "it has not run both without guesses and with them", "runs": speeds}
    return result_of("vllm", load, speeds)


def of_peer(load: Load) -> dict[str, Any]:
    if load.guesses == "wrong":
        return {"temperature": 1.0, "seed": 1, "allowed_token_ids": list(range(FEW))}
    return {"seed": 1} | DRAWN if load.sampled else {"temperature": 0.0}


def result_of(name: str, load: Load, speeds: dict[str, list[float]]) -> dict[str, Any]:
    medians = {own: statistics.median(each) for own, each in speeds.items()}
    asked = {"requests": load.rows, "num_speculative_tokens": load.most}
    return {"contender": name, **asked, "guesses": load.guesses, "sampled": load.sampled, **medians, "runs": speeds}


def tell(result: dict[str, Any]) -> None:
    if "unavailable" in result:
        print(f"{result['contender']}: {result['unavailable']}", flush=True)
        return
    without, speed = result["without"], result["with"]
    what = f"{result['contender']}, {result['requests']} requests, k = {result['num_speculative_tokens']}"
    print(f"{what}: {without:,.0f} tok/s, with guesses {speed:,.0f}, {speed / without:.2f} x", flush=True)
    if drafted := result.get("drafts"):
        accepted = f"{drafted['accepted_tokens']:,} of {drafted['draft_tokens']:,}"
        print(f"    accepted {accepted}: {drafted['accepted_per_position']}", flush=True)


if __name__ == "__main__":
    typer.run(main)
