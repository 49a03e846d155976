"""Dynamo's traces without some of what it computes again and again: graphs and guards are the same."""

from __future__ import annotations

from collections.abc import Callable
from traceback import FrameSummary, StackSummary
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import utils as dynamo
from torch._prims_common import is_contiguous_or_false
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _config_module as config


def hasten_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    _make_fakes_at_once(monkeypatch)
    _read_plain_settings_at_once(monkeypatch)
    _format_frames_once(monkeypatch)


def _make_fakes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of linear layers and norms, which torch computes by several operations each: a tenth of a trace."""
    run = dynamo.run_node

    def run_node(tracer: Any, node: Any, args: Any, kwargs: Any, module: Any) -> Any:
        make = MAKERS.get(node.target)
        made = make(*args, **kwargs) if make is not None and args and _is_plain(args[0]) else None
        return run(tracer, node, args, kwargs, module) if made is None else made

    monkeypatch.setattr(dynamo, "run_node", run_node)


def _is_plain(input: Any) -> bool:
    """Whether what these operations make of a fake tensor has its type, needs no gradient and is contiguous."""
    changes = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
    return type(input) is FakeTensor and input.is_floating_point() and not changes and is_contiguous_or_false(input)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    fits = type(weight) is FakeTensor and (weight.dim(), weight.dtype) == (2, input.dtype)
    if not fits or type(input.shape[-1]) is not int or input.shape[-1] != weight.shape[1]:
        return None
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


def _reciprocal_root(input: Tensor) -> Tensor:
    return input.new_empty(input.shape)


def _power(input: Tensor, exponent: object) -> Tensor | None:
    return input.new_empty(input.shape) if type(exponent) in (int, float) else None


def _mean(input: Tensor, dim: object = None, keepdim: bool = False, **others: Any) -> Tensor | None:
    if dim != -1 or not keepdim or others or not input.dim():
        return None
    return input.new_empty((*input.shape[:-1], 1))


MAKERS: dict[Any, Callable[..., Tensor | None]] = {
    torch._C._nn.linear: _linear,
    torch.rsqrt: _reciprocal_root,
    "mean": _mean,
    "pow": _power,
}
"""By what a node of Dynamo's graph calls: a function, or a method's name. None for what torch shall make."""


def _read_plain_settings_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo reads some for each bytecode; not those with another name or a variable of the environment."""
    if not hasattr(config, "_IMMUTABLE_CONFIG_TYPES"):
        return  # torch 2.11 keeps them otherwise
    read, unset = config.ConfigModule.__getattr__, config._UNSET_SENTINEL
    plain = dict[int, Any]()

    def is_plain(entry: Any) -> bool:
        others = entry.env_value_force, entry.env_value_default, entry.justknob, getattr(entry, "deprecated", False)
        return others == (unset, unset, None, False) and isinstance(entry.default, config._IMMUTABLE_CONFIG_TYPES)

    def reading(self: Any, name: str) -> Any:
        entry = self._config.get(name)
        if entry is None or entry.hide:
            return read(self, name)
        if (known := plain.get(id(entry))) is None:
            known = plain[id(entry)] = is_plain(entry)
        if not known:
            return read(self, name)
        value = entry.user_override.get()
        return entry.default if value is unset else value

    monkeypatch.setattr(config.ConfigModule, "__getattr__", reading)


def _format_frames_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node has the text of its stack, whose outer frames are those of the node before it."""
    form, formed = StackSummary.format_frame_summary, dict[tuple[Any, ...], str]()

    def formatted(self: StackSummary, frame: FrameSummary, **options: Any) -> str:
        if frame.locals or options or frame.filename.startswith("<"):
            return form(self, frame, **options)
        key = frame.filename, frame.name, frame.lineno, frame.end_lineno, frame.colno, frame.end_colno
        if key not in formed:
            formed[key] = form(self, frame)
        return formed[key]

    monkeypatch.setattr(StackSummary, "format_frame_summary", formatted)
