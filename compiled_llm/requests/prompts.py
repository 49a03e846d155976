"""Prompts as users give them: one or several, in vLLM's dictionaries, too. Arrays are known by their attributes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeGuard

from compiled_llm.requests.sampling_params import SamplingParams

_IN_DICTIONARIES = frozenset({"prompt", "prompt_token_ids", "prompt_embeds"})
_OF_TEXT = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
"""What a processor returns for text alone."""
_WAYS_OUT = {
    "prompt_embeds": "give token ids, or call model.generate(inputs_embeds=...)",
    "cache_salt": "give it to submit(..., cache_salt=...)",
}
_WAY_OUT = "leave it out; for images, call Engine.submit in the model's process"


def with_params(
    prompts: object, params: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[Any, SamplingParams]]:
    """Return each prompt with its settings: for all, or one for each; ValueError if the numbers differ."""
    all_prompts = listed(prompts)
    each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(all_prompts)
    if len(each) != len(all_prompts):
        raise ValueError(f"params: give one for all prompts, or one for each of {len(all_prompts)}; got {len(each)}")
    return list(zip(all_prompts, each, strict=True))


def listed(prompts: Any) -> list[Any]:
    """Return the prompts that an iterable has, or the one that is given."""
    return [prompts] if _is_one(prompts) else list(prompts)


def _is_one(prompts: Any) -> bool:
    if hasattr(prompts, "ndim"):
        return bool(prompts.ndim < 2)
    if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Iterable):
        return True  # an object that is no prompt is refused later
    if not (isinstance(prompts, Sequence) and len(prompts) > 0) or is_dictionary(prompts[0]):
        return False
    return isinstance(prompts[0], (Real, Mapping))


def shows_images(prompt: object) -> bool:
    """Whether a prompt has images, or other parts than text: messages, a dictionary, or what a processor returned."""
    if isinstance(prompt, Mapping):
        return bool(prompt.get("multi_modal_data")) or ("input_ids" in prompt and not _OF_TEXT.issuperset(prompt))
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping) and _has_parts(prompt)


def _has_parts(messages: Iterable[Any]) -> bool:
    """Whether a message has a part that is no text."""
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, (list, tuple)) for part in content)
    return any(isinstance(part, Mapping) and part.get("type", "text") != "text" for part in parts)


def is_dictionary(prompt: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether a prompt is one of vLLM's dictionaries, and not a message of a chat."""
    return isinstance(prompt, Mapping) and not _IN_DICTIONARIES.isdisjoint(prompt)


def content_of(prompt: Mapping[str, Any]) -> Any:
    """Return the token ids in one of vLLM's dictionaries, or without them its text; ValueError for other keys."""
    # ``{"prompt_token_ids": ids}`` may have the text in ``"prompt"``, too, which nothing reads. Keys of None are
    # absent.
    given = {name: value for name, value in prompt.items() if value is not None}
    for name in given:
        if name not in ("prompt", "prompt_token_ids"):
            raise ValueError(f"prompt: {name!r} is not served; {_WAYS_OUT.get(name, _WAY_OUT)}")
    if (ids := given.get("prompt_token_ids")) is not None:
        if not _are_ids(ids):
            raise ValueError(f"prompt: 'prompt_token_ids' has to be the token ids of one prompt; got {ids!r:.80}")
        return ids
    if not isinstance(text := given.get("prompt"), str):
        raise ValueError(f"prompt: 'prompt' has to be text; got {text!r:.80}; token ids go into 'prompt_token_ids'")
    return text


def _are_ids(value: object) -> bool:
    """Whether a value is one row of token ids, as far as its first one tells."""
    if hasattr(value, "ndim"):
        return True
    return (
        isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(i, Integral) for i in value[:1])
    )


def check_texts(value: object, name: str) -> None:
    """Check all texts in a JSON value; ValueError if one cannot be encoded, which no tokenizer takes."""
    for text in strings_in(value):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name}: half a character of UTF-16 is no text") from None


def strings_in(value: object) -> Iterator[str]:
    """Yield all strings in a JSON value, names of entries among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            yield from strings_in(name)
            yield from strings_in(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from strings_in(entry)
