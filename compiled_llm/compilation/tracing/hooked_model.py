"""The stand-in for a model with traced hooks: shallow copies of the hooked modules and of those around them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from compiled_llm.model.traced.hooks import PlacedHook
from compiled_llm.model.traced.shallow_copies import shallow_copy, with_another


def hooked_model(model: nn.Module, hooks: Sequence[PlacedHook]) -> Any:
    """Return a model that calls the hooks, as the user's own does not; ValueError if a module of theirs is gone."""
    by_path: defaultdict[tuple[str, ...], list[PlacedHook]] = defaultdict(list)
    for hook in hooks:
        by_path[hook.path].append(hook)
    for path, own in by_path.items():
        _check_is_there(model, path)
        model = with_another(model, path, partial(_with_hooks, own))
    return model


def _with_hooks(hooks: Sequence[PlacedHook], module: nn.Module) -> nn.Module:
    calls = {-number: hook.call for number, hook in enumerate(hooks, start=1)}
    forward_hooks = OrderedDict({**calls, **module._forward_hooks})  # the others see what the model goes on with
    hooked: nn.Module = shallow_copy(module, _forward_hooks=forward_hooks)
    return hooked


def _check_is_there(module: nn.Module, path: Sequence[str]) -> None:
    for name in path:
        inner = module._modules.get(name)
        if inner is None:
            raise ValueError(
                f"traced_hook: the model's {type(module).__name__} has no module {name!r} any more; remove the hook "
                "that is on it (handle.remove())"
            )
        module = inner
