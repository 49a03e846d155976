"""The images of one prompt as its chunks show them to steps: encoded as they are reached, cut as chunks are."""

# Shapes: T tokens of the prompt, Q of a chunk, K of an image, A axes of positions, F layers with features of their
# own, C hidden size.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.engine.images.encoder.compiled_encoder import own_encoder
from compiled_llm.engine.images.encoder_cache import EncoderCache
from compiled_llm.engine.images.prompt_encoder import PromptEncoder
from compiled_llm.engine.images.shown import AXES, ShownTokens, forward_for
from compiled_llm.execution.batch import Extension
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.model.facts import ModelFacts


class ShownPrompt:
    """What chunks of a prompt show."""

    def __init__(
        self, facts: ModelFacts, positions: Tensor, runs: Sequence[NDArray[np.int64]], encoder: PromptEncoder
    ) -> None:
        """``positions`` are ``[A, 1, T]``, or with those of text before; ``runs`` are the places of each image."""
        self._facts, self._runs, self._encoder = facts, runs, encoder
        self._axes: NDArray[np.int64] = positions[-AXES:, 0].cpu().numpy()
        self._features: dict[int, Tensor] = {}  # ``[1 + F, K, C]`` of images that chunks have begun to show
        self._generation = -1  # of the cache, in which they were computed

    def showing(self, extension: Extension, model_runner: ModelRunner) -> Extension:
        """Return a chunk with what it shows; called in the model's executor."""
        start, count = extension.row.exact_length, len(extension.ids)
        touched = [number for number, run in enumerate(self._runs) if run[0] < start + count and run[-1] >= start]
        if not touched:  # text has one position, and its id
            return extension
        axes = np.broadcast_to(extension.positions, (AXES, count)).copy()
        own = self._axes[:, start : start + count]
        axes[:, : own.shape[1]] = own
        self._encode(touched, model_runner)
        inside = [np.searchsorted(self._runs[number], (start, start + count)).tolist() for number in touched]
        both = [*zip(touched, inside, strict=True)]
        places = np.concatenate([self._runs[number][first:last] - start for number, (first, last) in both])
        features = torch.cat([self._features[number][:, first:last] for number, (first, last) in both], dim=1)
        for number, (_, last) in both:
            if last == len(self._runs[number]):
                del self._features[number]
        forward = forward_for(model_runner, self._facts) if len(features) > 1 else None
        return extension._replace(extra=ShownTokens(axes, places, features, np.arange(len(places)), forward))

    def _encode(self, numbers: Sequence[int], model_runner: ModelRunner) -> None:
        cache = EncoderCache.of(model_runner)
        if cache.generation != self._generation:  # the weights are others now, or were elsewhere meanwhile
            self._features.clear()
            self._generation = cache.generation
        model = self._facts.model
        if missing := [number for number in numbers if number not in self._features]:
            with torch.no_grad(), self._facts.attention.original():
                found = self._encoder.features(model, missing, cache, own_encoder(model, model_runner))
            self._features.update(zip(missing, found, strict=True))
