"""Finds layers that keep latents in HuggingFace's cache, and how they expand them: by what they do, not by their names.

A layer is compared with what HuggingFace's cache keeps of a token. If that is something else than the keys and values
that its attention gets, the one linear layer that reads the latents must be all that stands between them.

Shapes: T tokens, H heads, N size of a key's part that is not rotated, E size of the rotated part, V size of a value, R
latent size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, PreTrainedModel

from compiled_llm.compat.cache_names import cache_argument
from compiled_llm.compat.huggingface import index_keys
from compiled_llm.compat.torch.tensors import fake_linear
from compiled_llm.model.inputs import vocabulary_of
from compiled_llm.model.layer_probe import Layer, attended_like, trial_forward
from compiled_llm.model.layers.latents import Expansion
from compiled_llm.model.probes.observing import observed
from compiled_llm.model.refusals import UnsupportedModelError


def with_latents(model: PreTrainedModel, layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers as they are kept: those of multi-head latent attention with the sizes of their latents.

    UnsupportedModelError if the cache keeps something that is neither keys and values nor such latents.
    """
    # Expanded latents are keys and values of all heads.
    attending = [layer for layer in layers if layer.attends]
    if all(layer.kv_heads < layer.query_heads and layer.value_head_dim is None for layer in attending):
        return _with_choices(model, layers)
    try:
        found = _Expansions.of(model, layers, fake=True)
    except UnsupportedModelError:
        raise
    except Exception:  # a forward that looks at numbers does not take fake tensors
        found = _Expansions.of(model, layers, fake=False)
    latent = [number for number, layer in enumerate(found) if layer.expansion is not None]
    if latent and len(latent) < len(attending):
        raise UnsupportedModelError(
            f"{type(model).__name__}: attention layer {latent[0]} keeps latents in HuggingFace's cache, and others "
            "keep keys and values; pages hold the same of all layers, so it stays usable unwrapped"
        )
    if latent:
        _ExpansionCheck.check(model, found[latent[0]])
    return _with_choices(model, found)


