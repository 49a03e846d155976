"""Finds layers that keep latents in HuggingFace's cache, and how they expand them: by what they do, not by name."""

# A layer is compared with what HuggingFace's cache keeps of a token. If that is something else than the kind that was
# found keeps, the one linear layer that reads the latents must be all that stands between them and what attention gets.
# Shapes: T tokens, H heads, N size of a key's part that is not rotated, E size of the rotated part, V size of a value,
# R latent size.

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, PreTrainedModel

from compiled_llm.compat.torch.tensors import fake_linear
from compiled_llm.kinds.kind import Layer, LayerKind, Trial, attended_like
from compiled_llm.kinds.refusals import UnsupportedModelError


class Expansion(NamedTuple):
    """The way a layer makes keys and values of latents."""

    projection: str  # name of the linear layer in the attention module; its weight is ``[H * (N + V), R]``
    key: int  # N
    value: int  # V

    def halves(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """Return views of a weight, ``[H, N, R]`` and ``[H, V, R]``, or raise UnsupportedModelError."""
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


def with_latents(
    model: PreTrainedModel, trial: Trial, layers: Sequence[Layer], kind: Callable[[Expansion, int], LayerKind]
) -> Sequence[Layer]:
    """Return the layers as they are kept: those of latent attention with the sizes of their latents."""
    # ``kind`` makes theirs, of an expansion and the size of the rotated part. UnsupportedModelError if the cache keeps
    # something that is neither keys and values nor such latents.
    # Expanded latents are keys and values of all heads.
    attending = [layer for layer in layers if layer.kind.attends]
    if all(layer.kv_heads < layer.query_heads and layer.kind.value_head_dim is None for layer in attending):
        return layers
    try:
        found = _Expansions.of(model, trial, layers, fake=True)
    except UnsupportedModelError:
        raise
    except Exception:  # a forward that looks at numbers does not take fake tensors
        found = _Expansions.of(model, trial, layers, fake=False)
    if found and len(found) < len(attending):
        raise UnsupportedModelError(
            f"{type(model).__name__}: attention layer {min(found)} keeps latents in HuggingFace's cache, and "
            "others keep keys and values; pages hold the same of all layers, so it stays usable unwrapped"
        )
    if found:
        _ExpansionCheck.check(model, trial, found[min(found)].expansion)
    kept = [*layers]
    for number, (expansion, rank, size) in found.items():
        own = layers[number].kind.keeping(kind(expansion, size))
        kept[number] = layers[number]._replace(kv_heads=1, head_dim=rank, kind=own)
    return kept


class _Found(NamedTuple):
    """The things that a layer keeps: how it is expanded, R, and E."""

    expansion: Expansion
    rank: int
    size: int


class _WatchedCache(DynamicCache):
    """HuggingFace's cache, which remembers the tensors that it last returned, by layer."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(config=model.config)
        self.returned: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        layer = kwargs["layer_idx"] if "layer_idx" in kwargs else args[2]
        keys, values = super().update(*args, **kwargs)
        self.returned[int(layer)] = keys, values
        return keys, values


class _Expansions(TorchFunctionMode):
    """A watch over a forward: what each layer keeps, and which weights read it."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[Layer]) -> None:
        super().__init__()
        self._name = type(model).__name__
        self._cache = _WatchedCache(model)
        self._layers = layers
        self._read: list[tuple[Tensor, Any]] = []
        self._found: dict[int, _Found] = {}

    @classmethod
    def of(cls, model: PreTrainedModel, trial: Trial, layers: Sequence[Layer], fake: bool) -> dict[int, _Found]:
        watch = cls(model, layers)
        with watch:
            trial(watch._cache, watch.attend, fake)
        return watch._found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is nn.functional.linear:
            self._read.append((args[0] if args else given["input"], (*args[1:], *given.values())))
            if (made := fake_linear(*args, **given)) is not None:
                return made
        return func(*args, **given)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        number = int(module.layer_idx)  # type: ignore[arg-type]
        kept, layer = self._cache.returned.get(number), self._layers[number]
        known = (layer.kv_heads, layer.head_dim), (layer.kv_heads, layer.kind.value_head_dim or layer.head_dim)
        if kept is not None and tuple((own.shape[1], own.shape[3]) for own in kept) != known:
            self._found[number] = self._latent(module, number, kept, key, value)
        self._read.clear()
        return attended_like(query, value)

    def _latent(
        self, module: nn.Module, number: int, kept: tuple[Tensor, Tensor], key: Tensor, value: Tensor
    ) -> _Found:
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
        return _Found(expansion, rank, size)


class _Compared(Exception):  # noqa: N818
    """The first layer was compared; the rest of the forward is not needed."""


class _ExpansionCheck:
    """A check that compares the first layer's keys and values with what its weight's halves make of the latents."""

    def __init__(self, model: PreTrainedModel, expansion: Expansion) -> None:
        self._name, self._expansion, self.cache = type(model).__name__, expansion, _WatchedCache(model)

    @classmethod
    def check(cls, model: PreTrainedModel, trial: Trial, expansion: Expansion) -> None:
        """Raise UnsupportedModelError if they differ."""
        checked = cls(model, expansion)
        config = model.config
        ids = torch.arange(2, 6, device=model.device)[None]  # padding may be zeros
        with suppress(_Compared):
            trial(checked.cache, checked.attend, input_ids=ids % config.get_text_config(decoder=True).vocab_size)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        latent, rope = self.cache.returned[int(module.layer_idx)]  # type: ignore[arg-type]
        halves = self._expansion.halves(module)
        plain, values = (torch.matmul(latent.float(), half.float().transpose(1, 2)) for half in halves)
        keys = torch.cat([plain, rope.float().expand(-1, plain.shape[1], -1, -1)], dim=-1)
        close = 1e-4 if key.dtype in (torch.float32, torch.float64) else 3e-2
        for name, made, expected in (("keys", key, keys), ("values", value, values)):
            if not torch.allclose(made.float(), expected, rtol=close, atol=close * float(expected.abs().max())):
                raise UnsupportedModelError(
                    f"{self._name}: the {name} of attention layer {int(module.layer_idx)} are not its latents times "  # type: ignore[arg-type]
                    f"{self._expansion.projection}, its keys first and then its rotated part; it stays usable unwrapped"
                )
        raise _Compared
