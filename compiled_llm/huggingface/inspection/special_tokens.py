"""Special tokens of ``generate`` as tensors, kept for equal calls: HuggingFace uploads and reads them each time."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from transformers import GenerationConfig

from compiled_llm.compat.huggingface import set_special_tokens, special_tokens
from compiled_llm.huggingface.inspection.host_copies import HostCopies

_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_MOST = 256


class SpecialTokens:
    """The tensors that calls of one model had so far; safe to use from any thread."""

    def __init__(self) -> None:
        self._known: dict[Hashable, list[tuple[Tensor, Tensor] | None]] = {}

    def prepare(
        self, original: Callable[[], object], config: GenerationConfig, device: torch.device, copies: HostCopies
    ) -> None:
        """Set the config's tensors as ``original`` does, without its warnings; ``copies`` gets cached ids."""
        ids = [getattr(config, name) for name in _IDS]
        if not all(map(_are_tokens, ids)):
            original()
            return
        key = device, repr(ids)
        if (pairs := self._known.get(key)) is None:
            with torch.inference_mode(False):  # other calls will use them as well
                original()
            pairs = [None if tensor is None else (tensor, tensor.cpu()) for tensor in special_tokens(config)]
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = pairs
        set_special_tokens(config, [None if pair is None else pair[0] for pair in pairs])
        for pair in pairs:
            if pair is not None:
                copies.note(*pair)


def _are_tokens(value: object) -> bool:
    ids = value if type(value) is list and value else [value]
    return value is None or all(type(entry) is int and entry >= 0 for entry in ids)
