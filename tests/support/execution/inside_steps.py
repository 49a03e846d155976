"""Something happens inside a model's steps; a hook would send calls along HuggingFace's own path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


class Calling(nn.Module):
    """A module, and a function that is called before it."""

    def __init__(self, inner: nn.Module, function: Callable[[], Any]) -> None:
        super().__init__()
        self.inner = inner
        self.function = function

    def forward(self, hidden: Tensor) -> Any:
        self.function()
        return self.inner(hidden)


@contextmanager
def calling(model: PreTrainedModel, function: Callable[[], Any]) -> Iterator[None]:
    """Call a function in the first layer of each step of an eager model."""
    layer: Any = model.model.layers[0]
    inner = layer.mlp
    layer.mlp = Calling(inner, function)
    try:
        yield
    finally:
        layer.mlp = inner
