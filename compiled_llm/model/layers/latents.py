"""Multi-head latent attention (MLA): layers that hand latents to HuggingFace's cache, and expand what it returns.

Pages hold the latents. New tokens are expanded by the layer itself; rows that have no others attend to those keys and
values. Of tokens in pages nothing is expanded: one half of the layer's up-projection is multiplied into the queries,
the other one into the results (DeepSeek-V2, https://arxiv.org/abs/2405.04434, calls that absorbed). Both halves are
views of the layer's own weight.

Shapes: B rows, T packed tokens, H query heads, N size of a key's part that is not rotated, E size of the rotated part,
V size of a value, R latent size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compiled_llm.model.layers.indexers import IndexedRows
from compiled_llm.model.refusals import UnsupportedModelError


class Expansion(NamedTuple):
    """How a layer makes keys and values of latents.

    Attributes:
        projection: name of the linear layer in the attention module; its weight is ``[H * (N + V), R]``.
        key: N.
        value: V.
    """

    projection: str
    key: int
    value: int

    def halves(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """Return views of the weight of an attention module: ``[H, N, R]`` and ``[H, V, R]``.

        UnsupportedModelError if it is no plain linear layer any more.
        """
        projection = module.get_submodule(self.projection)
        if type(projection) is not nn.Linear:
            raise UnsupportedModelError(
                f"{self.projection} of {type(module).__name__} has become a {type(projection).__name__}; keys and "
                "values lie in pages as latents, so it must stay an nn.Linear: merge adapters into its weight, or "
                "leave it out of them"
            )
        weight = projection.weight.unflatten(0, (-1, self.key + self.value))
        key, value = weight.split([self.key, self.value], dim=1)
        return key, value


class Latents:
    """In place of HuggingFace's cache while a forward runs: takes each layer's new latents, and hands out no others.

    Attributes:
        rows: where index keys lie; None if layers have no indexers.
    """

    def __init__(
        self,
        expansions: Sequence[Expansion | None],
        rows: IndexedRows | None = None,
        index_pages: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> None:
        """Make it for a forward.

        Args:
            expansions: of each layer; None of one without attention.
            rows: where index keys lie; None if layers have no indexers.
            index_pages: the pages ``[P, S, I]`` of each layer that has one.
        """
        self._expansions, self.rows, self._index_pages = expansions, rows, index_pages
        self._new: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, latent: Tensor, rope: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take ``[B, 1, q, R]`` and ``[B, 1, q, E]`` of a layer's new tokens; the layer may expand these alone."""
        self._new[layer_idx] = latent, rope
        return latent, rope

    def update_indexer(self, keys: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """Take the index keys ``[B, q, I]`` of a layer's new tokens, and return those that its indexer may score."""
        assert self.rows is not None, "only layers with indexers call it"
        return self.rows.extended(keys, self._index_pages[layer_idx])

    def chosen(self, indices: Tensor | None) -> Tensor | None:
        """Return ``[T, n]`` int32, the positions that queries read, of what an indexer has chosen; None for all."""
        return None if indices is None or self.rows is None else self.rows.chosen(indices)

    def taken(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return what ``update`` was given by a layer."""
        return self._new.pop(layer)

    def absorbed(self, module: nn.Module, layer: int, query: Tensor) -> Tensor:
        """Return ``[T, H, R + E]`` of queries ``[T, H, N + E]``, to be multiplied with latents."""
        weight, _ = self._halves(module, layer)
        plain, rope = query.split([weight.shape[1], query.shape[2] - weight.shape[1]], dim=-1)
        latent = torch.bmm(plain.transpose(0, 1), weight).transpose(0, 1)
        return torch.cat([latent, rope], dim=-1)

    def expanded(self, module: nn.Module, layer: int, out: Tensor) -> Tensor:
        """Return ``[T, H, V]`` of weighted latents ``[T, H, R]``."""
        _, weight = self._halves(module, layer)
        return torch.bmm(out.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)

    def _halves(self, module: nn.Module, layer: int) -> tuple[Tensor, Tensor]:
        expansion = self._expansions[layer]
        assert expansion is not None, "the layer attends"
        return expansion.halves(module)
