"""`compiled-llm chat`. What imports torch or transformers is imported inside, so that --help is quick."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from compiled_llm.commands.chat.chat import COMMANDS, Chat
from compiled_llm.commands.chat.conversation import Conversation
from compiled_llm.commands.chat.model import AnsweringModel, ChatModel, HttpChatModel, RemoteChatModel, check_template
from compiled_llm.commands.chat.terminal import Terminal
from compiled_llm.commands.early_checks import check_driver
from compiled_llm.commands.errors import readable_errors
from compiled_llm.commands.importing import importing
from compiled_llm.commands.loading.source import DEMO, Source, locate
from compiled_llm.commands.options import shared
from compiled_llm.commands.options.groups import with_groups
from compiled_llm.commands.options.images import check_images
from compiled_llm.commands.options.running import RunningOptions
from compiled_llm.commands.options.sampling import SamplingFlags, SamplingOptions, check_new_tokens
from compiled_llm.commands.preparation import Preparation
from compiled_llm.commands.remote.address import ApiKeyFile, Server, check_server, is_url, key_of

if TYPE_CHECKING:
    from compiled_llm.huggingface.handle import Wrapped


_OF_OWN_MODEL = ("model", "same_model", "tokenizer", "chat_template", *(field.name for field in fields(RunningOptions)))


@with_groups
def chat(
    *,
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="The model: a folder, a GGUF file, a hub id, or `demo` (SmolLM2-135M), which is the default.",
            show_default=False,
        ),
    ] = None,
    same_model: shared.SameModel = None,
    tokenizer: shared.Tokenizer = None,
    chat_template: shared.TemplateFile = None,
    server: Server = None,
    api_key_file: ApiKeyFile = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="Begin the chat with this system message.")] = None,
    image: shared.Images = None,
    sample: shared.SampleInChats = None,
    numbers: SamplingOptions,
    options: RunningOptions,
    max_new_tokens: shared.MaxNewTokens = 1024,
    stop: shared.StopBefore = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Show no progress and no hints.", rich_help_panel=shared.OUTPUT)
    ] = False,
) -> None:
    """Chat with a model: in a terminal, or in a pipe with a question on each line. `/help` lists what you can type."""
    with readable_errors():
        flags = SamplingFlags(sample, numbers)
        check_new_tokens(max_new_tokens)
        options.wrap_config("cpu")
        given = flags.given(max_new_tokens, stop or [])
        images = image or []
        check_images(images)
        terminal = Terminal(quiet, COMMANDS)
        if server is not None:
            _check_remote(context, server)
            check_server(server, api_key_file)
            if images and not is_url(server):
                raise ValueError(f"--image: over the socket {server} a chat takes no images; give an http:// address")
            answering = _remote_model(server, api_key_file, quiet)
        else:
            place = DEMO if model is None and same_model is None else shared.model_of(model, same_model)
            check_driver(options.device.value)
            source = locate(place, not quiet, tokenizer, chat_template)
            answering = _own_model(source, options, terminal, quiet, sees=bool(images))
        with answering as answers:
            chat = Chat(Conversation(answers, system, images), given, terminal)
            if terminal.interactive:
                terminal.say(f"{answers.name}; /help says what can be done, Ctrl-D ends the chat")
            chat.run()
    raise typer.Exit(1 if chat.failed and not terminal.interactive else 0)


def _check_remote(context: typer.Context, server: str) -> None:
    for name in _OF_OWN_MODEL:
        if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE":
            flag = {"model": "MODEL", "same_model": "--model"}.get(name, f"--{name.replace('_', '-')}")
            raise ValueError(
                f"{flag} and --server were both given: the server at {server} has its model; leave one out"
            )


@contextmanager
def _remote_model(server: str, api_key_file: Path | None, quiet: bool) -> Iterator[AnsweringModel]:
    """Connect for the block; RuntimeError if there is no server, or it does not want to talk to this client."""
    if is_url(server):
        from compiled_llm.commands.remote.http_api import HttpApi

        yield HttpChatModel(HttpApi(server, key_of(api_key_file)), quiet)
        return
    from compiled_llm.client import Client
    from compiled_llm.client.remote_tokenizer import RemoteTokenizer

    with Client(server, tokenizer=RemoteTokenizer(server), wait=False) as client:
        yield RemoteChatModel(client, quiet)


@contextmanager
def _own_model(
    source: Source, options: RunningOptions, terminal: Terminal, quiet: bool, sees: bool
) -> Iterator[AnsweringModel]:
    """Load a model, and compile what a chat needs; ValueError or RuntimeError if that cannot be."""
    with importing(not quiet):
        import compiled_llm
        from compiled_llm.commands.loading.image_processor import (
            encode_with_images,
            load_processor,
            required_processor_place,
        )
        from compiled_llm.commands.loading.load import load
        from compiled_llm.requests.default_sampling import default_sampling

    device = options.checked_device()
    place = required_processor_place(source) if sees else None
    loaded, tokenizer = load(source, options.dtype.value, device, not quiet, sees=place is not None)
    check_template(tokenizer)
    wrapped = cast("Wrapped", compiled_llm.wrap(loaded, **options.wrap_options(device.type, quiet)))
    encode = None if place is None else partial(encode_with_images, load_processor(place))
    with compiled_llm.Engine(wrapped, tokenizer=tokenizer, max_num_seqs=1, tokenizer_eos=True) as engine:
        with Preparation() as preparation:
            engine.warmup(1)
        eager = wrapped.compiled.config.eager_first_on(device.type)
        terminal.say("compiling in the background" if eager else preparation.figures(wrapped.compiled.stats()))
        sampling = default_sampling(getattr(loaded, "generation_config", None))
        yield ChatModel(engine, source.name, tokenizer, engine.describe().max_tokens, sampling, encode)
