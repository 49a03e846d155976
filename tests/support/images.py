"""Prompts with images as a processor returns them, and tokens that HuggingFace answers them with."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

import compiled_llm
from support.huggingface.vision import END, IMAGE, START, make


class SampleImage(NamedTuple):
    """An image of random pixels, of 4 tokens or, if it is ``wide``, of 8 where a family has sizes."""

    seed: int
    wide: bool = False


Part = int | SampleImage


def prompt_of(family: str, *parts: Part) -> dict[str, Tensor]:
    """What a processor of a family makes of text and images."""
    images = [part for part in parts if isinstance(part, SampleImage)]
    ids: list[int] = []
    for part in parts:
        ids += [part] if isinstance(part, int) else [START, *[IMAGE] * _tokens(family, part), END]
    input_ids = torch.tensor([ids])
    given = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    types = (input_ids == IMAGE).long()
    if family == "Gemma3":
        given["token_type_ids"] = types
    if not images:
        return given
    if not _by_patches(family):
        size = 32 if family == "Mistral3" else 16
        sizes = {"image_sizes": torch.tensor([[size, size]] * len(images))} if family == "Mistral3" else {}
        pixels = torch.cat([_random(image.seed, 1, 3, size, size) for image in images])
        return {**given, "pixel_values": pixels, **sizes}
    grid = torch.tensor([[1, 4, 8 if image.wide else 4] for image in images])
    patches = torch.cat([_random(image.seed, 32 if image.wide else 16, 96) for image in images])
    return {**given, "mm_token_type_ids": types, "pixel_values": patches, "image_grid_thw": grid}


def _by_patches(family: str) -> bool:
    return family.startswith(("Qwen", "Glm"))


def _tokens(family: str, image: SampleImage) -> int:
    if family == "InternVL":
        return 1
    return 8 if image.wide and _by_patches(family) else 4


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def seeing(family: str, tokens: int = 400, seed: int = 0, **options: Any) -> PreTrainedModel:
    """A tiny model of a family, wrapped with pages for so many tokens."""
    given = {"mode": "eager", "page_size": 4, "max_batch_size": 4, "progress": False, **options}
    return compiled_llm.wrap(make(family, seed), kv_memory=f"{tokens} tokens", **given)


@functools.cache
def answer(family: str, parts: tuple[Part, ...], tokens: int, seed: int = 0) -> list[int]:
    """The most likely tokens, by HuggingFace's ``generate`` alone."""
    return alone(_plain(family, seed), prompt_of(family, *parts), tokens)


def alone(model: PreTrainedModel, inputs: dict[str, Tensor], tokens: int) -> list[int]:
    """The most likely tokens of a plain model."""
    length = inputs["input_ids"].shape[1]
    options = {"min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": False}
    found: list[int] = model.generate(**inputs, **options)[0, length:].tolist()  # type: ignore[operator]
    return found


@functools.cache
def _plain(family: str, seed: int) -> PreTrainedModel:
    return make(family, seed)
