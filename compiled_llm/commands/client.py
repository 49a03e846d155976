"""`compiled-llm client`: one prompt to an engine process, and its answer as it comes."""

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
from compiled_llm.commands.options import shared
from compiled_llm.commands.options.prompt import check_quoted, check_system, messages_of, read_prompt
from compiled_llm.commands.options.sampling import SamplingFlags, check_range
from compiled_llm.commands.printable import printable

if TYPE_CHECKING:
    from compiled_llm.client.handle import RemoteHandle
    from compiled_llm.requests.outputs import RequestOutput


def client(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(help="The engine process's Unix socket.", show_default=False)],
    prompt: shared.Prompt = None,
    file: shared.PromptFile = None,
    chat: shared.ChatTemplate = False,
    system: shared.System = None,
    ids: Annotated[
        bool,
        typer.Option(
            "--ids",
            help="The prompt is token ids with commas between them, and so is the answer; no tokenizer is loaded.",
            rich_help_panel=shared.INPUT,
        ),
    ] = False,
    sample: shared.Sample = None,
    temperature: shared.Temperature = None,
    top_k: shared.TopK = None,
    top_p: shared.TopP = None,
    min_p: shared.MinP = None,
    repetition_penalty: shared.RepetitionPenalty = None,
    seed: shared.Seed = None,
    max_new_tokens: shared.MaxNewTokens = 256,
    stop: shared.StopBefore = None,
    quiet: shared.Quiet = False,
) -> None:
    """Send a prompt to an engine process (`compiled-llm serve`), and write its answer to stdout as it comes."""
    with readable_errors():
        check_package("msgspec", "server")
        check_quoted(prompt, context.args)
        check_system(system, chat)
        if chat and ids:
            raise ValueError("--ids: token ids are no chat; leave out --chat, or give its text")
        check_range("max_new_tokens", max_new_tokens)
        flags = SamplingFlags(sample, temperature, top_k, top_p, min_p, repetition_penalty, seed)
        params = flags.params(max_new_tokens, stop or [])
        text = read_prompt(prompt, file)
        from compiled_llm.client import Client

        with Client(path, tokenizer=None if ids else True, wait=False) as client:
            wait_until_ready(client, quiet)
            handle = client.submit(_prompt(text, chat, system, ids), params)
            _write(_pieces(handle, ids))
            if not quiet:
                Console(stderr=True, highlight=False).print(_figures(handle.result()), style="dim", soft_wrap=True)


def _prompt(text: str, chat: bool, system: str | None, ids: bool) -> Any:
    if ids:
        return _token_ids(text)
    return messages_of(text, system) if chat else text


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
