"""Learns a model's default positions from the queries and keys that reach its attention."""

# Most number the columns, some the tokens that are not masked, and others something of their own.

from __future__ import annotations

from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compiled_llm.model.layer_probe import trial_forward
from compiled_llm.model.probes.observing import observed

DefaultPositions = Literal["columns", "unmasked", "own"]
"""The tokens that ``forward`` without ``position_ids`` numbers: all, those that are not masked, or others."""

_LAYERS = 4  # how many are compared; some layers use no positions, but never the first four of them


def default_positions(model: PreTrainedModel) -> DefaultPositions:
    """Return how a model that is not wrapped numbers tokens without ``position_ids``."""
    shown = torch.tensor([[0, 1, 1, 0, 1]], device=model.device)
    columns = torch.arange(shown.shape[1], device=model.device)[None]
    counted = (shown.cumsum(1) - 1).clamp(min=0)
    try:
        asked = _reaching(model, shown, None)
        if _same(asked, _reaching(model, shown, columns)):
            return "columns"
        return "unmasked" if _same(asked, _reaching(model, shown, counted)) else "own"
    except Exception:  # if it wants more than ids and a mask, it makes positions of that
        return "own"


def _reaching(model: PreTrainedModel, shown: Tensor, positions: Tensor | None) -> list[Tensor]:
    """Return queries and keys of tokens that are not masked; one is the padding token, which some models look for."""
    text_config = model.config.get_text_config(decoder=True)
    ids = torch.arange(2, 2 + shown.shape[1], device=shown.device)[None] % text_config.vocab_size
    padding = text_config.pad_token_id
    if padding is not None and padding >= 0:
        ids[:, 1] = padding
    observer = _Reaching(shown[0].bool())
    with observed(model, observer), suppress(_Enough):
        trial_forward(model, fake=False, input_ids=ids, attention_mask=shown, position_ids=positions)
    return observer.states


def _same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(_equal, first, second))


def _equal(first: Tensor, second: Tensor) -> bool:
    return bool(((first == second) | (first.isnan() & second.isnan())).all())


class _Enough(Exception):  # noqa: N818
    """The layers that are compared have been reached."""


class _Reaching:
    """A collector of the arguments of the first layers' attention; none of it depends on other tokens."""

    def __init__(self, shown: Tensor) -> None:
        self._shown = shown
        self.states: list[Tensor] = []

    def mask(self, arguments: dict[str, Any]) -> None: ...

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        self.states += [query[:, :, self._shown], key[:, :, self._shown]]
        if len(self.states) == 2 * _LAYERS:
            raise _Enough
        # The values' heads may have another size.
        return nn.functional.pad(query.transpose(1, 2), (0, value.shape[3] - query.shape[3])).contiguous()
