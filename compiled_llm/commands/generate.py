"""What `compiled-llm generate` does: load and wrap a model, write its answer to one prompt.

Torch and transformers are imported inside, so that --help is quick.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from compiled_llm.commands.prompt import encode
from compiled_llm.config import WrapConfig
from compiled_llm.execution.progress import ProgressDisplay

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.generation.streamers import BaseStreamer

    from compiled_llm.execution.stats import Stats

_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "max_new_tokens": (lambda value: value >= 1, "at least 1"),
    "temperature": (lambda value: 0 < value < math.inf, "above 0; --greedy takes the most likely token"),
    "top_k": (lambda value: 0 <= value < 2**31, "at least 0, which is all tokens"),
    "top_p": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "min_p": (lambda value: 0 <= value <= 1, "from 0 to 1"),
    "repetition_penalty": (lambda value: 0 < value < math.inf, "above 0"),
    "seed": (lambda value: 0 <= value < 2**64, "from 0 to 2**64 - 1"),
}


@dataclass(frozen=True)
class SamplingFlags:
    """How to choose tokens; None if the model's own generation config decides.

    Attributes:
        sample: sample, or take the most likely token; None: sample if any other option is given.
    """

    sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            ValueError: one is out of range, or contradicts ``--greedy``.
        """
        for name, value in self._given().items():
            check_range(name, value)
        drawing = [_flag(name) for name in self._given() if name != "repetition_penalty"]
        if self.sample is False and drawing:
            raise ValueError(f"--greedy draws nothing, so it does not go with {', '.join(drawing)}")

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn."""
        return bool(self._given()) if self.sample is None else self.sample

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of ``generate``."""
        settings = {name: value for name, value in self._given().items() if name != "seed"}
        return {"do_sample": self.draws, **settings}

    def _given(self) -> dict[str, float]:
        values = dataclasses.asdict(self)
        del values["sample"]
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Request:
    """One call of `compiled-llm generate`, its prompt read.

    Attributes:
        prompt: the text to continue, or with ``chat`` the message to answer.
        system: the system message of the chat, if there is one.
        stop: texts that end the answer.
        as_json: write one JSON object in place of the text.
        quiet: show neither progress nor figures.
    """

    prompt: str
    chat: bool
    system: str | None
    sampling: SamplingFlags
    max_new_tokens: int
    stop: Sequence[str]
    model: str
    mode: str
    dtype: str
    device: str
    as_json: bool
    quiet: bool

    def __post_init__(self) -> None:
        """Check what can be checked before a model is loaded.

        Raises:
            ValueError: a value is impossible, or two do not go together.
        """
        check_range("max_new_tokens", self.max_new_tokens)
        if self.system is not None and not self.chat:
            raise ValueError("--system is a part of the chat template: give --chat as well")
        if "" in self.stop:
            raise ValueError("--stop '': an empty text stops nothing; leave it out")
        WrapConfig.from_options(self.wrap_options())

    def wrap_options(self) -> dict[str, Any]:
        """Return the options of ``wrap``."""
        return {"mode": self.mode, "max_batch_size": 1, "progress": not self.quiet}

    def generate_options(self) -> dict[str, Any]:
        """Return the keyword arguments of ``generate``, tensors and streamer aside."""
        stopping = {"stop_strings": list(self.stop)} if self.stop else {}
        return {"max_new_tokens": self.max_new_tokens, **self.sampling.options(), **stopping}