def _with_choices(model: PreTrainedModel, layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers, those that choose blocks with the size of their index keys."""
    blocks = [number for number, layer in enumerate(layers) if layer.block_size is not None]
    for number, layer in enumerate(layers):
        if layer.chooses and layer.expansion is None and layer.block_size is None:
            raise UnsupportedModelError(
                f"{type(model).__name__}: attention layer {number} reads tokens that an indexer chooses, and keeps "
                "keys and values; that exists for latents alone (multi-head latent attention), so it stays usable "
                "unwrapped"
            )
    if not blocks:
        return [*layers]
    cache = DynamicCache(config=model.config)
    _forward_over(model, cache)
    found = [*layers]
    for number in blocks:
        keys = index_keys(cache.layers[number])
        if keys is None:
            raise UnsupportedModelError(
                f"{type(model).__name__}: attention layer {number} reads blocks of tokens, and HuggingFace's cache "
                "keeps no keys by which they are chosen; it stays usable unwrapped"
            )
        found[number] = layers[number]._replace(index_size=keys.shape[-1])
    return found


def _forward_over(model: PreTrainedModel, cache: DynamicCache, fake: bool = False, **inputs: Any) -> None:
    """Run a trial forward that fills a cache."""
    trial_forward(model, fake, lambda: {cache_argument(type(model).forward): cache}, use_cache=True, **inputs)


class _WatchedCache(DynamicCache):
    """HuggingFace's cache, which remembers the tensors that it last returned, by layer."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(config=model.config)
        self.returned: dict[int, tuple[Tensor, Tensor]] = {}
        self.index_sizes: dict[int, int] = {}

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        layer = kwargs["layer_idx"] if "layer_idx" in kwargs else args[2]
        keys, values = super().update(*args, **kwargs)
        self.returned[int(layer)] = keys, values
        return keys, values

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        self.index_sizes[layer_idx] = indexer_key_states.shape[-1]
        states: Tensor = super().update_indexer(indexer_key_states, layer_idx)
        return states


class _Expansions(TorchFunctionMode):
    """Watches a forward: what each layer keeps, and which weights read it."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[Layer]) -> None:
        super().__init__()
        self._name = type(model).__name__
        self._cache = _WatchedCache(model)
        self._layers = layers
        self._read: list[tuple[Tensor, Any]] = []
        self.found = [*layers]

    @classmethod
    def of(cls, model: PreTrainedModel, layers: Sequence[Layer], fake: bool) -> list[Layer]:
        watch = cls(model, layers)
        with observed(model, watch), watch:
            _forward_over(model, watch._cache, fake)
        return watch.found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is nn.functional.linear:
            self._read.append((args[0] if args else given["input"], (*args[1:], *given.values())))
            if (made := fake_linear(*args, **given)) is not None:
                return made
        return func(*args, **given)

    def mask(self, arguments: dict[str, Any]) -> None: ...

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        number = int(module.layer_idx)  # type: ignore[arg-type]
        kept = self._cache.returned.get(number)
        if kept is not None and _form(kept) != _form((key, value)):
            self.found[number] = self._latent(module, number, kept, key, value)
        self._read.clear()
        return attended_like(query, value)

    def _latent(self, module: nn.Module, number: int, kept: tuple[Tensor, Tensor], key: Tensor, value: Tensor) -> Layer:
        layer, (latent, rope) = self._layers[number], kept
        rank, size = latent.shape[-1], rope.shape[-1]
        expanded = key.shape[-1] - size + value.shape[-1]
        weights = [weights for read, weights in self._read if read is latent]
        keeps = f"{self._name}: attention layer {number} keeps something else than keys and values in its cache"
        one_head = latent.shape[1] == rope.shape[1] == 1
        if not (one_head and 0 < size < key.shape[-1] and layer.query_heads == layer.kv_heads):
            raise UnsupportedModelError(
                f"{keeps}, of sizes {tuple(latent.shape[1:])} and {tuple(rope.shape[1:])}, and that is no latent with "
                "a rotated part (multi-head latent attention); it stays usable unwrapped"
            )
        names = [name for name, weight in module.named_parameters() if any(weight is own[0] for own in weights)]
        plain = (
            len(weights) == len(names) == 1
            and names[0].endswith(".weight")
            and type(module.get_submodule(names[0].rpartition(".")[0])) is nn.Linear
            and all(other is None for other in weights[0][1:])
            and weights[0][0].shape == (layer.query_heads * expanded, rank)
        )
        if not plain:
            raise UnsupportedModelError(
                f"{keeps}, latents of size {rank} and {size}, which it expands by something else than one nn.Linear "
                "without bias, quantisation or adapter; that cannot be multiplied into queries and results, so it "
                "stays usable unwrapped (merge adapters, or leave this projection unquantised)"
            )
        expansion = Expansion(names[0].rpartition(".")[0], key.shape[-1] - size, value.shape[-1])
        index_size = self._cache.index_sizes.get(number)
        return layer._replace(
            kv_heads=1, head_dim=rank, value_head_dim=size, expansion=expansion, index_size=index_size
        )


def _form(states: tuple[Tensor, Tensor]) -> tuple[tuple[int, int], ...]:
    """Heads and head sizes."""
    return tuple((own.shape[1], own.shape[3]) for own in states)


class _Compared(Exception):  # noqa: N818
    """The first layer was compared; the rest of the forward is not needed."""


class _ExpansionCheck:
    """Compares the first layer's keys and values with what its weight's halves make of the latents."""

    def __init__(self, model: PreTrainedModel, layer: Layer) -> None:
        self._name, self._layer, self.cache = type(model).__name__, layer, _WatchedCache(model)

    @classmethod
    def check(cls, model: PreTrainedModel, layer: Layer) -> None:
        """Raise UnsupportedModelError if they differ."""
        checked = cls(model, layer)
        with observed(model, checked), suppress(_Compared):
            ids = torch.arange(2, 6, device=model.device)[None] % vocabulary_of(model)  # padding may be zeros
            _forward_over(model, checked.cache, input_ids=ids)

    def mask(self, arguments: dict[str, Any]) -> None: ...

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        expansion, (latent, rope) = self._layer.expansion, self.cache.returned[int(module.layer_idx)]  # type: ignore[arg-type]
        assert expansion is not None
        halves = expansion.halves(module)
        plain, values = (torch.matmul(latent.float(), half.float().transpose(1, 2)) for half in halves)
        keys = torch.cat([plain, rope.float().expand(-1, plain.shape[1], -1, -1)], dim=-1)
        close = 1e-4 if key.dtype in (torch.float32, torch.float64) else 3e-2
        for name, made, expected in (("keys", key, keys), ("values", value, values)):
            if not torch.allclose(made.float(), expected, rtol=close, atol=close * float(expected.abs().max())):
                raise UnsupportedModelError(
                    f"{self._name}: the {name} of attention layer {int(module.layer_idx)} are not its latents times "  # type: ignore[arg-type]
                    f"{expansion.projection}, its keys first and then its rotated part; it stays usable unwrapped"
                )
        raise _Compared
