"""`compiled-llm chat`. What imports torch or transformers is imported inside, so that --help is quick."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from compiled_llm.commands.chat.chat import COMMANDS, Chat
from compiled_llm.commands.chat.conversation import Conversation, check_template
from compiled_llm.commands.chat.model import ChatModel, RemoteChatModel
from compiled_llm.commands.chat.terminal import Terminal
from compiled_llm.commands.early_checks import check_driver, check_package
from compiled_llm.commands.errors import readable_errors
from compiled_llm.commands.importing import importing
from compiled_llm.commands.loading.source import DEMO, Source, locate
from compiled_llm.commands.options import shared
from compiled_llm.commands.options.choices import Device, Dtype
from compiled_llm.commands.options.running import RunningOptions
from compiled_llm.commands.options.sampling import SamplingFlags, check_range
from compiled_llm.commands.preparation import Preparation

_OF_OWN_MODEL = ("tokenizer", "chat_template", "mode", "backend", "dtype", "device")


def chat(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="A folder, a GGUF file, a hub id, or `demo`: SmolLM2-135M, which is taken if nothing is given.",
            show_default=False,
        ),
    ] = None,
    same_model: shared.SameModel = None,
    tokenizer: shared.Tokenizer = None,
    chat_template: shared.TemplateFile = None,
    uds: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Chat with the engine process of this Unix socket (`compiled-llm serve`), in place of a MODEL.",
            rich_help_panel=shared.MODEL,
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")] = None,
    sample: shared.Sample = None,
    temperature: shared.Temperature = None,
    top_k: shared.TopK = None,
    top_p: shared.TopP = None,
    min_p: shared.MinP = None,
    repetition_penalty: shared.RepetitionPenalty = None,
    seed: shared.Seed = None,
    mode: shared.RunningMode = "cuda-graphs",
    backend: shared.Backend = "auto",
    dtype: shared.WeightsDtype = Dtype.auto,
    device: shared.OnDevice = Device.auto,
    max_new_tokens: shared.MaxNewTokens = 1024,
    stop: shared.StopBefore = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Show no progress and no hints.", rich_help_panel=shared.OUTPUT)
    ] = False,
) -> None:
    """Chat with a model: in a terminal, or with a question a line in a pipe. `/help` says what can be done in it."""
    with readable_errors():
        flags = SamplingFlags(sample, temperature, top_k, top_p, min_p, repetition_penalty, seed)
        check_range("max_new_tokens", max_new_tokens)
        options = RunningOptions(mode=mode, backend=backend, dtype=dtype.value, device=device.value, quiet=quiet)
        if model is not None or same_model is not None:
            model = shared.model_of(model, same_model)
        _check(context, model, uds, options)
        params = flags.params(max_new_tokens, stop or [])
        terminal = Terminal(quiet, COMMANDS)
        source = locate(model or DEMO, not quiet, tokenizer, chat_template) if uds is None else None
        with _chat_model(source, uds, options, terminal) as answering:
            chat = Chat(Conversation(answering, system), params, terminal)
            if terminal.interactive:
                terminal.say(f"{answering.name}; /help says what can be done, Ctrl-D ends the chat")
            chat.run()
    raise typer.Exit(1 if chat.failed and not terminal.interactive else 0)


def _check(context: typer.Context, model: str | None, uds: Path | None, options: RunningOptions) -> None:
    options.wrap_config("cpu")
    if uds is None:
        check_driver(options.device)
        return
    check_package("msgspec", "server")
    if model is not None:
        raise ValueError(f"MODEL and --uds were both given: the engine process at {uds} has its model")
    for name in _OF_OWN_MODEL:
        if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE":
            raise ValueError(
                f"--{name.replace('_', '-')}: the engine process of --uds runs its model in its own way; leave it out"
            )


@contextmanager
def _chat_model(
    source: Source | None, uds: Path | None, options: RunningOptions, terminal: Terminal
) -> Iterator[ChatModel]:
    """Connect to an engine process for the block; or load a model, and compile what a chat needs.

    Raises:
        ValueError: the options do not fit the model or the machine, or there is no tokenizer or chat template.
        RuntimeError: the model cannot be loaded, or there is no engine process.
    """
    if source is None:
        from compiled_llm.client import Client

        with Client(cast("Path", uds), tokenizer=True, wait=False) as client:
            yield RemoteChatModel(client, options.quiet)
        return
    with importing(not options.quiet):
        import compiled_llm
        from compiled_llm.commands.loading.load import load

    device = options.checked_device()
    loaded, tokenizer = load(source, options.dtype, device, progress=not options.quiet)
    check_template(tokenizer)
    wrapped: Any = compiled_llm.wrap(loaded, **options.wrap_options(device.type))
    with compiled_llm.Engine(wrapped, tokenizer=tokenizer, max_num_seqs=1) as engine:
        with Preparation() as preparation:
            engine.warmup(1)
        terminal.say(preparation.figures(wrapped.compiled.stats()))
        yield ChatModel(engine, source.name, tokenizer, engine.describe().max_tokens)
