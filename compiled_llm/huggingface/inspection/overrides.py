"""The user's replacements of HuggingFace's functions, looked up in every call, so that a removed one counts."""

# A wrapped model's class stands before the user's own, so the user's class is the base of a wrapped model's class. This
# is no part of ``ModelVersion``: what counts is what is overridden now, not whether that has changed, and names of
# HuggingFace's belong to this room. The functions found last are kept because to judge one takes longer than to find
# it.

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from compiled_llm.compat.huggingface import STOOD_IN_FOR, is_stood_in_for
from compiled_llm.compat.known_functions import author_of, forward_called
from compiled_llm.compat.torch.dynamo import is_compiled_in_place

_NAMES = frozenset(STOOD_IN_FOR)


class Overrides:
    """The functions that our loops stand in for and the user has replaced."""

    def __init__(self) -> None:
        self._known: tuple[tuple[Any, ...], tuple[str, ...]] = (), ()

    def of(self, model: PreTrainedModel) -> tuple[str, ...]:
        """Return the names of those that a wrapped model's own class, or the object itself, overrides."""
        names = self._of_class(_own_class(model))
        if _NAMES.isdisjoint(vars(model)):
            return names
        return names + tuple(name for name in STOOD_IN_FOR if name in vars(model) and not _is_the_classs(model, name))

    def _of_class(self, own: type) -> tuple[str, ...]:
        functions = tuple([getattr(own, name, None) for name in STOOD_IN_FOR])
        known, names = self._known
        if functions != known:
            both = zip(STOOD_IN_FOR, functions, strict=True)
            names = tuple(name for name, function in both if not (function is None or is_stood_in_for(function)))
            self._known = functions, names
        return names


def own_forward(model: PreTrainedModel) -> str | None:
    """Return whose forward runs in place of that of the model's class, or None; the class's is compiled."""
    # Known functions of trainers do nothing beside the forward that they call, in calls like ours.
    if (found := forward_of_object(model)) is None or is_compiled_in_place(model):
        return found
    return None if _is_classs(model, "forward", forward_called(vars(model)["forward"])) else found


def forward_of_object(model: PreTrainedModel) -> str | None:
    """Return whose forward calls of the object run, if not that of the model's class, also if it does no more."""
    if is_compiled_in_place(model):
        return "model.compile()"
    if "forward" not in vars(model) or _is_the_classs(model, "forward"):
        return None
    return f"model.forward: {author_of(vars(model)['forward'])}"


def forget_restored_forward(model: PreTrainedModel) -> None:
    """Remove an attribute ``forward`` that is the method of the model's class anyway."""
    # accelerate leaves it when its hooks are removed. If they were there before ``wrap``, it is the method of the class
    # that the model had then, and hides ours.
    if "forward" in vars(model) and _is_the_classs(model, "forward"):
        del vars(model)["forward"]


def _own_class(model: PreTrainedModel) -> type:
    return type(model).__bases__[-1]  # as ``wrapped_class`` put them


def _is_the_classs(model: PreTrainedModel, name: str) -> bool:
    """Whether an attribute of the object is only the method of its class."""
    value = vars(model)[name]
    return getattr(value, "__self__", None) is model and _is_classs(model, name, value)


def _is_classs(model: PreTrainedModel, name: str, value: object) -> bool:
    """Whether a function is a method of the model's class, or the function in it that decorators wrap."""
    # Bound to another model, it is not. accelerate binds the innermost one when it takes its own wrappers off.
    method = getattr(type(model), name, None)
    while method is not None:
        if getattr(value, "__func__", value) is method:
            return getattr(value, "__self__", model) is model
        method = getattr(method, "__wrapped__", None)
    return False
