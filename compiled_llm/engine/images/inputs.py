"""The inputs that a processor makes of prompts with images: of messages, or of vLLM's dictionaries."""

# Shapes: T tokens of a prompt.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from compiled_llm.engine.images.image_files import MOST_PIXELS, UnreadError, as_read_by, opened
from compiled_llm.engine.images.scaling import oversized
from compiled_llm.requests.users_code import described

if TYPE_CHECKING:
    from PIL.Image import Image

    from compiled_llm.engine.parts import MultimodalProcessor

_NOT_SERVED = {"video": "videos are", "audio": "sound is", "video_url": "videos are", "input_audio": "sound is"}


def inputs_of(prompt: object, processor: MultimodalProcessor | None, image_token: int) -> dict[str, Any]:
    """Return what the processor makes of a prompt, or has made of it; ValueError if it cannot be had.

    Args:
        prompt: messages, one of vLLM's dictionaries, or what the processor returned.
        processor: the engine's; None if it has none.
        image_token: the id that tokens of images have in the model.
    """
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        return {name: value for name, value in prompt.items() if value is not None}
    if processor is None:
        raise ValueError(
            "prompt: it has an image, and the engine has no processor; give compiled_llm.Engine(model, "
            "processor=AutoProcessor.from_pretrained(...))"
        )
    own = getattr(processor, "image_token_id", None)
    if own is not None and own != image_token:
        raise ValueError(
            f"prompt: images are tokens {own} to the engine's processor and {image_token} to its model; give the "
            "processor of this model"
        )
    if isinstance(prompt, Mapping):
        made = _of_dictionary(prompt, processor, image_token)
    else:
        made = _of_messages(cast("Sequence[object]", prompt), processor)
    return {name: value for name, value in made.items() if value is not None}


def _of_messages(messages: Sequence[object], processor: MultimodalProcessor) -> Mapping[str, Any]:
    loaded = [_with_images(message, processor) for message in messages]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    return _asked(processor.apply_chat_template, loaded, **options)


def _with_images(message: object, processor: MultimodalProcessor) -> object:
    if not isinstance(message, Mapping) or not isinstance(content := message.get("content"), (list, tuple)):
        return message
    return {**message, "content": [_part(part, processor) for part in content]}


def _part(part: object, processor: MultimodalProcessor) -> object:
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    if kind == "text":
        return part
    if kind in _NOT_SERVED:
        raise ValueError(f"prompt: a message has a part of type {kind!r}; {_NOT_SERVED[kind]} not served")
    if not isinstance(part, Mapping) or kind != "image" or "image" not in part:
        raise ValueError(
            f"prompt: a message has a part {_shown(part)}; images are {{'type': 'image', 'image': ...}}, an Image of "
            "Pillow's, or the path or the bytes of a file"
        )
    return {"type": "image", "image": _given(part["image"], processor)}


def _given(source: object, processor: object) -> Image:
    """Return an image as the processor is given it; ValueError if it cannot be had, or is made too large."""
    image = opened(source)
    image_processor = getattr(processor, "image_processor", None)
    if (why := oversized(image_processor, *image.size, MOST_PIXELS)) is not None:
        raise ValueError(f"prompt: an image {why}")
    return as_read_by(image_processor, image)


def _shown(part: object) -> str:
    keys = f" with {', '.join(map(repr, part))}" if isinstance(part, Mapping) else ""
    return f"of type {part['type']!r}{keys}" if isinstance(part, Mapping) and "type" in part else f"{part!r:.40}"


def _of_dictionary(prompt: Mapping[str, Any], processor: MultimodalProcessor, image_token: int) -> Mapping[str, Any]:
    data = prompt["multi_modal_data"] if isinstance(prompt["multi_modal_data"], Mapping) else {}
    for name in data:
        if name != "image":
            raise ValueError(f"prompt: multi_modal_data has {name!r}; images alone are served, under 'image'")
    given = data.get("image")
    images = [_given(image, processor) for image in (given if isinstance(given, (list, tuple)) else [given])]
    for name in prompt:
        if name not in ("prompt", "prompt_token_ids", "multi_modal_data") and prompt[name] is not None:
            raise ValueError(f"prompt: {name!r} is not served beside multi_modal_data; leave it out")
    if (ids := prompt.get("prompt_token_ids")) is not None:
        return _of_ids(np.asarray(ids, dtype=np.int64), images, processor, image_token)
    return inputs_of_text(prompt.get("prompt"), images, processor)


def inputs_of_text(text: object, images: Sequence[object], processor: MultimodalProcessor) -> Mapping[str, Any]:
    """Return what the processor makes of a text with images as it is given them; raises as ``_asked``."""
    options = _without_a_second_beginning(text, processor)
    return _asked(processor, text=[text], images=list(images), return_tensors="pt", **options)


def _without_a_second_beginning(text: object, processor: object) -> dict[str, Any]:
    """Return an option for a text that a chat template has begun with the token of beginnings, as messages have."""
    begin = getattr(getattr(processor, "tokenizer", None), "bos_token", None)
    return {"add_special_tokens": False} if begin and isinstance(text, str) and text.startswith(begin) else {}


def _of_ids(
    ids: NDArray[np.int64], images: Sequence[Image], processor: MultimodalProcessor, image_token: int
) -> Mapping[str, Any]:
    """Return the inputs of token ids that have one token for each image, as vLLM takes them, or all of them."""
    token = getattr(processor, "image_token", None)
    if token is None:
        raise ValueError(
            f"prompt: {type(processor).__name__} has no image_token, by which tokens of images are put among token "
            "ids; give messages, or what the processor returns"
        )
    options = {"return_tensors": "pt", "add_special_tokens": False}
    each = [_asked(processor, text=[token], images=[image], **options)["input_ids"][0].numpy() for image in images]
    inputs = dict(_asked(processor, text=[token * len(images)], images=list(images), **options))
    places = np.flatnonzero(ids == image_token)
    if len(places) == len(images):
        after = [0, *(places + 1)]
        texts = [ids[start:end] for start, end in zip(after, [*places, len(ids)], strict=True)]
        ids = np.concatenate([part for both in zip(texts, [*each, ids[:0]], strict=True) for part in both])
    elif len(places) != sum(int((own == image_token).sum()) for own in each):
        raise ValueError(
            f"prompt: prompt_token_ids have {len(places)} tokens {image_token} for {len(images)} images; "
            "give one for each, or as many as the processor makes of them"
        )
    input_ids = torch.from_numpy(ids)[None]
    marks = {name: (input_ids == image_token).long() for name in inputs if name.endswith("token_type_ids")}
    return {**inputs, "input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), **marks}


def _asked(function: Callable[..., Mapping[str, Any]], *arguments: object, **options: object) -> Mapping[str, Any]:
    """Return what the processor returns; ValueError says why it does not, UnreadError that an image cannot be had."""
    try:
        return function(*arguments, **options)
    except UnreadError:
        raise
    except Exception as error:
        raise ValueError(f"prompt: the processor has failed: {described(error)}") from error
