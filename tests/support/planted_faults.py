"""Layers of a tiny Qwen3 with one fault each, and what following the advice makes of them.

In a file of their own, so that line numbers are real; the line at fault ends in ``# planted``.
"""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from support.tiny_models import tiny_qwen3

SETTINGS = Path(tempfile.gettempdir()) / "compiled_llm_planted_settings"


def plant(*things: Any) -> Any:
    """A tiny model with a layer for each module, an MLP or the norm before attention; the last norm has the hooks."""
    modules = [thing for thing in things if isinstance(thing, type)]
    model = tiny_qwen3(eos_token_id=None, num_hidden_layers=len(modules))
    for layer, module in zip(model.model.layers, modules, strict=True):
        place = "mlp" if issubclass(module, Qwen3MLP) else "input_layernorm"
        new = module(model.config).eval()
        new.load_state_dict(getattr(layer, place).state_dict(), strict=False)
        setattr(layer, place, new)
    for thing in things:
        if thing not in modules:
            layer.input_layernorm.register_forward_hook(thing)
    return model


class NormPrintDeleted(Qwen3RMSNorm):
    def __init__(self, config):
        super().__init__(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states):
        return super().forward(hidden_states)


class PrintInNorm(NormPrintDeleted):
    """Around it, Dynamo traces the layer once for each function that calls it, up to here: less than up to an MLP."""

    def forward(self, hidden_states):
        print("norm", hidden_states.shape)  # planted
        return super().forward(hidden_states)


class Print(Qwen3MLP):
    def forward(self, x):
        print("mlp", x.shape)  # planted
        return super().forward(x)


class PrintDeleted(Qwen3MLP):
    def forward(self, x):
        return super().forward(x)


class Item(Qwen3MLP):
    def forward(self, x):
        scale = 1.0 + 0.01 * x.abs().max().item()  # planted
        return super().forward(x) * scale


class ItemLeftATensor(Qwen3MLP):
    def forward(self, x):
        scale = 1.0 + 0.01 * x.abs().amax(dim=-1, keepdim=True)
        return super().forward(x) * scale


class Branch(Qwen3MLP):
    def forward(self, x):
        if x.abs().max() > 3:  # planted
            x = x.clamp(-3, 3)
        return super().forward(x)


class BothSides(Qwen3MLP):
    def forward(self, x):
        x = torch.where(x.abs().max() > 3, x.clamp(-3, 3), x)
        return super().forward(x)


class FileAccess(Qwen3MLP):
    def forward(self, x):
        with open(SETTINGS) as settings:  # planted
            scale = float(settings.read())
        return super().forward(x) * scale


class ReadOnce(Qwen3MLP):
    def __init__(self, config):
        super().__init__(config)
        with open(SETTINGS) as settings:
            self.scale = float(settings.read()) * float(os.environ.get("PLANTED_SCALE", "1.0"))

    def forward(self, x):
        return super().forward(x) * self.scale


class Environment(Qwen3MLP):
    def forward(self, x):
        scale = float(os.environ.get("PLANTED_SCALE", "1.0"))  # planted
        return super().forward(x) * scale


class NonZero(Qwen3MLP):
    def forward(self, x):
        large = x.flatten()[torch.nonzero(x.flatten() > 3)]  # planted
        return super().forward(x) + 0.0 * large.sum()


class WholeWithMask(Qwen3MLP):
    def forward(self, x):
        large = torch.where(x > 3, x, 0)
        return super().forward(x) + 0.0 * large.sum()


class PythonCache(Qwen3MLP):
    def __init__(self, config):
        super().__init__(config)
        self.calls = {}

    def forward(self, x):
        self.calls[len(self.calls)] = 1.0  # planted
        return super().forward(x)


class PythonCacheOnlyRead(Qwen3MLP):
    def __init__(self, config):
        super().__init__(config)
        self.calls = {0: 1.0}

    def forward(self, x):
        return super().forward(x) * self.calls[0]


COUNT = torch.zeros(1)


class Mutated(Qwen3MLP):
    def forward(self, x):
        COUNT.add_(1.0)  # planted
        return super().forward(x) + 0.0 * COUNT


class MutatedBuffer(Qwen3MLP):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count.add_(1.0)
        return super().forward(x) + 0.0 * self.count


class Growing(Qwen3MLP):
    def __init__(self, config):
        super().__init__(config)
        self.history = torch.zeros(1)

    def forward(self, x):
        self.history = torch.cat([self.history, x.abs().amax().reshape(1)])  # planted
        return super().forward(x) + 0.0 * self.history.sum()


class OneShape(Qwen3MLP):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("history", torch.zeros(64))
        self.register_buffer("length", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        self.history.index_copy_(0, self.length % 64, x.abs().amax().reshape(1))
        self.length.add_(1)
        return super().forward(x) + 0.0 * self.history.sum()


LOCK = threading.Lock()


def hook_with_lock(module, args, output):
    with LOCK:  # planted
        return output * 1.0


def hook_without_lock(module, args, output):
    return output * 1.0


class Swapped(Qwen3MLP):  # planted
    def forward(self, x):
        return super().forward(x) * 0.5
