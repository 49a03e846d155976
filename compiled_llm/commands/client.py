"""`compiled-llm client`: one prompt to a server, and its answer as it comes, without torch and transformers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from compiled_llm.commands.errors import readable_errors
from compiled_llm.commands.options import shared
from compiled_llm.commands.options.groups import with_groups
from compiled_llm.commands.options.prompt import check_quoted, check_system, messages_of, read_prompt
from compiled_llm.commands.options.sampling import SamplingFlags, SamplingOptions, check_new_tokens
from compiled_llm.commands.printable import printable
from compiled_llm.commands.remote.address import ApiKeyFile, Server, check_server, is_url, key_of
from compiled_llm.commands.remote.answer import Answering

_DEFAULT = "http://localhost:8000"


@with_groups
def client(
    *,
    context: typer.Context,
    prompt: shared.Prompt = None,
    server: Server = _DEFAULT,
    api_key_file: ApiKeyFile = None,
    file: shared.PromptFile = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat/--raw",
            help="Send the prompt as a chat message, or as a text that the model continues.",
            rich_help_panel=shared.INPUT,
        ),
    ] = True,
    system: shared.System = None,
    ids: Annotated[
        bool,
        typer.Option(
            "--ids",
            help="Send token ids, separated by commas, as the prompt, and print the answer as token ids.",
            rich_help_panel=shared.INPUT,
        ),
    ] = False,
    sample: shared.SampleInChats = None,
    numbers: SamplingOptions,
    max_new_tokens: shared.MaxNewTokens = 256,
    stop: shared.StopBefore = None,
    quiet: shared.Quiet = False,
) -> None:
    """Send a message or a text to a server (`compiled-llm serve`), and write the answer to stdout as it comes."""
    with readable_errors():
        address = server or _DEFAULT
        check_server(address, api_key_file)
        check_quoted(prompt, context.args)
        if ids and chat and (source := context.get_parameter_source("chat")) is not None and source.name != "DEFAULT":
            raise ValueError("--ids: token ids are no chat; leave out --chat, or give its text")
        check_system(system, chat and not ids, "leave out --ids" if ids else "leave out --raw")
        check_new_tokens(max_new_tokens)
        flags = SamplingFlags(sample, numbers)
        given = flags.given(max_new_tokens, stop or [])
        text = read_prompt(prompt, file)
        with (
            _told_of_raw(),
            _begun(address, api_key_file, _prompt(text, chat, system, ids), given, ids, quiet) as answer,
        ):
            _write((f"{token}," for token in answer) if ids else answer.text())
            if not quiet:
                console = Console(stderr=True, highlight=False)
                console.print(answer.figures().line(), style="dim", soft_wrap=True)


@contextmanager
def _told_of_raw() -> Iterator[None]:
    """Have a server's word that its model writes no chats say what to do here."""
    try:
        yield
    except ValueError as error:
        if "no chat template" not in str(error):
            raise
        raise ValueError(f"{error}; --raw sends the prompt as a text") from error


@contextmanager
def _begun(
    address: str, api_key_file: Path | None, prompt: Any, given: dict[str, Any], ids: bool, quiet: bool
) -> Iterator[Answering]:
    """Begin an answer, once the server is ready; it ends with the block."""
    if is_url(address):
        from compiled_llm.commands.remote.http_api import HttpApi

        api = HttpApi(address, key_of(api_key_file))
        answer: Answering = api.submit(api.wait_until_ready(quiet), prompt, given, ids)
        try:
            yield answer
        finally:
            answer.cancel()
        return
    from compiled_llm.client import Client
    from compiled_llm.client.remote_tokenizer import RemoteTokenizer
    from compiled_llm.commands.remote.connecting import wait_until_ready
    from compiled_llm.commands.remote.engine_answer import EngineAnswer
    from compiled_llm.requests.default_sampling import with_defaults
    from compiled_llm.requests.sampling_params import SamplingParams

    with Client(address, tokenizer=None if ids else RemoteTokenizer(address), wait=False) as client:
        ready = wait_until_ready(client, quiet)
        yield EngineAnswer(client.submit(prompt, SamplingParams(**with_defaults(given, ready.sampling))))


def _prompt(text: str, chat: bool, system: str | None, ids: bool) -> object:
    if ids:
        return _token_ids(text)
    return messages_of(text, system) if chat else text


def _token_ids(text: str) -> list[int]:
    try:
        return [int(number) for number in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError("--ids: give token ids as PROMPT, with commas between them: 1,15,7") from None


def _write(pieces: Iterable[str]) -> None:
    for piece in pieces:
        sys.stdout.write(printable(piece) if sys.stdout.isatty() else piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
