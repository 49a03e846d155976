"""One of the two models of a case, what its user holds, and where the results of both differ."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.utils import ModelOutput

OPTIONS: dict[str, Any] = {"mode": "eager", "progress": False}
"""What models are wrapped with, unless a case says otherwise."""


@dataclass
class Chat:
    """A conversation: the text so far ``[B, T]``, its mask, and the cache that holds most of it."""

    text: Tensor
    mask: Tensor
    cache: Cache


@dataclass
class Side:
    """The wrapped model, or its unwrapped twin."""

    model: PreTrainedModel  # the model
    options: dict[str, Any] | None = None  # what it is wrapped with; None if it is not
    chat: Chat | None = None  # the conversation that goes on, if one does
    # how what was hooked or overridden is taken back, by name
    undo: dict[str, Callable[[], Any]] = field(default_factory=dict)
    log: list[Any] = field(default_factory=list)  # what callbacks and hooks have seen in this step

    @property
    def wrapped(self) -> bool:
        return hasattr(self.model, "compiled")

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    def note(self, *seen: Any) -> None:
        """Remember what a callback saw."""
        self.log.append(plain(seen))


@dataclass
class Raised:
    """What a step raised."""

    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass
class Outcome:
    """What came of a step: its result or what it raised, what callbacks saw, and the model afterwards."""

    result: Any
    seen: list[Any]
    at_rest: dict[str, Any]

    @property
    def raised(self) -> Raised | None:
        return self.result if isinstance(self.result, Raised) else None


def plain(result: Any) -> Any:
    """Lists, dictionaries and tensors of a result's own; of a cache, how many tokens it was given."""
    if isinstance(result, Tensor):
        return result.detach().clone()
    if isinstance(result, Cache):
        return int(result.get_seq_length())  # in transformers 5.17 sometimes a tensor
    if isinstance(result, ModelOutput):
        return {"type": type(result).__name__, **{name: plain(value) for name, value in result.items()}}
    if isinstance(result, dict):
        return {name: plain(value) for name, value in result.items()}
    if isinstance(result, (tuple, list)):
        return [plain(value) for value in result]
    return result if isinstance(result, (int, float, str, bool, type(None))) else type(result).__name__


def state_at_rest(side: Side) -> dict[str, Any]:
    """What a call must leave as HuggingFace leaves it."""
    model = side.model
    modules = dict(model.named_modules())
    return {
        "attention": [module.config._attn_implementation for module in modules.values() if hasattr(module, "config")],
        "config": copy.deepcopy(model.config.to_dict()),
        "generation_config": copy.deepcopy(model.generation_config.to_dict()),
        "hooks": {name: _hooks(module) for name, module in modules.items() if _hooks(module)},
        "training": model.training,
        "class": type(model).__name__,
        "own attributes": sorted(name for name in vars(model) if name[0] != "_" and name != "compiled"),
        "gradients": [torch.is_grad_enabled(), torch.is_inference_mode_enabled()],
        "defaults": [str(torch.get_default_dtype()), str(torch.get_default_device())],
    }


def _hooks(module: torch.nn.Module) -> list[str]:
    """The hooks of a module; HuggingFace's own, which it keeps once it needed them, do not count."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    modules = (getattr(getattr(hook, "func", hook), "__module__", "") for hook in hooks)
    return [name for name in modules if not name.startswith("transformers.")]


CLOSE = 1e-4


def difference(ours: Any, theirs: Any, where: str = "") -> str | None:
    """The first place where two results of ``plain`` differ, in words; None if they are equal."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return _of_tensors(ours, theirs, where)
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if list(ours) != list(theirs):
            return f"{where}: {list(ours)}, HuggingFace's {list(theirs)}"
        return next(filter(None, (difference(ours[name], theirs[name], f"{where}.{name}") for name in ours)), None)
    if isinstance(ours, list) and isinstance(theirs, list):
        both = enumerate(zip(ours, theirs, strict=False))
        first = next(filter(None, (difference(*pair, f"{where}[{index}]") for index, pair in both)), None)
        lengths = f"{where}: {len(ours)} entries, HuggingFace's {len(theirs)}"
        return first or (lengths if len(ours) != len(theirs) else None)
    return None if type(ours) is type(theirs) and ours == theirs else f"{where}: {ours}, HuggingFace's {theirs}"


def _of_tensors(ours: Tensor, theirs: Tensor, where: str) -> str | None:
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        kinds = (f"{tensor.dtype} {list(tensor.shape)}" for tensor in (ours, theirs))
        return f"{where}: {next(kinds)}, HuggingFace's {next(kinds)}{_values(ours, theirs)}"
    if torch.equal(ours, theirs):
        return None
    if ours.is_floating_point():
        close = torch.isclose(ours, theirs, rtol=CLOSE, atol=CLOSE, equal_nan=True)
        if bool(close.all()):
            return None
        at = (~close).nonzero()[0].tolist()
        return f"{where}: {ours[tuple(at)].item()} at {at}, HuggingFace's {theirs[tuple(at)].item()}"
    return f"{where}{_values(ours, theirs)}"


def _values(ours: Tensor, theirs: Tensor) -> str:
    if max(ours.numel(), theirs.numel()) > 400 or ours.is_floating_point():
        return ""
    return f":\n    {ours.tolist()}\n  HuggingFace's\n    {theirs.tolist()}"
