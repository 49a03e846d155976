"""A kind of layer: how it is found, what it keeps of each token, how it attends, and what others may ask of it."""

# Shapes: T packed tokens (decode: q of each row), H query heads, D head dimension.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from compiled_llm.kinds.rows import Rows
from compiled_llm.kinds.spec import UNSCALED, KVCacheSpec, PageScales, StateSpec
from compiled_llm_ops import Geometry
from compiled_llm_ops.backends import ChosenBackend
from compiled_llm_ops.protocol import Backend

if TYPE_CHECKING:
    from transformers import PretrainedConfig

States = tuple[Tensor, Tensor, Tensor]
"""The packed queries, keys and values of new tokens."""

Options = tuple[float, int, float]
"""Scale, window and cap."""

Attended = tuple[Tensor, Tensor | None]
"""``[T, H, D]`` and, if it is wanted, ``[T, H]`` float32, the log-sum-exp of the logits in base 2."""

LayerFunctions = Mapping[str, Sequence[int] | str]
"""The layers that each function of logits is for, by its name; ``"all"`` for all."""


Trial = Callable[..., None]
"""A trial forward of a model that is not wrapped, which fills a cache of HuggingFace's: ``trial(cache, ...)``."""
# ``attend``, in place of attention, takes a module, and its query, key, value and mask; if ``fake``, nothing has
# memory.


Expands = Callable[[Sequence[int], Sequence[int]], bool]
"""Whether rows with so many new tokens, and so many in all, are faster by attending to what is expanded of these."""


class AttentionCall(NamedTuple):
    """A layer's call of its attention function."""

    module: nn.Module  # that calls
    layer: int  # its number
    states: States
    options: Options
    wants_lse: bool  # whether the log-sum-exp is asked for
    arguments: Mapping[str, Any]  # further ones of the call, by name
    cache: Any = None  # what stands in for HuggingFace's cache in this forward; None if nothing does
    # ``[T, n]`` int32, the positions that each query reads, where a kind lets it; None for all
    chosen: Tensor | None = None

    def by(self, op: Callable[..., Tensor], with_lse: Callable[..., Attended], arguments: Sequence[Any]) -> Attended:
        """Attend by an op, or its twin with the log-sum-exp if that is asked for."""
        return with_lse(*arguments) if self.wants_lse else (op(*arguments), None)


class SeenCall(NamedTuple):
    """A layer's call of attention in a trial forward; queries, keys and values are HuggingFace's."""

    module: nn.Module
    number: int  # of the layer
    query: Tensor
    key: Tensor
    value: Tensor
    arguments: Mapping[str, Any]  # further ones of the call, by name
    sinks: bool  # whether it has attention sinks
    functions: LayerFunctions  # of logits, by which some layers of the model attend


class ForwardCache(NamedTuple):
    """What takes the place of HuggingFace's cache in a forward, and further arguments of that."""

    cache: Any
    inputs: Mapping[str, Any] = {}


