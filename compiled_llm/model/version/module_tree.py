"""The modules of a model, remembered: walking over them would take longer than launching a step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compiled_llm.compat.huggingface import captures_outputs
from compiled_llm.compat.known_functions import asks_for_gradients, author_of
from compiled_llm.compat.torch.modes import hooks_on_all_modules, hooks_registered
from compiled_llm.compat.training.peft import is_lora_layer
from compiled_llm.model.version.training import Difference, training_difference

_FORWARD_HOOKS = itemgetter("_forward_hooks", "_forward_pre_hooks")  # looked up: they may have been replaced
_HOOKS_FOR_GRADIENTS = itemgetter("_backward_hooks", "_backward_pre_hooks")  # forward with them cannot be traced
_MIXING = {"peft.tuners.lily.": "a Lily adapter"}  # it weighs its experts by an average over tokens

Hooks = frozenset[tuple[int, int]]


class Obstacles(NamedTuple):
    """Parts of a model that cannot take packed tokens and padded batches."""

    # where hooks are, and whose the first one is; those on all modules of the process count, too
    hooked: str | None
    # a kind of module that makes tokens depend on all others of a call, padding and later ones included
    mixing: str | None
    training: Difference | None  # a module in training mode that acts otherwise there


class ModuleTree:
    """The modules of a model at one moment."""

    def __init__(self, model: nn.Module, layers: int) -> None:
        """Walk over the model; ``layers`` is how many its list of layers has."""
        named = [*model.named_modules()]
        lists = ((name, module) for name, module in named if type(module) is nn.ModuleList)
        # with its name; None if there is none
        self.list_of_layers = next((found for found in lists if len(found[1]) == layers), None)
        # the list and all modules in it
        self.layers = [] if self.list_of_layers is None else [*self.list_of_layers[1].modules()]
        modules, in_layers = [module for _, module in named], {*self.layers}
        self._flags = [vars(module) for module in modules]
        self._named = named[1:]
        self._embeddings = [(name.split("."), module) for name, module in self._named if _embeds(module)]
        # those that are not, without the model itself, which nothing here keeps alive
        self.others = [module for module in modules if module is not model and module not in in_layers]
        self._children = [module._modules for module in modules if module._modules]
        self._known = self._now()
        self._inside = [vars(module) for module in (*self.layers, *self.others)]
        # those for gradients, and how many hooks there had been in this process when they were looked for
        self._for_gradients: list[dict[int, Any]] = []
        self._registered = -1
        self.adapted = any(map(is_lora_layer, modules))  # whether there are layers of PEFT's LoRA
        self._mixing = next(filter(None, map(_kind_that_mixes, modules)), None)

    def parameters(self) -> Iterator[Tensor]:
        """Yield the parameters that there are now, those that are tied more than once."""
        for attributes in self._flags:
            yield from filter(torch.is_tensor, attributes["_parameters"].values())

    def valid(self) -> bool:
        """Whether they have the same modules inside them."""
        return same(self._known, self._now())

    def obstacles(self, hooks: Hooks, model: nn.Module) -> Obstacles:
        """Return the parts that keep a call on HuggingFace's forward; ``hooks`` as just found in the ``model``."""
        hooked = self._first_of(hooks) if hooks else "all modules of the process" if hooks_on_all_modules() else None
        return Obstacles(hooked, self._mixing, self.training(model))

    def training(self, model: nn.Module) -> Difference | None:
        """Return the first module of the ``model`` that is in training mode and acts otherwise there, or None."""
        trains = any(map(dict.get, self._flags, repeat("training")))
        return training_difference([("", model), *self._named]) if trains else None

    def hooks(self) -> Hooks:
        """Return what tells hooks of inner modules apart, without those known to do nothing."""
        hooked = [held for held in self._inside if held["_forward_hooks"] or held["_forward_pre_hooks"]]
        of_forward = chain.from_iterable(map(_FORWARD_HOOKS, hooked))
        passed = {id(module._forward_hooks) for _, module in self._embeddings}
        return frozenset(
            (id(hooks), id(hook))
            for hooks in chain(of_forward, self._hooks_for_gradients())
            for hook in hooks.values()
            if not (captures_outputs(hook) or (id(hooks) in passed and asks_for_gradients(hook)))
        )

    def hooked_embeddings(self) -> list[list[str]]:
        """Return the paths of embeddings with forward hooks."""
        return [path for path, module in self._embeddings if module._forward_hooks]

    def _hooks_for_gradients(self) -> list[dict[int, Any]]:
        """Return those of inner modules, by module; every call asks, so they are sought once there may be another."""
        if (registered := hooks_registered()) != self._registered:
            both = chain.from_iterable(map(_HOOKS_FOR_GRADIENTS, self._inside))
            self._registered = registered
            self._for_gradients = [*filter(None, both)]
        return self._for_gradients

    def _first_of(self, hooks: Hooks) -> str:
        found = (
            f"{name}, by {author_of(hook)}"
            for name, module in self._named
            for held in (*_FORWARD_HOOKS(vars(module)), *_HOOKS_FOR_GRADIENTS(vars(module)))
            for hook in held.values()
            if (id(held), id(hook)) in hooks
        )
        return next(found, "a module that is gone")

    def _now(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(map(dict.values, self._children)))


def _kind_that_mixes(module: nn.Module) -> str | None:
    return next((kind for start, kind in _MIXING.items() if type(module).__module__.startswith(start)), None)


def _embeds(module: nn.Module) -> bool:
    """Whether a module is an embedding, or one that an adapter of PEFT's stands around."""
    return isinstance(getattr(module, "base_layer", module), nn.Embedding)


def has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def same(before: list[Any], now: list[Any]) -> bool:
    """Whether two lists hold the same objects in the same order."""
    return len(before) == len(now) and all(map(is_, before, now))