def check_range(name: str, value: float) -> None:
    """Check one number of the command line.

    Raises:
        ValueError: it is out of range.
    """
    holds, wanted = _RANGES[name]
    if not holds(value):
        raise ValueError(f"{_flag(name)} {value}: must be {wanted}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def run(request: Request) -> None:
    """Write the answer to stdout, and figures to stderr.

    Raises:
        ValueError: the model cannot do what is asked.
        RuntimeError: the model cannot be loaded or run.
    """
    console = Console(stderr=True, highlight=False, quiet=request.quiet)
    with ProgressDisplay(not request.quiet).task("importing torch and transformers"):
        import torch
        from transformers import TextStreamer

        import compiled_llm
        from compiled_llm.commands.loading import load
        from compiled_llm.execution.limits import check_fits

    loaded, tokenizer = load(request.model, request.dtype, request.device, progress=not request.quiet)
    inputs = {
        name: tensor.to(loaded.device)
        for name, tensor in encode(tokenizer, request.prompt, request.chat, request.system).items()
    }
    model: Any = compiled_llm.wrap(loaded, **request.wrap_options())
    prompt_tokens = inputs["input_ids"].shape[1]
    # Asked first: compiling takes minutes.
    check_fits(loaded, model.compiled.device_model(), [prompt_tokens], request.max_new_tokens)
    model.compiled.warmup()

    writer = TextStreamer(tokenizer, skip_prompt=request.chat, skip_special_tokens=True)
    streamer = TimedStreamer(None if request.as_json else writer)
    if request.sampling.seed is not None:
        torch.manual_seed(request.sampling.seed)
    output = model.generate(**inputs, **request.generate_options(), tokenizer=tokenizer, streamer=streamer)
    if request.as_json:
        answer = _answer(request, model, tokenizer, output[0].tolist(), prompt_tokens)
        typer.echo(json.dumps({**answer, **streamer.numbers(), "stats": _as_dict(model.compiled.stats())}))
    else:
        console.print(f"{streamer.figures()}, {_counts(model.compiled.stats())}", style="dim", soft_wrap=True)


def _answer(
    request: Request, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: list[int], prompt_tokens: int
) -> dict[str, Any]:
    new = tokens[prompt_tokens:]
    return {
        "prompt": request.prompt,
        "text": tokenizer.decode(new, skip_special_tokens=True),
        "prompt_tokens": prompt_tokens,
        "tokens": len(new),
        "token_ids": new,
        "finish_reason": _finish_reason(request, model, tokenizer, new),
    }


def _finish_reason(request: Request, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, new: list[int]) -> str:
    ends = getattr(model.generation_config, "eos_token_id", None)
    if new[-1] in (ends if isinstance(ends, list) else [ends]):
        return "eos_token"
    text = str(tokenizer.decode(new))
    return "stop_sequence" if any(stop in text for stop in request.stop) else "length"


def _as_dict(stats: Stats) -> dict[str, Any]:
    pages = None if stats.pages is None else stats.pages._asdict()
    return {**dataclasses.asdict(stats), "pages": pages}


def _counts(stats: Stats) -> str:
    return (
        f"{stats.graphs} graphs, {stats.graph_breaks} graph breaks, {stats.recompiles} recompiles, "
        f"{stats.cudagraph_skips} cudagraph skips"
    )


class TimedStreamer:
    """Keep the time of tokens, and pass them on to another streamer. `generate` puts the prompt first."""

    leaves_model_alone = True

    def __init__(self, streamer: BaseStreamer | None) -> None:
        self._streamer = streamer
        self._start = time.perf_counter()
        self._first: float | None = None
        self._last = self._start
        self._tokens = -1  # the prompt is not counted

    def put(self, value: Tensor) -> None:
        """Take the prompt, then each step's token."""
        self._last = time.perf_counter()
        self._tokens = 0 if self._tokens < 0 else self._tokens + value.numel()
        if self._tokens and self._first is None:
            self._first = self._last
        if self._streamer is not None:
            self._streamer.put(value)

    def end(self) -> None:
        """Pass on that nothing follows."""
        if self._streamer is not None:
            self._streamer.end()

    def numbers(self) -> dict[str, float | None]:
        """Return seconds from call to last token, tokens/s over them, and the seconds to the first token."""
        seconds = self._last - self._start
        return {
            "seconds": seconds,
            "tokens_per_second": self._tokens / seconds if self._first is not None else 0.0,
            "time_to_first_token": None if self._first is None else self._first - self._start,
        }

    def figures(self) -> str:
        """Return the same in words."""
        if self._first is None:
            return "0 tokens"
        speed = self._tokens / (self._last - self._start)
        return f"{self._tokens} tokens, {speed:.1f} tokens/s, first token after {self._first - self._start:.3f} s"
