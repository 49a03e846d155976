"""An outline of a model: layers that do the same are traced once, and put back into the graph behind Dynamo.

Dynamo takes longer to trace a model than everything behind it takes with warm caches, and it traces the same layer over
and over. So it is given shallow copies of the model and of the modules down to its layers, in which each layer stands
between two marks, and only the first of a kind does anything there. ``fill`` puts a copy of what that one does, with
their own weights and pages, between the marks of the others. The graph is then the one that Dynamo makes of the model.

Layers are of one kind if all their attributes are the same, and if a run on fake tensors right before tracing has seen
them call the same functions on the same things. Later, Dynamo's guards watch the first of a kind, whatever lies outside
the layers, and all tensors; the attributes of the layers that were left out are watched here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import chain
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from compiled_llm.compat import fake_tensors, is_compiled_for
from compiled_llm.compilation.layer_marks import marked_class
from compiled_llm.compilation.layer_state import (
    KnownState,
    State,
    described_attributes,
    described_tensors,
    tensors_of,
)
from compiled_llm.compilation.layer_tracer import LayerTracer, NoOutlineError, traced_class
from compiled_llm.model.modules import InnerHooks
from compiled_llm.model.restore import same_attributes

logger = logging.getLogger("compiled_llm.graphs")


class Outline:
    """What one program of a model is traced from.

    It is traced once. Whatever makes Dynamo trace again may have changed what the layers do, so from then on it is
    given the model itself.
    """

    def __init__(self, program: Callable[..., Any], known: KnownState) -> None:
        """Look at nothing yet.

        Args:
            program: what will be traced, made by ``own_copy``; it takes a ``model`` and its ``pages`` among others.
            known: what is known of the layers by all outlines of the model.
        """
        self._program = program
        self._known = known
        self._seen = False
        self._layers: _Layers | None = None

    def prepare(self, arguments: Mapping[str, Any]) -> PreTrainedModel:
        """Return what to call the program with in place of the model; the first time, see which layers are alike.

        Args:
            arguments: the program's, by name.
        """
        first, self._seen = not self._seen, True
        if first:
            self._layers = self._look(arguments)
        if self._layers is not None:
            self._layers.take_tensors(arguments["pages"])
        outline = self.of(arguments)
        if first or self._layers is None or is_compiled_for(self._program, {**arguments, "model": outline}):
            return outline
        self._trace_all("the program is traced again")
        return self.of(arguments)

    def of(self, arguments: Mapping[str, Any], glance: int | None = None) -> PreTrainedModel:
        """Return what stands for the model: itself from the moment that a layer has changed.

        Layers' tensors are those of the last call of ``prepare``. ``glance`` as in ``Guards``.
        """
        model: PreTrainedModel = arguments["model"]
        if self._layers is not None and not self._layers.hold(model, glance):
            self._trace_all("a layer has changed")
        return model if self._layers is None else self._layers.outline(model)

    def drop_tensors(self) -> None:
        """Hold the layers' tensors no longer, in case that the model has others by now."""
        if self._layers is not None:
            self._layers.drop_tensors()

    def _look(self, arguments: Mapping[str, Any]) -> _Layers | None:
        try:
            layers = _see(self._program, arguments, self._known)
        except Exception as error:  # of whatever kind: the model may be anything
            self._trace_all(f"{type(error).__name__}: {error}")
            return None
        logger.debug("%d of %d layers are traced, and stand for the others", len(set(layers.like)), len(layers.like))
        return layers

    def _trace_all(self, reason: str) -> None:
        self._layers = None
        logger.debug("all layers are traced from now on: %s", reason)


