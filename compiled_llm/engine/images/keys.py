"""The keys by which a prefix cache knows the tokens of images: hashes of their pixels, and never their ids."""

# All tokens of images have one id, so that by ids two images of one size would be the same text. Shapes: T tokens
# of a prompt, N images.

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.engine.images.hashes import HASHES

_ODD = np.uint64(0x9E3779B97F4A7C15)
"""A multiple of it, by a token's place in its image, is part of the token's key."""
_NEGATIVE = np.uint64(1 << 63)
"""No token's id is negative, so no key is an id."""


def token_keys(
    ids: NDArray[np.int64], runs: Sequence[NDArray[np.int64]], digests: Sequence[bytes]
) -> NDArray[np.int64]:
    """Return ``[T]`` int64, a prompt's ids with a negative key in place of each token of an image.

    Args:
        ids: ``[T]`` int64.
        runs: the places of tokens of images.
        digests: as ``digests_of``.
    """
    keys: NDArray[np.int64] = ids.copy()
    for run, digest in zip(runs if len(digests) == len(runs) else [np.concatenate(runs)], digests, strict=True):
        keys[run] = _keys(digest, len(run))
    return keys


def digests_of(pixels: Mapping[str, Tensor], tokens: Sequence[int]) -> Iterator[bytes]:
    """Return a hash of 32 bytes of each image's pixels, or one of all where nothing tells images apart.

    Threads have begun to compute them by then.

    Args:
        pixels: the inputs that images are computed from.
        tokens: how many each of N images has.
    """
    images = _by_image(pixels, tokens)
    begun = [_begun(image) for image in ([dict(pixels)] if images is None else images)]
    return (_digest(parts) for parts in begun)


def runs_of(ids: NDArray[np.int64], image_token: int) -> list[NDArray[np.int64]]:
    """Return the places of tokens of images that stand next to each other."""
    places = np.flatnonzero(ids == image_token)
    runs: list[NDArray[np.int64]] = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    return runs


def patches_of(pixels: Mapping[str, Tensor], tokens: Sequence[int]) -> list[int] | None:
    """Return how many patches each of N images has by its grid, with so many tokens each; None if none says."""
    grid, values = pixels.get("image_grid_thw"), pixels.get("pixel_values")
    if grid is None or values is None:
        return None
    patches: list[int] = grid.prod(dim=1).tolist()
    return patches if _in_proportion(patches, tokens) and sum(patches) == len(values) else None


def _begun(image: Mapping[str, Tensor]) -> list[tuple[bytes, Iterator[bytes]]]:
    """Return what is hashed of each tensor: what it is, which tells how many hashes it has, and these."""
    return [
        (
            f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode(),
            HASHES.begun(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data),
        )
        for name, tensor in sorted(image.items())
    ]


def _digest(parts: Sequence[tuple[bytes, Iterator[bytes]]]) -> bytes:
    return hashlib.sha256(b"".join(part for what, hashes in parts for part in (what, *hashes))).digest()


def _keys(digest: bytes, tokens: int) -> NDArray[np.int64]:
    words, places = np.frombuffer(digest, dtype=np.uint64), np.arange(tokens, dtype=np.uint64)
    mixed: NDArray[np.uint64] = (words[places % np.uint64(len(words))] ^ (places * _ODD)) | _NEGATIVE
    keys: NDArray[np.int64] = mixed.view(np.int64)
    return keys


def _by_image(pixels: Mapping[str, Tensor], tokens: Sequence[int]) -> list[dict[str, Tensor]] | None:
    """Return the inputs of each of N images, with so many tokens each; None if they cannot be told apart."""
    if set(pixels) == {"pixel_values", "image_grid_thw"}:
        if (patches := patches_of(pixels, tokens)) is None:
            return None
        both = zip(pixels["pixel_values"].split(patches), pixels["image_grid_thw"], strict=True)
        return [{"pixel_values": own, "image_grid_thw": grid} for own, grid in both]
    if any(len(tensor) != len(tokens) for tensor in pixels.values()) or len(set(tokens)) > 1:
        return None
    return [{name: tensor[number] for name, tensor in pixels.items()} for number in range(len(tokens))]


def _in_proportion(patches: Sequence[int], tokens: Sequence[int]) -> bool:
    """Whether each image's tokens are the ones after those of the images before."""
    same = len(patches) == len(tokens)
    return same and all(one * tokens[0] == patches[0] * count for one, count in zip(patches, tokens, strict=True))