class ScoreSizes(Protocol):
    """What choosing tokens takes in a layer beside the pages, while a step runs, as ``IndexScores`` says it."""

    @property
    def chosen(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def of_one_row(self) -> bool: ...
    def keys(self, pages: int, page_size: int) -> int: ...
    def nbytes(self, queries: int, keys: int, rows: int = 1) -> int: ...


class Codec(NamedTuple):
    """The way keys and values are stored, if not in the model's dtype."""

    dtype: torch.dtype  # of pages
    largest: float  # number that is stored
    capability: tuple[int, int]  # compute capability from which on kernels read and write it
    # the spec of a layer, of that of one with pages of the model's dtype, of scales, and of the dtype
    coded: Callable[[Any, PageScales, torch.dtype], KVCacheSpec]


class Paging(NamedTuple):
    """The way pages are laid out."""

    page_size: int  # S
    dtype: torch.dtype  # of the model
    backend: Backend  # attends, and says which head sizes pages must have
    codec: Codec | None = None  # of all layers' pages; None if they are of the model's dtype
    scales: PageScales = UNSCALED  # of the layer


@dataclass(frozen=True)
class LayerKind:
    """A kind of layer, with what is known of a layer besides its geometry."""

    name: ClassVar[str]  # in the table of what works with it
    attends: ClassVar[bool] = True  # whether it has attention; without, nothing else is said of a layer
    own_cache_layers: ClassVar[bool] = False  # whether HuggingFace's caches have layers of a type of their own for it
    reads_shared_pages: ClassVar[bool] = True  # whether pages that rows share can be read once
    reads_chosen: ClassVar[bool] = False  # whether it attends to chosen tokens alone, if a call has some

    @property
    def names(self) -> frozenset[str]:
        """Its name, and those of kinds beneath."""
        return frozenset((self.name,))

    # ---- how it is found

    @classmethod
    def of(cls, seen: SeenCall, kind: LayerKind) -> LayerKind:
        """Return the kind that a call of attention shows; ``kind`` is what kinds before have found."""
        return kind

    @classmethod
    def compared(cls, model: PreTrainedModel, trial: Trial, layers: Sequence[Layer]) -> Sequence[Layer]:
        """Return the layers as HuggingFace's cache shows what they keep."""
        return layers

    @classmethod
    def check(cls, model: PreTrainedModel, functions: LayerFunctions) -> None:
        """Raise UnsupportedModelError if this version of transformers, or the options, do not fit a model."""

    @classmethod
    def meanings(cls, functions: LayerFunctions) -> Mapping[str, Any]:
        """Return what code is compiled for besides names of functions, each under a name for messages."""
        return {}

    @classmethod
    def trial_inputs(cls, model: PreTrainedModel, tokens: int) -> Mapping[str, Any]:
        """Return what a trial forward of so many tokens needs besides."""
        return {}

    def keeping(self, kind: LayerKind) -> LayerKind:
        """Return the kind of a layer of this one that keeps what another does."""
        return kind

    @property
    def arguments(self) -> frozenset[str]:
        """Tensors that it takes from calls of attention."""
        return frozenset()

    @property
    def reads_mask(self) -> bool:
        """Whether a mask that attention is given has been read before."""
        return False

    def is_cached_in(self, layer: object) -> bool:
        """Whether a layer of HuggingFace's dynamic cache is of the type that holds what it keeps."""
        return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)

    # ---- what it keeps

    def spec(self, layer: Layer, paging: Paging) -> KVCacheSpec:
        raise NotImplementedError

    @property
    def beside(self) -> int | None:
        """Size of a vector that it keeps of each token in a further memory, after those of all layers; None without."""
        return None

    def unpaged(self, layer: Layer, tokens: int) -> tuple[int, ...] | None:
        """Return the shape of what new rows of so many tokens leave outside of pages; None if they need pages."""
        return None

    @property
    def value_head_dim(self) -> int | None:
        """Head size of the values that are kept; None if it is that of the keys."""
        return None

    @property
    def together(self) -> int:
        """How many tokens an indexer chooses together."""
        return 1

    def is_whole_in(self, layer: CacheLayerMixin) -> bool:
        """Whether a layer of HuggingFace's cache, of its own type, holds all that it keeps."""
        return True

    # ---- how it attends

    @classmethod
    def forward_cache(cls, layers: Sequence[Layer]) -> Callable[[PreTrainedModel, Any], ForwardCache] | None:
        """Return what makes a stand-in for HuggingFace's cache, of a model and its ``PagedBatch``; None if none is."""
        return None

    def attend(self, rows: Rows, call: AttentionCall, pages: Tensor, scales: PageScales) -> Attended:
        """Write the new keys and values into a layer's pages, and attend over all tokens of their rows."""
        raise NotImplementedError

    def has_plan(self, chosen: ChosenBackend) -> bool:
        """Whether it attends by a backend's plan."""
        return True

    def is_faster_by_plan(self, layer: Layer) -> bool:
        """Whether plans of FlashInfer's are faster than what ``"auto"`` has on CUDA."""
        return False

    def missing_kernel(self, chosen: ChosenBackend, layer: Layer, geometry: Geometry, device: str) -> str | None:
        """Return why a backend has no kernels for a layer of these sizes; None if it has."""
        return chosen.backend.missing_kernel(geometry)

    def expands(self, layer: Layer, on_cpu: bool) -> Expands | None:
        """Return when rows attend to what the layer expands of their new tokens; None if they never do."""
        return None

    @property
    def function(self) -> str:
        """The key of a user's function in place of softmax attention; empty if there is none."""
        return ""

    def scores(self, config: PretrainedConfig, dtype: torch.dtype) -> ScoreSizes | None:
        """Return the sizes that the memory of an indexer's scores follows from, by the text config; None without."""
        return None


