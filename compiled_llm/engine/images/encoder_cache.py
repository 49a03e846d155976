"""What encoders have made of images, by hashes of their pixels: an image that comes again is not computed again."""

# The prefix cache has an image after the same text, while its pages are there; this has it after any other text, too.

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor
from transformers.utils.generic import ModelOutput

from compiled_llm.compat.forks import lock
from compiled_llm.engine.encoder_cache_stats import EncoderCacheStats
from compiled_llm.execution.model_runner import ModelRunner

_NAME = "encoder_cache"
"""In ``stats().memory``, and in the engine's ``stats()``."""


class Features(NamedTuple):
    """What an encoder returned for one image, or for all of a prompt."""

    kind: type[ModelOutput]  # the class of it
    fields: dict[str, Any]  # tensors, and lists of them

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in _tensors(self.fields.values()))


class EncoderCache:
    """Features of images on the model's device; the least recently used go first.

    Attributes:
        nbytes: what they take.
        queries: how often one was looked for.
        hits: how often one was found.
        generation: how often it was cleared; what was computed in an earlier one is not kept.
    """

    def __init__(self) -> None:
        self.nbytes = self.queries = self.hits = self.generation = 0
        self._kept: OrderedDict[Hashable, Features] = OrderedDict()
        self._lock = lock()  # it is cleared by any thread

    @classmethod
    def of(cls, model_runner: ModelRunner) -> EncoderCache:
        """Return that of a model; it is cleared together with the texts that engines keep."""
        if (cache := model_runner.parts.get(_NAME)) is None:
            cache = model_runner.parts[_NAME] = cls()
            model_runner.prefixes.cleared.append(cache.clear)
        return cache

    def get(self, key: Hashable) -> Features | None:
        with self._lock:
            self.queries += 1
            if (features := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                self.hits += 1
            return features

    def put(self, key: Hashable, features: Features, limit: int, generation: int) -> None:
        """Keep what was computed in a generation, with ``limit`` bytes of all at most."""
        with self._lock:
            if generation != self.generation or key in self._kept or features.nbytes > limit:
                return
            self._kept[key] = features
            self.nbytes += features.nbytes
            while self.nbytes > limit:
                _, oldest = self._kept.popitem(last=False)
                self.nbytes -= oldest.nbytes

    @property
    def stats(self) -> EncoderCacheStats:
        """Its counts."""
        return EncoderCacheStats(self.queries, self.hits, self.nbytes)

    def clear(self) -> None:
        """Forget all, since the model's weights have changed, or its memory is wanted."""
        with self._lock:
            self._kept.clear()
            self.nbytes = 0
            self.generation += 1


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
