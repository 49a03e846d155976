"""Users' prompts and settings as plain data that can be sent."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from compiled_llm.protocol.messages import ImagePrompt
from compiled_llm.requests.prompts import check_texts, content_of, is_dictionary
from compiled_llm.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T", int, str)

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any] | ImagePrompt
"""Text, token ids (an array or tensor of them, too), the messages of a chat (``{"role": ..., "content": ...}``), or one
of vLLM's dictionaries (``{"prompt": text}``, ``{"prompt_token_ids": ids}``)."""


def plain_params(params: SamplingParams) -> dict[str, Any]:
    """Return the settings that are not the defaults; ValueError if one cannot be sent."""
    return {name: _plain(name, value) for name, value in _given(params).items()}


def _given(fields: object) -> dict[str, Any]:
    kind: Any = type(fields)
    given = {}
    for name, default in _defaults(kind):
        if (value := getattr(fields, name)) is not default and value != default:
            given[name] = value
    return given


@functools.cache
def _defaults(kind: Any) -> list[tuple[str, Any]]:
    return [(field.name, field.default) for field in dataclasses.fields(kind)]


def _plain(name: str, value: object) -> object:
    if type(value) in (bool, float, str):
        return value
    try:
        if dataclasses.is_dataclass(value):
            value = _given(value)
        plain = msgspec.to_builtins(value, enc_hook=_number, str_keys=False)
        msgspec.msgpack.encode(plain)
    except OverflowError:
        raise ValueError(f"SamplingParams: {name}: a number that is too large: 64 bits are sent") from None
    except TypeError:
        raise ValueError(
            f"SamplingParams: {name}: only plain data can be sent to an engine process, and functions cannot; use an "
            "engine in this process"
        ) from None
    return plain


def _number(value: object) -> object:
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"{type(value).__name__} is no plain data")


def plain_list(name: str, asked: object, kind: type[T]) -> list[T] | None:
    """Return a list of numbers or names that can be sent; ValueError if the argument ``name`` is none."""
    if asked is None:
        return None
    entries = [] if isinstance(asked, str) or not isinstance(asked, Sequence) else list(asked)
    if not entries or not all(type(entry) is kind for entry in entries):
        raise ValueError(f"{name}={asked!r}: give a list of {kind.__name__}, one at least; None for none")
    return entries


def image_prompt_of(prompt: object) -> ImagePrompt | None:
    """Return a prompt with images as it is sent; None for one without, ValueError if its images are no files."""
    if isinstance(prompt, ImagePrompt) or not isinstance(prompt, Mapping):
        return prompt if isinstance(prompt, ImagePrompt) else None
    if not (data := prompt.get("multi_modal_data")):
        return None
    text, given = prompt.get("prompt"), data.get("image") if isinstance(data, Mapping) else None
    listed: list[Any] = given if isinstance(given, list) else [given]
    images = [image for image in listed if isinstance(image, bytes)]
    if not isinstance(text, str) or len(images) < len(listed) or len(data) > 1:
        raise ValueError(
            'prompt: images are sent to an engine process as {"prompt": text, "multi_modal_data": {"image": '
            "[the bytes of a file]}}; other forms are for an engine in this process"
        )
    return ImagePrompt(text, images)


def token_ids(prompt: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return a prompt's tokens, which the engine process checks; ValueError if it is none, or lacks a tokenizer."""
    if is_dictionary(prompt):
        return token_ids(content_of(prompt), tokenizer)
    if isinstance(prompt, str):
        check_texts(prompt, "prompt")
        return _ids(_needed(tokenizer, "text needs")(prompt)["input_ids"])
    if _is_chat(prompt):
        check_texts(prompt, "prompt")
        chat = _needed(tokenizer, "messages need").apply_chat_template
        return _ids(chat(prompt, add_generation_prompt=True, return_dict=True)["input_ids"])
    return _ids(prompt)


def _is_chat(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _needed(tokenizer: object, what: str) -> Any:
    if tokenizer is None:
        raise ValueError(f"prompt: {what} a tokenizer; give Client(path, tokenizer=...), or token ids")
    return tokenizer


def _ids(values: Any) -> list[int]:
    listed = values.tolist() if hasattr(values, "tolist") else values
    try:
        return list(map(operator.index, listed))
    except TypeError:
        raise ValueError("prompt: give text, token ids or the messages of a chat; one prompt, not several") from None
