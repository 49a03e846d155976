"""Finds the tokens that each layer sees in HuggingFace's forward, and whether ours can serve that."""

# Some patterns stand in the arguments of attention, others only in the mask, and others only in the tokens that
# HuggingFace's cache drops. So HuggingFace makes its masks once, on real tensors, up to the first attention, and the
# probe reads them. Where masks differ, a forward on fake tensors tells which layer gets which.

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from compiled_llm.compat.cache_names import cache_argument
from compiled_llm.compat.huggingface import keeps_nothing, keeps_state
from compiled_llm.kinds.kind import Layer, attended_like
from compiled_llm.kinds.refusals import UnsupportedModelError
from compiled_llm.kinds.registry import compared
from compiled_llm.model.layer_probe import trial_forward
from compiled_llm.model.probes.mask_pattern import MaskFunction, PatternError, window_of
from compiled_llm.model.probes.observing import observed
from compiled_llm.model.sizes import max_positions_of


def check_patterns(model: PreTrainedModel, layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers with windows that only HuggingFace's masks have; UnsupportedModelError for other patterns."""
    if not all(layer.causal for layer in layers):
        _check_causal_after_prompts(model)
    found = _windows(model, len(layers), [number for number, layer in enumerate(layers) if layer.kind.attends])
    positions = max_positions_of(model)
    windowed = [_seeing(layer, window, positions) for layer, window in zip(layers, found, strict=True)]
    return [*compared(model, partial(_try, model), _as_cached(model, windowed))]


_TOKENS = 4  # of a text whose masks are asked for
_UNMASKED = -1  # in place of a window: HuggingFace makes no mask for the layer


def _check_causal_after_prompts(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError if tokens that are of no prompt see later ones, too."""
    patterns = _patterns(model)
    if not patterns or any(isinstance(pattern, PatternError) for pattern in patterns):
        name = type(model).__name__
        raise UnsupportedModelError(f"{name} is not causal after a prompt, either; it stays usable unwrapped")


def _seeing(layer: Layer, window: int | None, positions: int) -> Layer:
    """Return a layer that sees the tokens its mask shows; mostly ``layer`` itself."""
    if not layer.kind.attends or window == _UNMASKED or (window or positions) == layer.visible(positions):
        return layer
    return layer._replace(window_left=-1 if window is None else window - 1)


def _windows(model: PreTrainedModel, layers: int, attending: Sequence[int]) -> list[int | None]:
    """Return how many tokens each layer's mask shows, ``_UNMASKED`` if it has none; some layers are ``attending``."""
    patterns = _patterns(model)
    if not patterns:
        return [_UNMASKED] * layers
    handed: list[int | None] = [0] * layers
    if len(set(map(str, patterns))) > 1:
        handed = _Handed.of(model, len(patterns), layers, attending)
    windows: list[int | None] = []
    for index, number in enumerate(handed):
        pattern = _UNMASKED if number is None else patterns[number]
        if isinstance(pattern, PatternError):
            raise UnsupportedModelError(
                f"{type(model).__name__}: attention layer {index} sees neither all tokens before its own nor the last "
                f"ones (HuggingFace's mask differs at {pattern}); it stays usable unwrapped"
            )
        windows.append(pattern)
    return windows


def _patterns(model: PreTrainedModel) -> list[int | PatternError | None]:
    """Return the window of each mask, None if it shows all tokens before, or where it is neither."""
    positions = max_positions_of(model)
    functions = _First.masks_of(model)
    if any(map(_reads_tokens, functions)):
        # Such masks know the tokens of their text alone, and on a GPU to ask them about others is the device's end.
        window = getattr(model.config.get_text_config(decoder=True), "sliding_window", None) or 0
        positions = min(positions, 2 * window + _TOKENS)
        functions = _First.masks_of(model, positions)
    return [_pattern(function, model, positions) for function in functions]


def _reads_tokens(function: object) -> bool:
    """Whether a mask function reads a tensor ``[B, T]`` by position, such as which image a token is of."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    inside = [part for kept in cells for part in (kept if isinstance(kept, (tuple, list)) else (kept,))]
    tensors = [part for part in inside if isinstance(part, Tensor)]
    functions = [part for part in inside if isinstance(part, FunctionType)]
    return any(tensor.dim() > 1 for tensor in tensors) or any(map(_reads_tokens, functions))


def _pattern(function: MaskFunction, model: PreTrainedModel, positions: int) -> int | PatternError | None:
    try:
        return window_of(function, positions, model.device)
    except PatternError as error:
        return error
    except Exception as error:  # it looks at what the forward was given
        return PatternError(f"places that cannot be asked about ({type(error).__name__}: {error})")


class _Reached(Exception):  # noqa: N818
    """The first attention was reached; the rest of the forward is not needed."""


class _First:
    """A collector of the arguments of masks, up to the first attention."""

    def __init__(self) -> None:
        self.functions: list[MaskFunction] = []

    @classmethod
    def masks_of(cls, model: PreTrainedModel, tokens: int = _TOKENS) -> list[MaskFunction]:
        """Return the masks of a text of so many tokens."""
        observer, device = cls(), model.device
        ids = torch.zeros((1, tokens), dtype=torch.long, device=device)
        with observed(model, observer), suppress(_Reached):
            trial_forward(model, False, input_ids=ids, position_ids=torch.arange(tokens, device=device)[None])
        return observer.functions

    def mask(self, arguments: dict[str, Any]) -> None:
        self.functions.append(arguments["mask_function"])

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        raise _Reached


class _Handed:
    def __init__(self) -> None:
        self.masks: list[Tensor] = []
        self.of_layer: dict[int, int | None] = {}

    @classmethod
    def of(cls, model: PreTrainedModel, masks: int, layers: int, attending: Sequence[int]) -> list[int | None]:
        """Return the number of each layer's mask, None if it gets none; raise if a layer makes its own."""
        observer = cls()
        with observed(model, observer):
            trial_forward(model, fake=True)
        if len(observer.masks) != masks or sorted(observer.of_layer) != [*attending]:
            raise UnsupportedModelError(
                f"{type(model).__name__} makes masks inside its layers, which cannot be compared with what pages "
                "serve; it stays usable unwrapped"
            )
        return [observer.of_layer.get(index) for index in range(layers)]

    def mask(self, arguments: dict[str, Any]) -> Tensor:
        self.masks.append(torch.empty(1, 1, arguments["q_length"], arguments["kv_length"], device=arguments["device"]))
        return self.masks[-1]

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        self.of_layer[int(module.layer_idx)] = None if mask is None else self._number_of(module, mask)  # type: ignore[arg-type]
        return attended_like(query, value)

    def _number_of(self, module: nn.Module, mask: Tensor) -> int:
        for number, made in enumerate(self.masks):
            if mask is made:
                return number
        raise UnsupportedModelError(
            f"{type(module).__name__} builds an attention mask of its own; paged attention cannot honour it"
        )


def _try(
    model: PreTrainedModel,
    cache: DynamicCache,
    attend: Callable[..., Tensor] | None = None,
    fake: bool = False,
    **inputs: object,
) -> None:
    """Run a trial forward that fills a cache, as kinds ask for it."""
    argument = cache_argument(type(model).forward)
    observer: Any = SimpleNamespace(mask=lambda _: None, attend=attend)
    with nullcontext() if attend is None else observed(model, observer):
        trial_forward(model, fake, lambda: {argument: cache}, use_cache=True, **inputs)


class _Shared:
    """A finder of the layers that attend over keys and values which an earlier layer has computed."""

    def __init__(self) -> None:
        self._handed: list[tuple[Tensor, Tensor, int]] = []
        self.layers: dict[int, int] = {}

    @classmethod
    def of(cls, model: PreTrainedModel) -> dict[int, int]:
        """Return these layers, each with the earlier one."""
        observer = cls()
        with observed(model, observer):
            trial_forward(model, fake=True)
        return observer.layers

    def mask(self, arguments: dict[str, Any]) -> None: ...

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        number: int = module.layer_idx  # type: ignore[assignment]
        owners = (owner for keys, values, owner in self._handed if key is keys and value is values)
        if (owner := next(owners, None)) is not None:
            self.layers[number] = owner
        self._handed.append((key, value, number))
        return attended_like(query, value)


def _as_cached(model: PreTrainedModel, layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers with the earlier ones that HuggingFace's cache keeps keys and values of in their place.

    Raises:
        UnsupportedModelError: the cache holds or drops other keys and values than the layers see.
    """
    name, positions = type(model).__name__, max_positions_of(model)
    kept = DynamicCache(config=model.config).layers
    # Before transformers 5.23 the last layers are not in the cache, if they keep nothing.
    absent = [index >= len(kept) or keeps_nothing(kept[index]) for index in range(len(layers))]
    empty = {index for index, layer in enumerate(layers) if layer.kind.attends and absent[index]}
    shared = _Shared.of(model) if empty else {}
    for index, (layer, cached) in enumerate(zip(layers, kept, strict=False)):
        if keeps_nothing(cached) and index in shared:
            continue
        if not (layer.kind.is_cached_in(cached) or keeps_state(cached)):
            raise UnsupportedModelError(
                f"{name}: attention layer {index} keeps a {type(cached).__name__} in HuggingFace's cache; pages hold "
                "keys and values of tokens, so it stays usable unwrapped"
            )
        window = getattr(cached, "sliding_window", None)
        if window is not None and window < layer.visible(positions):
            raise UnsupportedModelError(
                f"{name}: HuggingFace's cache keeps {window} tokens of attention layer {index}, whose mask shows more; "
                "pages keep them all, so it stays usable unwrapped"
            )
    return [
        layer._replace(keys_of=shared.get(index)) if index in empty else layer for index, layer in enumerate(layers)
    ]
