"""The keys by which a prefix cache knows the tokens of pictures: hashes of their pixels, and never their ids."""

# All tokens of pictures have one id, so that by ids two pictures of one size would be the same text. Shapes: T tokens
# of a prompt, N pictures.

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ODD = np.uint64(0x9E3779B97F4A7C15)
"""A multiple of it, by a token's place in its picture, is part of the token's key."""
_NEGATIVE = np.uint64(1 << 63)
"""No token's id is negative, so no key is an id."""


def token_keys(ids: NDArray[np.int64], image_token: int, pixels: Mapping[str, Tensor]) -> NDArray[np.int64]:
    """Return ``[T]`` int64, a prompt's ids with a negative key in place of each token of a picture.

    Args:
        ids: ``[T]`` int64.
        image_token: the id that tokens of pictures have.
        pixels: the inputs that pictures are computed from.
    """
    keys: NDArray[np.int64] = ids.copy()
    runs = runs_of(ids, image_token)
    pictures = _by_picture(pixels, [len(run) for run in runs])
    if pictures is None:  # nothing says which tokens are of which picture: they are known by all of them together
        runs, pictures = [np.concatenate(runs)], [dict(pixels)]
    for run, picture in zip(runs, pictures, strict=True):
        keys[run] = _keys(picture, len(run))
    return keys


def runs_of(ids: NDArray[np.int64], image_token: int) -> list[NDArray[np.int64]]:
    """Return the places of tokens of pictures that stand next to each other."""
    places = np.flatnonzero(ids == image_token)
    runs: list[NDArray[np.int64]] = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    return runs


def patches_of(pixels: Mapping[str, Tensor], tokens: Sequence[int]) -> list[int] | None:
    """Return how many patches each of N pictures has by its grid, with so many tokens each; None if none says."""
    grid, values = pixels.get("image_grid_thw"), pixels.get("pixel_values")
    if grid is None or values is None:
        return None
    patches: list[int] = grid.prod(dim=1).tolist()
    return patches if _in_proportion(patches, tokens) and sum(patches) == len(values) else None


def _keys(picture: Mapping[str, Tensor], tokens: int) -> NDArray[np.int64]:
    digest = hashlib.blake2b(digest_size=64)
    for name, tensor in sorted(picture.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    words, places = np.frombuffer(digest.digest(), dtype=np.uint64), np.arange(tokens, dtype=np.uint64)
    mixed: Any = (words[places % np.uint64(len(words))] ^ (places * _ODD)) | _NEGATIVE
    keys: NDArray[np.int64] = mixed.view(np.int64)
    return keys


def _by_picture(pixels: Mapping[str, Tensor], tokens: Sequence[int]) -> list[dict[str, Tensor]] | None:
    """Return the inputs of each of N pictures, with so many tokens each; None if they cannot be told apart."""
    if set(pixels) == {"pixel_values", "image_grid_thw"}:
        if (patches := patches_of(pixels, tokens)) is None:
            return None
        both = zip(pixels["pixel_values"].split(patches), pixels["image_grid_thw"], strict=True)
        return [{"pixel_values": own, "image_grid_thw": grid} for own, grid in both]
    if any(len(tensor) != len(tokens) for tensor in pixels.values()) or len(set(tokens)) > 1:
        return None
    return [{name: tensor[number] for name, tensor in pixels.items()} for number in range(len(tokens))]


def _in_proportion(patches: Sequence[int], tokens: Sequence[int]) -> bool:
    """Whether each picture's tokens are the ones after those of the pictures before."""
    same = len(patches) == len(tokens)
    return same and all(one * tokens[0] == patches[0] * count for one, count in zip(patches, tokens, strict=True))
