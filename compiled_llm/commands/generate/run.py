"""Loads and wraps a model, and writes its answer to one prompt.

Torch and transformers are imported inside, so that --help is quick.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from compiled_llm.commands.early_checks import check_driver
from compiled_llm.commands.generate.request import GenerateRequest
from compiled_llm.commands.generate.timed_streamer import TimedStreamer
from compiled_llm.commands.importing import importing
from compiled_llm.commands.loading.source import locate
from compiled_llm.commands.options.prompt import encode
from compiled_llm.commands.preparation import Preparation

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from compiled_llm.execution.reporting.stats import Stats


def run(request: GenerateRequest) -> None:
    """Write the answer to stdout, and figures to stderr.

    Raises:
        ValueError: the model cannot do what is asked.
        RuntimeError: the model cannot be loaded or run.
    """
    console = Console(stderr=True, highlight=False, quiet=request.quiet)
    check_driver(request.device)
    source = locate(request.model, progress=not request.quiet)
    with importing(not request.quiet):
        import torch

        import compiled_llm
        from compiled_llm.commands.generate.text_writer import TextWriter
        from compiled_llm.commands.loading.load import device_of, dtype_of, load
        from compiled_llm.execution.limits import check_fits
        from compiled_llm.model.checks import check_device

    device = device_of(request.device)
    check_device(device.type, dtype_of(request.dtype, device), request.wrap_config(device.type))
    loaded, tokenizer = load(source, request.dtype, device, progress=not request.quiet)
    inputs = {
        name: tensor.to(loaded.device)
        for name, tensor in encode(tokenizer, request.prompt, request.chat, request.system).items()
    }
    model: Any = compiled_llm.wrap(loaded, **request.wrap_options(device.type))
    prompt_tokens = inputs["input_ids"].shape[1]
    # Asked first: compiling takes a minute or more.
    check_fits(model.compiled.model_runner(), [prompt_tokens], request.max_new_tokens)
    with Preparation() as preparation:
        model.compiled.warmup(1)

    writer = TextWriter(tokenizer, skip_prompt=request.chat, skip_special_tokens=True)
    streamer = TimedStreamer(None if request.as_json else writer)
    if request.sampling.seed is not None:
        torch.manual_seed(request.sampling.seed)
    output = model.generate(**inputs, **request.generate_options(), tokenizer=tokenizer, streamer=streamer)
    if request.as_json:
        answer = _answer(request, model, tokenizer, output[0].tolist(), prompt_tokens)
        typer.echo(json.dumps({**answer, **streamer.numbers(), "stats": _as_dict(model.compiled.stats())}))
    else:
        for figures in (streamer.figures(), preparation.figures(model.compiled.stats())):
            console.print(figures, style="dim", soft_wrap=True)


def _answer(
    request: GenerateRequest,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tokens: list[int],
    prompt_tokens: int,
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


def _finish_reason(
    request: GenerateRequest, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, new: list[int]
) -> str:
    ends = getattr(model.generation_config, "eos_token_id", None)
    if new[-1] in (ends if isinstance(ends, list) else [ends]):
        return "eos_token"
    text = str(tokenizer.decode(new))
    return "stop_sequence" if any(stop in text for stop in request.stop) else "length"


def _as_dict(stats: Stats) -> dict[str, Any]:
    pages = None if stats.pages is None else stats.pages._asdict()
    return {**dataclasses.asdict(stats), "pages": pages}
