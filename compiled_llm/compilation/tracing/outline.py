"""Tracing equal layers once (regional tracing: torch's ``nested_compile_region``), from an outline of the model."""

# Dynamo takes longer to trace a model than all later stages take with warm caches, and it traces the same layer again
# and again. So we give it an outline: shallow copies of the model and of the modules down to its layers. In it each
# layer stands between two marks, and of several equal layers only the first does anything there. ``fill`` copies what
# that one does between the marks of the others, with their own weights and pages. The graph is then the one that Dynamo
# would have made of the model itself.
# Layers are equal if all their attributes are the same, and if a run on fake tensors right before tracing has seen them
# call the same functions on the same things. Later, Dynamo's guards check the layer that was traced, what lies outside
# the layers, and all tensors. They do not cover the layers that were not traced: ``ModelVersion.layers`` does.
# It saves seconds of each start, and ends when ``nested_compile_region`` takes ops that mutate, and user objects. The
# first was pytorch#186807, closed after torch 2.12 was cut; the second is pytorch#191781, open. Look at both again with
# each torch.

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from compiled_llm.compat.torch.dynamo import compiled_code
from compiled_llm.compat.torch.tensors import fake_tensors
from compiled_llm.compilation.tracing.layer_description import (
    describe_attributes,
    describe_tensors,
    layout,
    tensors_of,
)
from compiled_llm.compilation.tracing.layer_marks import listing_class, marked_class
from compiled_llm.compilation.tracing.layer_tracer import LayerTracer, NoOutlineError, traced_class
from compiled_llm.model.restore import attributes_restored
from compiled_llm.model.traced.shallow_copies import shallow_copy, with_another
from compiled_llm.model.version.model_version import ModelVersion
from compiled_llm.model.version.module_state import ModuleState
from compiled_llm.model.version.module_tree import ModuleTree

logger = logging.getLogger("compiled_llm.graphs")


class Prepared(NamedTuple):
    """The model or its outline, and the compiled code whose guards hold for it now; None if there is no such code."""

    model: PreTrainedModel
    code: Callable[..., Any] | None = None


