"""Observes the arguments of a model's attention, and the masks that HuggingFace makes on the way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from compiled_llm.compat.huggingface import implementations_read
from compiled_llm.model.attention_switch import attention_configs

_NAME = "compiled_llm_observed"


class Observer(Protocol):
    """An observer that takes the place of attention and its masks."""

    def mask(self, arguments: dict[str, Any]) -> Tensor | None:
        """Return a mask in place of HuggingFace's for ``arguments``, its ``mask_function`` among them."""

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return ``[B, T, H, D]`` in place of attention of ``[B, H, T, D]`` queries."""
        ...


@contextmanager
def observed(model: PreTrainedModel, observer: Observer) -> Iterator[None]:
    """Let ``observer`` answer for attention in this thread for the block."""
    token = _observer.set(observer)
    try:
        with implementations_read(attention_configs(model), _NAME):
            yield
    finally:
        _observer.reset(token)


_observer: ContextVar[Observer] = ContextVar("observer")


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: object
) -> tuple[Tensor, None]:
    return _observer.get().attend(module, query, key, value, attention_mask), None


def _mask(**arguments: object) -> Tensor | None:
    return _observer.get().mask(arguments)


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, _mask)
