"""What `compiled-llm` does on the command line. Torch and transformers are imported inside, so that --help is quick."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase
    from transformers.generation.streamers import BaseStreamer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


class Dtype(str, Enum):
    """What `--dtype` takes."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Device(str, Enum):
    """What `--device` takes."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"compiled-llm {version('compiled-llm')}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """HuggingFace causal LMs as one compiled graph over FlashInfer's paged attention."""


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; with --chat, the message to answer.")],
    model: Annotated[
        str, typer.Option(help="A folder, a GGUF file, a hub id, or `demo`: SmolLM2-135M, downloaded once (93 MB).")
    ] = "demo",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after so many tokens.")] = 64,
    mode: Annotated[str, typer.Option(help="How to run: eager, compile or reduce-overhead.")] = "reduce-overhead",
    dtype: Annotated[Dtype, typer.Option(help="auto: float32 on the CPU, bfloat16 on CUDA.")] = Dtype.auto,
    device: Annotated[Device, typer.Option(help="auto: CUDA if there is a device.")] = Device.auto,
    chat: Annotated[bool, typer.Option("--chat/--no-chat", help="Apply the model's chat template.")] = False,
) -> None:
    """Write the model's text to stdout as it comes (greedy), then one line of figures to stderr."""
    with _readable_errors():
        _generate(prompt, model, max_new_tokens, mode, dtype.value, device.value, chat)


def _generate(prompt: str, name: str, max_new_tokens: int, mode: str, dtype: str, device: str, chat: bool) -> None:
    console = Console(stderr=True, highlight=False)
    with console.status("importing torch and transformers"):
        from transformers import TextStreamer

        import compiled_llm
        from compiled_llm.loading import load

    loaded, tokenizer = load(name, dtype, device)
    model: Any = compiled_llm.wrap(loaded, mode=mode, max_batch_size=1)
    inputs = {name: tensor.to(loaded.device) for name, tensor in _encode(tokenizer, prompt, chat).items()}
    model.compiled.warmup()

    streamer = TimedStreamer(TextStreamer(tokenizer, skip_prompt=chat, skip_special_tokens=True))
    model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, streamer=streamer)
    console.print(f"{streamer.figures()}, {_counts(model.compiled.stats())}", style="dim", soft_wrap=True)


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool) -> dict[str, Tensor]:
    encoded: Any
    if not chat:
        encoded = tokenizer(prompt, return_tensors="pt")
    elif tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        raise ValueError("--chat: this model's tokenizer has no chat template; use --no-chat")
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def _counts(stats: Any) -> str:
    return (
        f"{stats.graphs} graphs, {stats.graph_breaks} graph breaks, {stats.recompiles} recompiles, "
        f"{stats.cudagraph_skips} cudagraph skips"
    )


class TimedStreamer:
    """Pass tokens on to another streamer, and keep the time. `generate` puts the prompt first."""

    def __init__(self, streamer: BaseStreamer) -> None:
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
        self._streamer.put(value)

    def end(self) -> None:
        """Pass on that nothing follows."""
        self._streamer.end()

    def figures(self) -> str:
        """Return tokens, tokens/s from call to last token, and the time to the first token."""
        if self._first is None:
            return "0 tokens"
        speed = self._tokens / (self._last - self._start)
        return f"{self._tokens} tokens, {speed:.1f} tokens/s, first token after {self._first - self._start:.3f} s"


@contextmanager
def _readable_errors() -> Iterator[None]:
    """Turn errors that this package raised into one line: exit code 2 for what cannot be asked, 1 for what failed.

    Any other error is a bug, and keeps its traceback.
    """
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(err=True)
        raise typer.Exit(130) from None
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        if not _raised_here(error):
            raise
        typer.secho(f"error: {' '.join(str(error).split())}", fg="red", err=True)
        raise typer.Exit(2 if isinstance(error, (FileNotFoundError, ValueError)) else 1) from None


def _raised_here(error: BaseException) -> bool:
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    module = "" if traceback is None else traceback.tb_frame.f_globals.get("__name__", "")
    return module.partition(".")[0] in ("compiled_llm", "compiled_llm_ops")
