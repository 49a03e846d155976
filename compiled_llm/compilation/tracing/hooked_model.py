"""The stand-in for a model with traced hooks: shallow copies of the hooked modules and of those around them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

from torch import nn

from compiled_llm.model.traced.hooks import PlacedHook
from compiled_llm.model.traced.shallow_copies import shallow_copy


def hooked_model(model: nn.Module, hooks: Sequence[PlacedHook]) -> Any:
    """Return a model that calls the hooks, as the user's own does not; ValueError if a module of theirs is gone."""
    below: defaultdict[str, list[PlacedHook]] = defaultdict(list)
    for hook in hooks:
        if hook.path:
            below[hook.path[0]].append(hook._replace(path=hook.path[1:]))
    if missing := next((name for name in below if model._modules.get(name) is None), None):
        raise ValueError(
            f"traced_hook: the model's {type(model).__name__} has no module {missing!r} any more; remove the hook that "
            "is on it (handle.remove())"
        )
    children: dict[str, nn.Module | None] = {
        name: hooked_model(child, below[name]) if child is not None and name in below else child
        for name, child in model._modules.items()
    }
    own = {-number: hook.call for number, hook in enumerate(hooks, start=1) if not hook.path}
    forward_hooks = OrderedDict({**own, **model._forward_hooks})  # the others see what the model goes on with
    return shallow_copy(model, type(model), _modules=children, _forward_hooks=forward_hooks)
