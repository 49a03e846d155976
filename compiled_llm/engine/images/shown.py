"""The tokens of images in a chunk of a prompt, as an encoder's features."""

# Shapes: Q tokens of a chunk, T of a launch, K of them of images, N tokens of images that have features, A axes of
# positions, F layers with features of their own, C hidden size.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.compilation.program import Program
from compiled_llm.compilation.programs import Programs
from compiled_llm.engine.images.shown_step import PROGRAM, ShownInputs, deep_forward
from compiled_llm.execution.batch import Extension
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.prefill.picked import picked
from compiled_llm.execution.state.staging import Staging
from compiled_llm.model.facts import Forward, ModelFacts, with_kinds

AXES = 3
"""Of positions that the language layers of Qwen-VL read: of time, of rows and of columns."""
_deep_forwards: WeakKeyDictionary[Programs, Forward] = WeakKeyDictionary()
"""By the programs that are traced with them, each of which guards that it stays the same."""


class ShownTokens(NamedTuple):
    """The extra inputs of a chunk."""

    positions: NDArray[np.int64]  # ``[A, Q]``, rotary positions
    places: NDArray[np.int64]  # ``[K]`` ascending, which of the Q tokens are those of images
    features: Tensor  # ``[1 + F, N, C]`` in the model's dtype, the last layer's first
    numbers: NDArray[np.int64]  # ``[K]`` ascending, where these tokens are in ``features``
    forward: Forward | None  # takes those of further layers; None without them

    @property
    def program(self) -> Program:
        """That of all chunks with images."""
        return PROGRAM

    @property
    def captured(self) -> bool:
        """They come as often as text."""
        return True

    def slice(self, start: int, stop: int) -> ShownTokens:
        """Return that of tokens ``start`` to ``stop``."""
        first, last = np.searchsorted(self.places, (start, stop)).tolist()
        places, numbers = self.places[first:last] - start, self.numbers[first:last]
        return ShownTokens(self.positions[:, start:stop], places, self.features, numbers, self.forward)

    def empty(self) -> ShownTokens:
        """Return that of no tokens."""
        features = self.features.new_empty(len(self.features), 0, self.features.shape[2])
        none = np.zeros(0, dtype=np.int64)
        return ShownTokens(self.positions[:, :0].copy(), none, features, none, self.forward)

    def pack(self, chunk: Sequence[Extension], staging: Staging) -> ShownInputs:
        """Return what the step reads of packed rows, some of which have images."""
        counts = [len(extension.ids) for extension in chunk]
        starts, tokens = np.cumsum([0, *counts[:-1]]), sum(counts)
        shown = [
            (start, own.extra) for start, own in zip(starts, chunk, strict=True) if isinstance(own.extra, ShownTokens)
        ]
        places = np.concatenate([start + own.places for start, own in shown] or [self.places[:0]])
        mask = np.zeros(tokens, dtype=bool)
        mask[places] = True
        positions = np.concatenate([_positions_of(own) for own in chunk], axis=1)
        device_places, flags, axes = staging.to_device([places, mask, np.ascontiguousarray(positions).reshape(-1)])
        features = picked([(own.features, own.numbers) for _, own in shown], 1, staging)
        joined = torch.cat(features or [self.features[:, :0]], dim=1)
        last, *others = (_spread(one, device_places, tokens) for one in (joined[:1], joined[1:]) if len(one))
        deep = others[0] if others else None
        return ShownInputs(last[0], flags, axes.view(AXES, tokens), deep, self.forward)


def forward_for(model_runner: ModelRunner, facts: ModelFacts) -> Forward:
    """Return the forward of a model that takes features of several layers; the same one for the same programs."""
    programs = model_runner.graph_manager.programs
    if (known := _deep_forwards.get(programs)) is None:
        known = _deep_forwards[programs] = with_kinds(deep_forward, facts.layers, facts.cache_argument)
    return known


def nothing_shown(model_runner: ModelRunner, facts: ModelFacts) -> ShownTokens:
    """Return what no tokens of a model show: a program is compiled with it."""
    config = facts.model.config
    deep = len(getattr(config.vision_config, "deepstack_visual_indexes", ()))
    width, none = config.get_text_config(decoder=True).hidden_size, np.zeros(0, dtype=np.int64)
    features = torch.zeros(1 + deep, 0, width, dtype=facts.model.dtype, device=model_runner.device)
    forward = forward_for(model_runner, facts) if deep else None
    return ShownTokens(np.zeros((AXES, 0), dtype=np.int64), none, features, none, forward)


def _spread(features: Tensor, places: Tensor, tokens: int) -> Tensor:
    """Return features ``[F, K, C]`` at their places among so many tokens, ``[F, T, C]``, and zeros at others."""
    return features.new_zeros(len(features), tokens, features.shape[2]).index_copy_(1, places, features)


def _positions_of(extension: Extension) -> NDArray[np.int64]:
    if isinstance(extension.extra, ShownTokens):
        return extension.extra.positions
    return np.broadcast_to(extension.positions, (AXES, len(extension.positions)))