class Outline:
    """The stand-in for a model that one program is traced from, used for one trace."""

    # A change that makes Dynamo trace again may have changed the layers' work, so from then on Dynamo is given the
    # model itself.

    def __init__(self, program: Callable[..., Any], version: ModelVersion, following: Sequence[int] = ()) -> None:
        """Outline ``program``, ``own_copy``'s; ``following`` names the layers of ``pages`` beyond all layers'."""
        self._program = program
        self._version = version
        self._following = following
        self._prepared = False
        self._layers: _Layers | None = None
        self._prepared_in = -1  # the one in which it was last prepared

    @property
    def is_current(self) -> bool:
        """Whether the model has not been checked since the last ``prepare``."""
        return self._prepared_in == self._version.checks

    def prepare(self, arguments: Mapping[str, Any]) -> Prepared:
        """Return the program's argument in place of the model; the first call finds out which layers are equal."""
        prepared = self._prepare(arguments)
        self._prepared_in = self._version.checks
        return prepared

    def _prepare(self, arguments: Mapping[str, Any]) -> Prepared:
        first, self._prepared = not self._prepared, True
        if first:
            self._layers = self._find_layers(arguments)
        if self._layers is not None:
            self._layers.take_tensors(_own_tensors(arguments, self._following))
        outline = self.of(arguments)
        code = compiled_code(self._program, {**arguments, "model": outline})
        if not (first or self._layers is None or code is not None):
            self._trace_all("the program is traced again")
            outline = self.of(arguments)
        return Prepared(outline, code)

    def refreshed(self, arguments: Mapping[str, Any]) -> PreTrainedModel:
        """Return the result of the last ``prepare``, with the tensors that the layers have now."""
        if self._layers is not None and not self.is_current:
            self._layers.take_tensors(_own_tensors(arguments, self._following))
        return self.standing_for(arguments["model"])

    def of(self, arguments: Mapping[str, Any]) -> PreTrainedModel:
        """Return the stand-in, with tensors as of ``prepare``, or the model itself once a layer has changed."""
        if self._layers is not None and self._layers.number != self._version.layers:
            self._trace_all("a layer has changed")
        return self.standing_for(arguments["model"])

    def standing_for(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return the result of the last ``prepare``, made again: a kept one would keep the model alive."""
        return model if self._layers is None else self._layers.outline(model)

    def drop_tensors(self) -> None:
        """Drop the layers' tensors, and changed layers, in case that the model has others by now."""
        self._prepared_in = -1
        if self._layers is None:
            return
        if self._layers.number == self._version.layers:
            self._layers.drop_tensors()
        else:
            self._trace_all("a layer has changed")

    def _find_layers(self, arguments: Mapping[str, Any]) -> _Layers | None:
        try:
            own = _own_tensors(arguments, self._following)
            layers = _compared_layers(self._program, arguments, own, self._version)
        except Exception as error:  # any: the model may be anything
            self._trace_all(f"{type(error).__name__}: {error}")
            return None
        logger.debug("%d of %d layers are traced, and stand for the others", len(set(layers.like)), len(layers.like))
        return layers

    def _trace_all(self, reason: str) -> None:
        self._layers = None
        logger.debug("all layers are traced from now on: %s", reason)


class _Layers:
    """The layers of a model, and which of them are equal."""

    # ``number`` is ``ModelVersion.layers``, as long as these are the model's layers, unchanged but for their tensors.
    # ``like`` has for each layer the number of the first that equals it, its own if there is none before it.

    def __init__(self, model: nn.Module, version: ModelVersion, count: int) -> None:
        """Find the list of ``count`` layers in a model, or in what stands for it; NoOutlineError if there is none."""
        self.number, named = version.layers, version.list_of_layers()
        if named is None or len(named[1]) != count:
            raise NoOutlineError(f"no list of {count} layers was found")
        self._path, self._all = named[0].split("."), [*model.get_submodule(named[0]).children()]
        self._tensors = [tensors_of(layer) for layer in self._all]
        self._marked: list[nn.Module] = []
        self.like: list[int] = []

    def compare(self, descriptions: Sequence[Hashable], beside: Sequence[tuple[None, ...] | None]) -> None:
        """Find equal layers by their descriptions; ``beside`` is what each returns in a tuple with its output."""
        self.like = _first_equal(descriptions)
        self._marked = [
            shallow_copy(layer, marked_class(_class_of(layer)), _tensors=[], _number=number, _like=like, _beside=own)
            for number, (layer, like, own) in enumerate(zip(self._all, self.like, beside, strict=True))
        ]

    def tensors(self, number: int, own: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        tensors = chain.from_iterable(map(dict.values, self._tensors[number]))
        return [*(tensor for tensor in tensors if tensor is not None), *own[number]]

    def take_tensors(self, own: Sequence[Sequence[Tensor]]) -> None:
        for number, layer in enumerate(self._marked):
            vars(layer)["_tensors"] = self.tensors(number, own)

    def drop_tensors(self) -> None:
        for layer in self._marked:
            vars(layer)["_tensors"] = []

    def outline(self, model: PreTrainedModel) -> PreTrainedModel:
        return self._with_layers(model, self._marked)

    def traced(self, model: PreTrainedModel, tracer: LayerTracer) -> PreTrainedModel:
        """Return the model with layers that report their calls to ``tracer``."""
        layers = [
            shallow_copy(layer, traced_class(_class_of(layer)), _tracer=tracer, _number=number)
            for number, layer in enumerate(self._all)
        ]
        return self._with_layers(model, layers)

    def _with_layers(self, model: PreTrainedModel, layers: Sequence[nn.Module]) -> PreTrainedModel:
        numbered = {str(number): layer for number, layer in enumerate(layers)}
        copied: PreTrainedModel = with_another(
            model, self._path, lambda found: shallow_copy(found, listing_class(_class_of(found)), _modules=numbered)
        )
        return copied

    def describe(self, number: int) -> Hashable:
        """Return all that a layer's code may read, without parts that differ from layer to layer by nature."""
        return tuple(
            (name, type(module), *describe_attributes(module, number), *describe_tensors(module))
            for name, module in self._all[number].named_modules(remove_duplicate=False)
        )


def _own_tensors(arguments: Mapping[str, Any], following: Sequence[int]) -> list[list[Tensor]]:
    """Return the arguments that belong to one layer, for each layer: its memories, and what its spec has."""
    pages, specs = arguments["pages"], arguments["specs"]
    count = len(pages) - len(following)
    of_layers = zip(pages[:count], specs, strict=False)
    own = [[memory, *(scale for scale in spec.scales if scale is not None)] for memory, spec in of_layers]
    for memory, layer in zip(pages[count:], following, strict=True):
        own[layer].append(memory)
    return own


def _compared_layers(
    program: Callable[..., Any], arguments: Mapping[str, Any], own: Sequence[Sequence[Tensor]], version: ModelVersion
) -> _Layers:
    """Run the program on fake tensors and return its layers, compared; errors of any type if they cannot be."""
    model = arguments["model"]
    if version.obstacles().hooked:
        raise NoOutlineError("hooks may do anything")
    layers = _Layers(model, version, len(own))
    descriptions = [(layers.describe(number), *map(layout, tensors)) for number, tensors in enumerate(own)]
    alike = _first_equal(descriptions)  # where none is, nothing has to be run to find that out
    with fake_tensors() as fakes:
        tensors = [layers.tensors(number, own) for number in range(len(own))]
        tracer = LayerTracer(tensors, alike, fakes)
        traced = layers.traced(model, tracer)
        tree, state = ModuleTree(traced, len(own)), ModuleState([*traced.modules()])
        with attributes_restored(traced), tracer:
            program(**{**arguments, "model": traced})
            if not (tree.valid() and state.has_its_dictionaries() and state.has_its_attributes()):
                raise NoOutlineError("the model changes its attributes")
    if len(tracer.calls) != len(own):
        raise NoOutlineError("not every layer of the list was called")
    layers.compare(list(zip(descriptions, tracer.calls, tracer.beside, strict=True)), tracer.beside)
    return layers


def _first_equal(entries: Sequence[Hashable]) -> list[int]:
    """Return for each entry the place of the first that equals it; NoOutlineError if each equals itself alone."""
    first: dict[Hashable, int] = {}
    found = [first.setdefault(entry, place) for place, entry in enumerate(entries)]
    if len(first) == len(entries):
        raise NoOutlineError("no two layers are alike")
    return found


def _class_of(layer: nn.Module) -> Any:
    return type(layer)
