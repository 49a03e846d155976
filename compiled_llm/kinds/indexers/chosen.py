"""Layers that read single tokens which an indexer chooses (DSA, in DeepSeek-V3.2); such kinds keep latents."""

# Shapes as in ``kinds/indexers/index_keys.py``.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compiled_llm.kinds.indexers.index_keys import Indexed, IndexedRows, with_index_sizes
from compiled_llm.kinds.kind import (
    Attended,
    AttentionCall,
    ForwardCache,
    Layer,
    LayerFunctions,
    LayerKind,
    SeenCall,
    Trial,
)
from compiled_llm.kinds.refusals import UnsupportedModelError
from compiled_llm.kinds.rows import Rows
from compiled_llm.kinds.spec import PageScales
from compiled_llm_ops.backends import ChosenBackend

INDEXED = "indexed_attention"
"""HuggingFace's type of a layer that takes a causal mask, for an indexer, and caches index keys."""

INDEXED_BEFORE = ("deepseek_sparse_attention", "qwen_sparse_attention")
"""The same type before transformers 5.18, where such layers cache expanded keys and values instead of latents."""


class IndexedCache:
    """A stand-in for HuggingFace's cache while a forward runs: takes index keys, too."""

    def __init__(self, memory: Any, rows: IndexedRows, index_pages: Mapping[int, Tensor]) -> None:
        """``memory`` takes what layers keep besides; ``index_pages`` are ``[P, S, I]`` of each layer that has some."""
        self._memory, self.rows, self._index_pages = memory, rows, index_pages
        self.update, self.taken = memory.update, memory.taken

    def update_indexer(self, keys: Tensor, layer_idx: int, *args: object, **kwargs: object) -> Tensor:
        """Take the index keys ``[B, q, I]`` of a layer's new tokens, and return those that its indexer may score."""
        return self.rows.extended(keys, self._index_pages[layer_idx])


@dataclass(frozen=True)
class ChosenTokens(Indexed):
    """Attention in which each query reads the tokens that an indexer has chosen for it alone."""

    name = "chosen"
    reads_shared_pages = False

    @classmethod
    def of(cls, seen: SeenCall, kind: LayerKind) -> LayerKind:
        return cls(kind) if isinstance(seen.arguments.get("indices"), Tensor) else kind

    @classmethod
    def compared(cls, model: PreTrainedModel, trial: Trial, layers: Sequence[Layer]) -> Sequence[Layer]:
        kinds = cls.layers_of(layers)
        for number, kind in kinds.items():
            if not kind.memory.reads_chosen:
                raise UnsupportedModelError(
                    f"{type(model).__name__}: attention layer {number} reads tokens that an indexer chooses, and "
                    "keeps keys and values; that exists for latents alone (multi-head latent attention), so it stays "
                    "usable unwrapped"
                )
        return with_index_sizes(model, trial, layers, kinds) if kinds else layers

    @classmethod
    def check(cls, model: PreTrainedModel, functions: LayerFunctions) -> None:
        if before := set(INDEXED_BEFORE).intersection(_layer_types(model)):
            raise UnsupportedModelError(
                f"{type(model).__name__} has layers of the type {before.pop()!r}, whose keys and values transformers "
                "caches expanded before 5.18, and pages hold latents: install transformers 5.18 or later"
            )

    @classmethod
    def trial_inputs(cls, model: PreTrainedModel, tokens: int) -> Mapping[str, Any]:
        if INDEXED not in _layer_types(model):
            return {}
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=model.device).tril()
        return {"attention_mask": mask[None, None]}

    @classmethod
    def forward_cache(cls, layers: Sequence[Layer]) -> Callable[[PreTrainedModel, Any], ForwardCache] | None:
        kinds = cls.layers_of(layers)
        if not kinds:
            return None
        memories = [layer._replace(kind=kinds[n].memory) if n in kinds else layer for n, layer in enumerate(layers)]
        beneath = type(next(iter(kinds.values())).memory).forward_cache(memories)
        assert beneath is not None, "kinds that read chosen tokens have one"

        def made(model: PreTrainedModel, batch: object) -> ForwardCache:
            rows, pages = cls.rows_of(model, batch, layers)
            return ForwardCache(IndexedCache(beneath(model, batch).cache, rows, pages), {"attention_mask": rows.mask()})

        return made

    @property
    def arguments(self) -> frozenset[str]:
        return self.memory.arguments | {"indices"}

    @property
    def reads_mask(self) -> bool:
        return True  # its indexer has read it

    def has_plan(self, chosen: ChosenBackend) -> bool:
        return False  # no plan knows what an indexer will choose

    def attend(self, rows: Rows, call: AttentionCall, pages: Tensor, scales: PageScales) -> Attended:
        if (indices := call.arguments.get("indices")) is not None:
            call = call._replace(chosen=positions_of(indices, call.cache.rows))
        return self.memory.attend(rows, call, pages, scales)


def positions_of(indices: Tensor, rows: IndexedRows) -> Tensor:
    """Return ``[T, n]`` int32, positions in each token's row, of places ``[1, T, n]`` or ``[B, q, n]`` among keys."""
    # Places that the mask hides become positions that the row does not have, or that come after the token.
    return indices.flatten(0, 1) - rows.first[:, None]


def _layer_types(model: PreTrainedModel) -> Sequence[str]:
    config = model.config
    return getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
