"""`compiled-llm client`: one prompt to a generator, and its answer as it comes."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from compiled_llm.commands.connecting import wait_until_ready
from compiled_llm.commands.early_checks import check_package
from compiled_llm.commands.errors import readable_errors
from compiled_llm.commands.printable import printable
from compiled_llm.commands.prompt import check_quoted, read_prompt
from compiled_llm.commands.request import SamplingFlags, check_range

if TYPE_CHECKING:
    from compiled_llm.client.handle import RemoteHandle
    from compiled_llm.engine.output import RequestOutput

_INPUT, _SAMPLING, _OUTPUT = "Input", "Sampling", "Output"


def client(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(help="The generator's Unix socket.", show_default=False)],
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="The text to continue, or with --chat the message to answer. `-`, or none in a pipe, reads stdin.",
            show_default=False,
        ),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="Read the prompt from a file; its final newline is dropped.", rich_help_panel=_INPUT
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Apply the model's chat template.", rich_help_panel=_INPUT)
    ] = False,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="With --chat: the system message.", rich_help_panel=_INPUT)
    ] = None,
    ids: Annotated[
        bool,
        typer.Option(
            "--ids",
            help="The prompt is token ids with commas between them, and so is the answer; no tokenizer is loaded.",
            rich_help_panel=_INPUT,
        ),
    ] = False,
    sample: Annotated[
        bool | None,
        typer.Option(
            "--sample/--greedy",
            help="Sample each token, or take the most likely one. Greedy unless an option below is given.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="Above 1 flattens the distribution, below 1 sharpens it.", rich_help_panel=_SAMPLING),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Sample among the k most likely tokens; 0 for all.", rich_help_panel=_SAMPLING)
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample among the fewest tokens that add up to this probability.", rich_help_panel=_SAMPLING),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Sample among tokens at least this fraction as likely as the likeliest.", rich_help_panel=_SAMPLING
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            help="Above 1 makes earlier tokens less likely; works with --greedy too.", rich_help_panel=_SAMPLING
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same text.", rich_help_panel=_SAMPLING)
    ] = None,
    max_new_tokens: Annotated[
        int,
        typer.Option("--max-new-tokens", "--max-tokens", help="Stop after this many tokens.", rich_help_panel=_OUTPUT),
    ] = 256,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Stop before the new text contains TEXT. Can be given several times.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Show no progress and no figures.", rich_help_panel=_OUTPUT)
    ] = False,
) -> None:
    """Send a prompt to a generator (`compiled-llm serve`), and write its answer to stdout as it comes."""
    with readable_errors():
        check_package("msgspec", "server")
        check_quoted(prompt, context.args)
        if system is not None and not chat:
            raise ValueError("--system is a part of the chat template: give --chat as well")
        if chat and ids:
            raise ValueError("--ids: token ids are no chat; leave out --chat, or give its text")
        check_range("max_new_tokens", max_new_tokens)
        flags = SamplingFlags(sample, temperature, top_k, top_p, min_p, repetition_penalty, seed)
        params = flags.params(max_new_tokens, stop or [])
        text = read_prompt(prompt, file)
        from compiled_llm.client import Client

        with Client(path, tokenizer=None if ids else True, wait=False) as generator:
            wait_until_ready(generator, quiet)
            handle = generator.submit(_prompt(text, chat, system, ids), params)
            _write(_pieces(handle, ids))
            if not quiet:
                Console(stderr=True, highlight=False).print(_figures(handle.result()), style="dim", soft_wrap=True)


def _prompt(text: str, chat: bool, system: str | None, ids: bool) -> Any:
    if ids:
        return _token_ids(text)
    if not chat:
        return text
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": text}]


def _token_ids(text: str) -> list[int]:
    try:
        return [int(number) for number in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError("--ids: give token ids as PROMPT, with commas between them: 1,15,7") from None


def _pieces(handle: RemoteHandle, ids: bool) -> Iterable[str]:
    return (f"{token}," for token in handle) if ids else handle.text()


def _write(pieces: Iterable[str]) -> None:
    for piece in pieces:
        sys.stdout.write(printable(piece) if sys.stdout.isatty() else piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _figures(output: RequestOutput) -> str:
    tokens = len(output.token_ids)
    first = "" if output.first_token_seconds is None else f", first token after {output.first_token_seconds:.3f} s"
    return f"{tokens} tokens in {output.seconds:.2f} s{first}, {output.finish_reason}"