class _Layers:
    """The layers of a model, and which are alike.

    Attributes:
        like: for each the first one of its kind.
    """

    def __init__(self, model: nn.Module, count: int, known: KnownState) -> None:
        """Find the list of so many layers.

        Raises:
            NoOutlineError: there is none.
        """
        names = [name for name, found in model.named_modules() if type(found) is nn.ModuleList and len(found) == count]
        if not names:
            raise NoOutlineError(f"no list of {count} layers was found")
        self._path = names[0].split(".")
        self._list = cast(nn.ModuleList, model.get_submodule(names[0]))
        self._all = [*self._list]
        self._held = [tensors_of(layer) for layer in self._all]
        self._state = known.of(list(self._list.modules()))
        self._marked: list[nn.Module] = []
        self.like: list[int] = []

    def sort(self, kinds: Sequence[Hashable]) -> None:
        """Note each layer's kind.

        Raises:
            NoOutlineError: no two are alike.
        """
        first: dict[Hashable, int] = {}
        self.like = [first.setdefault(kind, number) for number, kind in enumerate(kinds)]
        if len(first) == len(kinds):
            raise NoOutlineError("no two layers are alike")
        self._marked = [
            _copy(layer, marked_class(_class_of(layer)), _own=[], _number=number, _like=like)
            for number, (layer, like) in enumerate(zip(self._all, self.like, strict=True))
        ]

    def hold(self, model: nn.Module, glance: int | None) -> bool:
        """Whether the layers are the model's, and as they were, tensors aside."""
        found: nn.Module | None = model
        for name in self._path:
            found = None if found is None else found._modules.get(name)
        return found is self._list and self._state.hold(glance)

    def own(self, number: int, pages: Sequence[Tensor]) -> list[Tensor]:
        """Return a layer's parameters, buffers and pages."""
        tensors = chain.from_iterable(map(dict.values, self._held[number]))
        return [*(tensor for tensor in tensors if tensor is not None), pages[number]]

    def take_tensors(self, pages: Sequence[Tensor]) -> None:
        """Let the outline have the tensors that the layers have now."""
        for number, layer in enumerate(self._marked):
            vars(layer)["_own"] = self.own(number, pages)

    def drop_tensors(self) -> None:
        """Let the outline have none."""
        for layer in self._marked:
            vars(layer)["_own"] = []

    def outline(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return the model with marks around all layers, and nothing in those that are left out."""
        return self.replaced(model, self._marked)

    def watched(self, model: PreTrainedModel, watch: LayerTracer) -> PreTrainedModel:
        """Return the model with layers that tell ``watch`` what they do."""
        layers = [
            _copy(layer, traced_class(_class_of(layer)), _watch=watch, _number=number)
            for number, layer in enumerate(self._all)
        ]
        return self.replaced(model, layers)

    def replaced(self, model: PreTrainedModel, layers: Sequence[nn.Module]) -> PreTrainedModel:
        """Return a shallow copy of the model with other layers."""
        replaced: PreTrainedModel = _with_children(
            model, self._path, {str(number): layer for number, layer in enumerate(layers)}
        )
        return replaced

    def describe(self, number: int) -> Hashable:
        """Return all that a layer's code may look at, whatever differs from layer to layer by nature left out."""
        return tuple(
            (name, type(module), *described_attributes(module, number), *described_tensors(module))
            for name, module in self._all[number].named_modules(remove_duplicate=False)
        )


# ---- shallow copies


def _copy(module: nn.Module, kind: type, **attributes: Any) -> Any:
    made: Any = object.__new__(kind)
    vars(made).update(vars(module), **attributes)
    return made


def _with_children(module: nn.Module, path: Sequence[str], layers: Mapping[str, nn.Module]) -> Any:
    """Return a copy of ``module`` in which the module at ``path`` holds ``layers``."""
    if not path:
        return _copy(module, type(module), _modules=dict(layers))
    name, *rest = path
    children = {**module._modules, name: _with_children(module.get_submodule(name), rest, layers)}
    return _copy(module, type(module), _modules=children)


def _class_of(layer: nn.Module) -> Any:
    return type(layer)


# ---- which layers are alike


def _see(program: Callable[..., Any], arguments: Mapping[str, Any], known: KnownState) -> _Layers:
    """Run the program on fake tensors and return which layers did the same.

    Raises:
        Exception: of any kind, where that cannot be told.
    """
    model, pages = arguments["model"], arguments["pages"]
    if InnerHooks().of(model):
        raise NoOutlineError("hooks may do anything")
    layers = _Layers(model, len(pages), known)
    with fake_tensors() as faked:
        watch = LayerTracer([layers.own(number, pages) for number in range(len(pages))], faked)
        watched = layers.watched(model, watch)
        state = State(list(watched.modules()))
        with same_attributes(watched), watch:
            program(**{**arguments, "model": watched})
            if not state.hold():
                raise NoOutlineError("the model changes its attributes")
    if len(watch.calls) != len(pages):
        raise NoOutlineError("not every layer of the list was called")
    layers.sort([(layers.describe(number), calls) for number, calls in enumerate(watch.calls)])
    return layers
