"""A prompt on the command line: where it comes from, and as tokens."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from compiled_llm.commands.options.images import seen_content

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


def check_quoted(argument: str | None, others: Sequence[str]) -> None:
    """Raise ValueError if PROMPT is more than one argument."""
    if others:
        raise ValueError(f"PROMPT is one argument: quote it, as in {shlex.quote(' '.join([argument or '', *others]))}")


def check_system(system: str | None, chat: bool, way_out: str = "give --chat as well") -> None:
    """Raise ValueError if a system message has no chat to stand in."""
    if system is not None and not chat:
        raise ValueError(f"--system is a part of the chat template: {way_out}")


def read_prompt(argument: str | None, file: str | None) -> str:
    """Return the prompt: the argument, a file's text, or stdin (`-`, or piped in); ValueError unless it is one text."""
    if argument is not None and file is not None:
        raise ValueError("PROMPT and --file were both given: the prompt comes from one place")
    if file not in (None, "-"):
        text = _text(_bytes_of(Path(file)), f"--file {file}")
    elif argument not in (None, "-"):
        text = _text(argument.encode(errors="surrogateescape"), "PROMPT", drops_line_end=False)
    else:
        text = _text(_bytes_of_stdin(asked_for="-" in (argument, file)), "stdin")
    if not text:
        raise ValueError("the prompt is empty: give it as PROMPT, with --file PATH, or pipe it in")
    return text


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"--file {path}: cannot be read: {error.strerror}") from error


def _bytes_of_stdin(asked_for: bool) -> bytes:
    if sys.stdin is None or (sys.stdin.isatty() and not asked_for):
        raise ValueError("there is no prompt: give it as PROMPT, with --file PATH, or pipe it in")
    if sys.stdin.isatty():
        typer.echo("reading the prompt from the terminal; Ctrl-D ends it", err=True)
    return sys.stdin.buffer.read()


def _text(content: bytes, source: str, drops_line_end: bool = True) -> str:
    """Return UTF-8 bytes as text, without the line end that editors and `echo` put last."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: is not UTF-8 text: {error.reason} at byte {error.start}") from error
    return text.removesuffix("\n").removesuffix("\r") if drops_line_end else text


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool, system: str | None = None) -> dict[str, Tensor]:
    """Return a prompt's ``input_ids`` and ``attention_mask``, ``[1, T]``; ValueError if ``chat`` cannot be written."""
    encoded: Mapping[str, Tensor]
    if not chat:
        encoded = tokenizer(prompt, return_tensors="pt")
    else:
        check_has_template(tokenizer, "--chat", "use --no-chat")
        encoded = written(tokenizer, messages_of(prompt, system), "--chat", return_tensors="pt")
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def messages_of(prompt: str, system: str | None, images: Sequence[Path] = ()) -> list[dict[str, Any]]:
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": seen_content(prompt, images)}]


def check_has_template(tokenizer: object, asked_by: str, way_out: str) -> None:
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"{asked_by}: this model's tokenizer has no chat template; {way_out}")


def written(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], asked_by: str, **options: Any
) -> Any:
    """Return a chat as the template writes it, up to the beginning of an answer; ValueError if it refuses that."""
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template([*messages], add_generation_prompt=True, return_dict=True, **options)
    except TemplateError as error:
        raise ValueError(f"{asked_by}: the model's chat template refuses this: {error}") from error
