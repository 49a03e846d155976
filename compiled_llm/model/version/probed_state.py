"""The state that the probes of ``wrap`` read: configs, and attributes of attention modules and of their callers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from compiled_llm.compat.huggingface import IMPLEMENTATIONS, WRITTEN_BY_GENERATE
from compiled_llm.model.version.contents import Contents
from compiled_llm.model.version.module_state import UNREAD
from compiled_llm.model.version.module_tree import same

_CONTAINERS = (list, tuple, dict)
_PLAIN = (bool, int, float, str, type(None), torch.dtype, *_CONTAINERS)
_UNPROBED = frozenset(
    {
        *("use_cache", "return_dict", "output_hidden_states", "output_attentions", "_output_attentions"),
        *("output_router_logits", "_name_or_path", "transformers_version", *WRITTEN_BY_GENERATE),
        *IMPLEMENTATIONS,
        "num_hidden_layers",  # fewer of them run while assistant_early_exit drafts, as a call of its own reason
    }
)
"""Attributes that trainers and calls change, and that say nothing of what a token sees."""


class ProbedState:
    """The probed state, remembered as it is now; it keeps no model alive that is not among its modules."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._attributes = [vars(module) for _, module in _asked(model)]
        read = [(held, name) for held in self._attributes for name, value in held.items() if _is_read(name, value)]
        self._owners = [owner for owner, _ in read]
        self._names = [name for _, name in read]
        self._known = self._now()
        self._lengths = self._lengths_now()
        lists = (owner[name] for owner, name in read if isinstance(owner[name], _CONTAINERS))
        self._contents = Contents([*_configs(model), *lists])

    def valid(self) -> bool:
        """Whether all of it is as it was, as far as a quick comparison tells; ``probed_words`` says if it matters."""
        return self._lengths == self._lengths_now() and same(self._known, self._now()) and self._contents.valid()

    def _now(self) -> list[Any]:
        configs = map(dict.get, self._attributes, repeat("config"))
        return [*configs, *map(dict.get, self._owners, self._names)]

    def _lengths_now(self) -> list[int]:
        # Attributes that come late, and that no probe reads, are counted, too: by ``probed_words`` they do not matter.
        return [*map(len, self._attributes)]


def probed_words(model: PreTrainedModel) -> tuple[str, ...]:
    """Return what the probes read, in words that are the same if their answers are."""
    configs = (f"{type(config).__name__}: {_plain(vars(config))}" for config in _configs(model))
    modules = (f"{name} {type(module).__name__}: {_plain(vars(module))}" for name, module in _asked(model))
    return (*configs, *modules)


def _is_read(name: str, value: object) -> bool:
    return isinstance(value, _PLAIN) and name not in UNREAD and name not in _UNPROBED


def _plain(attributes: dict[str, Any]) -> str:
    return repr(sorted((name, value) for name, value in attributes.items() if _is_read(name, value)))


def _asked(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that say which layer they are, those around them, and the models that these are in."""
    for name, module in model.named_modules():
        around = any("layer_idx" in vars(inner) for inner in module._modules.values() if inner is not None)
        if around or "layer_idx" in vars(module) or isinstance(module, PreTrainedModel):
            yield name, module


def _configs(model: PreTrainedModel) -> list[PretrainedConfig]:
    held = [vars(module).get("config") for _, module in _asked(model)]
    return list({id(config): config for config in held if isinstance(config, PretrainedConfig)}.values())
