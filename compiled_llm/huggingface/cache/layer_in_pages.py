"""A user's ``DynamicCache`` whose newest tokens lie in pages, until someone looks at its layers."""

# So a loop of ``model(...)`` calls with one cache copies nothing from step to step, and whoever crops, reorders, copies
# or reads the cache finds HuggingFace's tensors. Shapes: B rows, C columns, K kv heads, D head dimension.

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from compiled_llm.compat.forks import lock
from compiled_llm.execution.threads.interrupts import deferred

if TYPE_CHECKING:
    from compiled_llm.huggingface.cache.paged_cache import PagedCache

CLASSES = (DynamicLayer, DynamicSlidingWindowLayer)  # those of layers that can be left in pages

_NO_LOOK = frozenset({"get_seq_length", "__class__"})  # what ``cache.get_seq_length()`` asks of a layer

_MOVING = lock()
_PLACE = "_compiled_llm_place"


class _InPages(NamedTuple):
    """The place of a layer's tokens, and the class of the layer in HuggingFace's code."""

    cache: PagedCache
    layer: int
    layer_class: type[DynamicLayer]


def put_in_pages(cache: DynamicCache, paged: PagedCache) -> None:
    """Leave to pages what ``paged`` has beyond a cache's own columns, until a layer is looked at or dropped."""
    if pages_of(cache) is paged:
        return
    if not cache.layers:
        cache.layers += [DynamicLayer() for _ in paged.layers]
    for index, layer in enumerate(cast("list[DynamicLayer]", cache.layers)):
        layer_class = type(layer)
        vars(layer)[_PLACE] = _InPages(paged, index, layer_class)
        object.__setattr__(layer, "__class__", _in_pages(layer_class))


def pages_of(cache: DynamicCache) -> PagedCache | None:
    """Return the pages that all layers of a cache lie in; None if some do not."""
    places = [_place_of(layer) for layer in cache.layers]
    paged = places[0].cache if places and places[0] is not None else None
    inside = (place is not None and place.cache is paged and place.layer == index for index, place in enumerate(places))
    return paged if all(inside) else None


def move_out(cache: Cache) -> None:
    """Give all layers of a cache HuggingFace's tensors again; the pages go back."""
    for layer in cache.layers:
        _move_out(layer)


@deferred()
def _move_out(layer: Any) -> None:
    with _MOVING:
        if (place := _place_of(layer)) is None:
            return
        keys, values = place.cache.copied(place.layer)
        members = object.__getattribute__(layer, "__dict__")
        before = dict(members)
        del members[_PLACE]
        object.__setattr__(layer, "__class__", place.layer_class)
        try:
            if (known := layer.get_seq_length()) < place.cache.seen:
                layer.update(keys[:, :, known:], values[:, :, known:])
        except BaseException:  # the device has no memory for them: they stay
            members.update(before)
            object.__setattr__(layer, "__class__", _in_pages(place.layer_class))
            raise


def _place_of(layer: object) -> _InPages | None:
    found: _InPages | None = object.__getattribute__(layer, "__dict__").get(_PLACE)
    return found


@functools.lru_cache(maxsize=len(CLASSES))
def _in_pages(layer_class: type[DynamicLayer]) -> type[DynamicLayer]:
    """Return the class that a layer has while its tokens lie in pages: the first look at it moves them out."""
    # It has the name of the layer's own, its only base, or a layer could not change from one to the other.

    def look(self: DynamicLayer, name: str) -> object:
        if name in _NO_LOOK:
            return object.__getattribute__(self, name)
        _move_out(self)
        return getattr(self, name)

    def change(self: DynamicLayer, name: str, value: object) -> None:
        _move_out(self)
        setattr(self, name, value)

    def get_seq_length(self: DynamicLayer) -> int:
        place = _place_of(self)
        return self.get_seq_length() if place is None else place.cache.seen  # another thread may have looked

    members = {
        "__module__": layer_class.__module__,
        "__getattribute__": look,
        "__setattr__": change,
        "get_seq_length": get_seq_length,
    }
    return type(layer_class.__name__, (layer_class,), members)
