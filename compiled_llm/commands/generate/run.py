"""Loads a model and answers one prompt; torch and transformers are imported inside, so that --help is quick."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from compiled_llm.commands.early_checks import check_driver
from compiled_llm.commands.importing import importing
from compiled_llm.commands.loading.source import DEMO, locate
from compiled_llm.commands.options import shared
from compiled_llm.commands.options.groups import OptionGroup
from compiled_llm.commands.options.images import check_images
from compiled_llm.commands.options.prompt import check_system, encode, messages_of
from compiled_llm.commands.options.running import AllRunningOptions
from compiled_llm.commands.options.sampling import SamplingFlags, check_new_tokens
from compiled_llm.commands.preparation import Preparation

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateRequest(OptionGroup):
    """Options of `compiled-llm generate`; ValueError if a value is impossible, or two do not go together."""

    chat: shared.ChatTemplate = False
    system: shared.System = None
    image: shared.Images = None
    sample: shared.Sample = None
    model: Annotated[
        str,
        typer.Option(
            help="The model: a folder, a GGUF file, a hub id, or `demo` (SmolLM2-135M, downloaded once, 93 MB).",
            rich_help_panel=shared.MODEL,
        ),
    ] = DEMO
    tokenizer: shared.Tokenizer = None
    chat_template: shared.TemplateFile = None
    max_new_tokens: shared.MaxNewTokens = 64
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Stop once the answer contains TEXT, which is shown, too. Can be given several times.",
            rich_help_panel=shared.OUTPUT,
        ),
    ] = None
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Write one JSON object at the end instead of the text.", rich_help_panel=shared.OUTPUT
        ),
    ] = False
    quiet: shared.Quiet = False

    def __post_init__(self) -> None:
        check_new_tokens(self.max_new_tokens)
        check_system(self.system, self.is_chat)
        check_images(self.image or [])
        if "" in (self.stop or []):
            raise ValueError("--stop '': an empty text stops nothing; leave it out")

    @property
    def is_chat(self) -> bool:
        return self.chat or bool(self.image)  # images stand in messages

    def run(self, prompt: str, sampling: SamplingFlags, options: AllRunningOptions) -> None:
        """Write the answer to stdout, and figures to stderr; ValueError or RuntimeError if that cannot be."""
        options.wrap_config("cpu")
        check_driver(options.device.value)
        source = locate(self.model, not self.quiet, self.tokenizer, self.chat_template)
        with importing(not self.quiet):
            import torch

            import compiled_llm
            from compiled_llm.commands.generate.streamer import AnswerStreamer
            from compiled_llm.commands.loading.image_processor import (
                encode_with_images,
                load_processor,
                required_processor_place,
            )
            from compiled_llm.commands.loading.load import load
            from compiled_llm.execution.limits import check_fits

        device = options.checked_device()
        place = required_processor_place(source) if self.image else None
        loaded, tokenizer = load(source, options.dtype.value, device, not self.quiet, sees=place is not None)
        if place is None:
            encoded = encode(tokenizer, prompt, self.chat, self.system)
        else:
            encoded = encode_with_images(load_processor(place), messages_of(prompt, self.system, self.image or []))
        inputs: dict[str, Any] = {name: tensor.to(loaded.device) for name, tensor in encoded.items()}
        model: Any = compiled_llm.wrap(loaded, **options.wrap_options(device.type, self.quiet))
        prompt_tokens = inputs["input_ids"].shape[1]
        # Asked first: compiling takes a minute or more.
        check_fits(model.compiled.model_runner(), [prompt_tokens], self.max_new_tokens)
        with Preparation() as preparation:
            if not model.compiled.config.eager_first_on(device.type):  # in the background it would be too late
                model.compiled.warmup(1)

        streamer = AnswerStreamer(tokenizer, skip_prompt=self.is_chat, silent=self.as_json)
        if sampling.seed is not None:
            torch.manual_seed(sampling.seed)
        stopping = {"stop_strings": self.stop} if self.stop else {}
        settings = {"max_new_tokens": self.max_new_tokens, **sampling.options(), **stopping}
        output = model.generate(**inputs, **settings, tokenizer=tokenizer, streamer=streamer)
        stats = model.compiled.stats()
        if self.as_json:
            answer = self._answer(model, tokenizer, output[0, prompt_tokens:].tolist())
            pages = None if stats.pages is None else stats.pages._asdict()
            shown = {"prompt_tokens": prompt_tokens, "stats": {**dataclasses.asdict(stats), "pages": pages}}
            typer.echo(json.dumps({"prompt": prompt, **answer, **streamer.numbers(), **shown}))
        else:
            console = Console(stderr=True, highlight=False, quiet=self.quiet)
            console.print(streamer.figures(), style="dim", soft_wrap=True)
            console.print(preparation.figures(stats), style="dim", soft_wrap=True)
            if tokenizer.chat_template is not None and not self.is_chat:
                console.print(
                    "the model is trained for chat: --chat sends it your prompt as a message",
                    style="dim",
                    soft_wrap=True,
                )

    def _answer(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> dict[str, Any]:
        ends = getattr(model.generation_config, "eos_token_id", None)
        text = str(tokenizer.decode(tokens))
        reason = "length"
        if tokens[-1] in (ends if isinstance(ends, list) else [ends]):
            reason = "eos_token"
        elif any(stop in text for stop in self.stop or []):
            reason = "stop_sequence"
        return {
            "text": tokenizer.decode(tokens, skip_special_tokens=True),
            "tokens": len(tokens),
            "token_ids": tokens,
            "finish_reason": reason,
        }
