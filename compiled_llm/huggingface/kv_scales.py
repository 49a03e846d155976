"""``kv_scales``: how large keys and values are, by layer and kv head, over some prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from compiled_llm.compat.cache_names import cache_argument
from compiled_llm.config import KVScales
from compiled_llm.huggingface.wrapped_model import WrappedModel
from compiled_llm.kinds.registry import CODECS


def kv_scales(model: PreTrainedModel, prompts: Sequence[Sequence[int] | Tensor]) -> KVScales:
    """Measure scales of keys and values for pages of ``kv_dtype``, by layer and kv head.

    HuggingFace's own forward computes the prompts, one after the other. A scale is the largest absolute value that a
    head's keys or values have in any of them, divided by the largest number that such pages hold, and rounded up to a
    power of two: that leaves room for numbers up to twice as large, and costs no digits of floating-point numbers,
    which have as many of them at each size. Numbers beyond that are clamped, and counted by ``stats().kv_saturated``.

    Args:
        model: wrapped or not, in evaluation mode.
        prompts: token ids of texts such as the model will see, answers included; a few thousand tokens in all.

    Returns:
        ``wrap(kv_scales=...)`` and ``model.compiled.set_kv_scales`` take it.

    Raises:
        ValueError: no codec is there, or no prompts, one has no tokens, or keys or values are not finite.
        RuntimeError: the model keeps keys and values in another way than HuggingFace's caches.

    Examples:
        >>> scales = compiled_llm.kv_scales(model, [tokenizer(text).input_ids for text in texts])  # doctest: +SKIP
    """
    if not CODECS:
        raise ValueError("kv_scales: this copy of compiled_llm has no pages with scales")
    if len(prompts) == 0:
        raise ValueError("kv_scales: prompts is empty; give some texts as token ids")
    wrapped = isinstance(model, WrappedModel)
    largest = _Largest()
    kind: type[PreTrainedModel] = type(model).__bases__[-1] if wrapped else type(model)
    own = cast(WrappedModel, model).compiled.facts.attention.original() if wrapped else nullcontext()
    with own, torch.inference_mode(False), torch.no_grad():
        for number, prompt in enumerate(prompts):
            ids = torch.as_tensor(prompt, device=model.device)
            if ids.dim() != 1 or not len(ids) or ids.is_floating_point():
                raise ValueError(f"kv_scales: prompts[{number}] must be token ids of one text; got {prompt!r:.80}")
            watched = {cache_argument(kind.forward): _Watched(model, largest)}
            kind.forward(model, input_ids=ids[None].long(), use_cache=True, **watched)
    return KVScales(*(largest.scales(part) for part in (0, 1)))


class _Largest:
    """The largest absolute keys and values of each layer so far, ``[2, K]`` by its number; none without attention."""

    def __init__(self) -> None:
        self._of_layers: dict[int, Tensor] = {}
        self.layers = 0

    def see(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Take in ``[B, K, C, D]``."""
        seen = torch.stack([states.float().abs().amax(dim=(0, 2, 3)) for states in (keys, values)])
        before = self._of_layers.get(layer)
        self._of_layers[layer] = seen if before is None else torch.maximum(before, seen)

    def scales(self, part: int) -> list[list[float]]:
        """Return the scales of keys, part 0, or values, part 1."""
        if not self._of_layers:
            raise RuntimeError("kv_scales: the model has put nothing into the cache that it was given")
        nothing = torch.zeros(2, 0, device="cpu")
        return [
            _scales_of(layer, self._of_layers.get(layer, nothing)[part].tolist())
            for layer in range(max(self.layers, len(self._of_layers)))
        ]


def _scales_of(layer: int, largest: Sequence[float]) -> list[float]:
    if not all(map(math.isfinite, largest)):
        raise ValueError(
            f"kv_scales: keys or values of layer {layer} are not finite: the model computes NaN or infinity"
        )
    stored = min(codec.largest for codec in CODECS.values())
    return [2.0 ** math.ceil(math.log2(number / stored)) if number else 1.0 for number in largest]


class _Watched(DynamicCache):
    """HuggingFace's cache, which shows what it is given."""

    def __init__(self, model: PreTrainedModel, largest: _Largest) -> None:
        super().__init__(config=model.config.get_text_config(decoder=True))
        self._largest, largest.layers = largest, len(self.layers)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self._largest.see(layer_idx, key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)