@dataclass(frozen=True)
class KindOver(LayerKind):
    """A kind that keeps what another one does, and attends over it in its own way."""

    memory: LayerKind  # the other

    @property
    def names(self) -> frozenset[str]:
        return self.memory.names | {self.name}

    def keeping(self, kind: LayerKind) -> LayerKind:
        return replace(self, memory=self.memory.keeping(kind))

    @property
    def arguments(self) -> frozenset[str]:
        return self.memory.arguments

    @property
    def reads_mask(self) -> bool:
        return self.memory.reads_mask

    def is_cached_in(self, layer: object) -> bool:
        return self.memory.is_cached_in(layer)

    def spec(self, layer: Layer, paging: Paging) -> KVCacheSpec:
        return self.memory.spec(layer, paging)

    @property
    def value_head_dim(self) -> int | None:
        return self.memory.value_head_dim

    def missing_kernel(self, chosen: ChosenBackend, layer: Layer, geometry: Geometry, device: str) -> str | None:
        return self.memory.missing_kernel(chosen, layer, geometry, device)


class Layer(NamedTuple):
    """A layer: its geometry, its kind, and its states."""

    query_heads: int  # how many
    kv_heads: int  # how many are kept of each token
    head_dim: int  # of the keys, as they are kept
    window_left: int  # tokens visible to the left of a query; -1 for all
    logits_soft_cap: float  # cap on the logits; 0.0 for none
    kind: LayerKind  # tells what is kept, and how it attends
    states: tuple[StateSpec, ...] = ()  # what rows keep of it besides pages
    causal: bool = True  # whether no token of a prompt sees a later one of it
    keys_of: int | None = None  # the earlier layer whose keys and values it attends over; None if it has its own

    @property
    def fills_caches(self) -> bool:
        """Whether HuggingFace's caches keep keys and values of it."""
        return self.kind.attends and self.keys_of is None

    def visible(self, positions: int) -> int:
        """Return how many of ``positions`` tokens the last one sees, itself included."""
        return positions if self.window_left < 0 else min(positions, self.window_left + 1)


def owners_of_keys(layers: Sequence[Layer]) -> list[int]:
    """Return for each layer the one whose keys and values it attends over: itself, or an earlier one."""
    return [number if layer.keys_of is None else layer.keys_of for number, layer in enumerate(layers)]


def places_beside(layers: Sequence[Layer]) -> dict[int, int]:
    """Return the layers with a further memory, and the place of each one's after the memories of all layers."""
    beside = [number for number, layer in enumerate(layers) if layer.kind.beside is not None]
    return {number: place for place, number in enumerate(beside, len(layers))}


def attended_like(query: Tensor, value: Tensor) -> Tensor:
    """Return zeros of the shape that attention has: ``[B, T, H, D]``, D that of the values."""
    rows, heads, tokens, _ = query.shape
    return query.new_zeros((rows, tokens, heads, value.shape[-1]))
