"""The special tokens of a call of ``generate`` as tensors, kept for calls that have the same ones.

HuggingFace uploads each of them, and asks the device questions about them, in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from compiled_llm.huggingface.host_copies import HostCopies

_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_TENSORS = ("_bos_token_tensor", "_eos_token_tensor", "_pad_token_tensor", "_decoder_start_token_tensor")
_MOST = 256


class SpecialTokens:
    """The tensors that calls of one model had so far; safe to use from any thread."""

    def __init__(self) -> None:
        """Know none yet."""
        self._known: dict[Hashable, list[tuple[Tensor, Tensor] | None]] = {}

    def prepare(
        self, own: Callable[[], object], config: GenerationConfig, device: torch.device, copies: HostCopies
    ) -> None:
        """Do what ``own`` does, where it would say nothing about these tokens.

        Args:
            own: HuggingFace's; it sets the config's tensors.
            config: the call's; ids of special tokens that are whole numbers from 0 on are kept.
            device: where the tensors are to be.
            copies: is told what they hold.
        """
        ids = [getattr(config, name) for name in _IDS]
        if not all(map(_are_tokens, ids)):
            own()
            return
        key = device, repr(ids)
        if key not in self._known:
            with torch.inference_mode(False):  # other calls will use them as well
                own()
            tensors: list[Tensor | None] = [getattr(config, name) for name in _TENSORS]
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = [None if tensor is None else (tensor, tensor.cpu()) for tensor in tensors]
        for name, known in zip(_TENSORS, self._known[key], strict=True):
            setattr(config, name, None if known is None else known[0])
            if known is not None:
                copies.note(*known)


def _are_tokens(value: Any) -> bool:
    ids = value if type(value) is list and value else [value]
    return value is None or all(type(entry) is int and entry >= 0 for entry in ids)
