"""What an encoder reads of the grids of its images, as host arrays, and padded to more tokens."""

# Shapes: N images, T tokens, M patches that become one, P = T * M patches, S segments, W windows, n patches of a
# grid of learned positions that one of an image lies between.

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.compat.images.vision_encoders import VisionEncoder, of_grid, window_patches


class GridInputs(NamedTuple):
    """Of some images, by token."""

    places: NDArray[np.int64]  # ``[T, M, 2]``, the row and the column of each patch
    starts: NDArray[np.int32]  # ``[S + 1]``, where the patches of each image begin
    near: NDArray[np.int64] | None  # ``[T, M, n]``, learned positions that a patch lies between; None without
    weights: NDArray[np.float32] | None  # ``[T, M, n]``, how near each is
    order: NDArray[np.int64] | None  # ``[T]``, the tokens window by window; None without windows
    window_starts: NDArray[np.int32] | None  # ``[W + 1]``, where the patches of each window begin

    @classmethod
    def of(cls, encoder: VisionEncoder, grid: Tensor) -> GridInputs:
        """Return those of images with a grid ``[N, 3]`` on the CPU, as HuggingFace computes them."""
        read = {name: tensor.numpy() for name, tensor in of_grid(encoder, grid).items()}
        patches = encoder.spatial_merge_size**2

        for name in {"position_ids", "interp_indices", "interp_weights"} & read.keys():
            read[name] = read[name].reshape(-1, patches, read[name].shape[-1])
        return cls(
            read["position_ids"],
            read["cu_seqlens"],
            read.get("interp_indices"),
            read.get("interp_weights"),
            read.get("window_index"),
            read.get("cu_window_seqlens"),
        )

    @property
    def tokens(self) -> int:
        return len(self.places)

    def padded(self, encoder: VisionEncoder, tokens: int, images: int = 0) -> GridInputs:
        """Return those of T ``tokens`` or more: what is added is an image of its own, which nobody reads.

        Args:
            images: how many there are to be besides that one, empty ones among them, and with as many windows as
                tokens; 0 for no more than needed.
        """
        missing, patches, windows = tokens - self.tokens, self.places.shape[1], window_patches(encoder)
        if not (missing or images):
            return self
        end = tokens * patches
        starts, window_starts = _with_end(self.starts, end), self.window_starts
        if window_starts is not None:
            whole = np.arange(self.tokens * patches + windows, end, windows, dtype=np.int32)
            window_starts = _with_end(np.concatenate([window_starts, whole]), end)
            window_starts = _with_empty(window_starts, tokens if images else 0)
        return GridInputs(
            _longer(self.places, tokens),
            _with_empty(starts, images and images + 1),
            None if self.near is None else _longer(self.near, tokens),
            None if self.weights is None else _longer(self.weights, tokens),
            None if self.order is None else np.concatenate([self.order, np.arange(self.tokens, tokens)]),
            window_starts,
        )


def _longer(array: NDArray[Any], tokens: int) -> NDArray[Any]:
    """Return an array ``[T, ...]`` with zeros after it."""
    more = np.zeros((tokens - len(array), *array.shape[1:]), dtype=array.dtype)
    return np.concatenate([array, more])


def _with_end(starts: NDArray[np.int32], end: int) -> NDArray[np.int32]:
    """Return starts to which one more is added, unless they end there."""
    return starts if starts[-1] == end else np.append(starts, np.int32(end))


def _with_empty(starts: NDArray[np.int32], segments: int) -> NDArray[np.int32]:
    """Return starts of so many segments, if they are of fewer: those at the end are empty."""
    return np.concatenate([starts, np.repeat(starts[-1:], max(0, segments + 1 - len(starts)))])
