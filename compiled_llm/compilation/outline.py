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

import functools
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from compiled_llm.compat import fake_tensors, is_compiled_for
from compiled_llm.model.attention import BATCH_ARGUMENT
from compiled_llm.model.modules import Children, InnerHooks, same
from compiled_llm.model.restore import same_attributes
from compiled_llm_ops.library import define

logger = logging.getLogger("compiled_llm.graphs")

# No forward reads the last one: whether HuggingFace has set a module's first weights.
_OF_EVERY_MODULE = (frozenset(vars(nn.Module())) - {"training"}) | {"_is_hf_initialized"}
_UNREAD_BY_LINEAR = frozenset({"training", "in_features", "out_features"})
_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device})


def _left_out(*_: Any) -> Tensor:
    raise RuntimeError("this layer was left out of a graph and not put back")


_begins = define(
    "layer_begins(Tensor hidden, Tensor[] own, int layer) -> Tensor",
    fake=lambda hidden, own, layer: torch.empty_like(hidden),
    cpu=_left_out,
    cuda=_left_out,
)
_ends = define(
    "layer_ends(Tensor hidden, int layer, int like) -> Tensor",
    fake=lambda hidden, layer, like: torch.empty_like(hidden),
    cpu=_left_out,
    cuda=_left_out,
)


class NoOutlineError(Exception):
    """The model must be traced whole; the message says why."""


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
        self._held = [_tensors_of(layer) for layer in self._all]
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
            _copy(layer, _marked(_class_of(layer)), _own=[], _number=number, _like=like)
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

    def watched(self, model: PreTrainedModel, watch: _Watch) -> PreTrainedModel:
        """Return the model with layers that tell ``watch`` what they do."""
        layers = [
            _copy(layer, _seen(_class_of(layer)), _watch=watch, _number=number)
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
            (name, type(module), *_attributes(module, number), *_tensors(module))
            for name, module in self._all[number].named_modules(remove_duplicate=False)
        )


class _State:
    """The attributes of modules, and the modules that they hold.

    Attributes:
        modules: all of them.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self._children = Children(modules)
        self._attributes = [vars(module) for module in modules]
        names = [(vars(module), name) for module in modules for name in _names(module)]
        self._holders, self._names = [held for held, _ in names], [name for _, name in names]
        self._known = self._now()
        self._held_at: int | None = None

    def hold(self, glance: int | None = None) -> bool:
        """Whether all is as it was; a glance looks once."""
        if glance is not None and glance == self._held_at:
            return True
        holds = self._children.hold() and same(self._known, self._now())
        self._held_at = glance if holds else None
        return holds

    def _now(self) -> list[Any]:
        values = map(dict.get, self._holders, self._names)
        return [*map(type, self.modules), *map(len, self._attributes), *values]


class KnownState:
    """How the layers of a model were when an outline looked at them: one state for all outlines that saw the same."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._state: _State | None = None

    def of(self, modules: Sequence[nn.Module]) -> _State:
        """Return the state of these modules as they are now."""
        known = self._state
        if known is None or not same([*known.modules], [*modules]) or not known.hold():
            known = self._state = _State(modules)
        return known


def _tensors_of(layer: nn.Module) -> list[dict[str, Any]]:
    """Return what holds the parameters and buffers of a layer."""
    held: list[dict[str, Any]] = []
    for module in layer.modules():
        held += module._parameters, module._buffers
    return held


def _names(module: nn.Module) -> list[str]:
    """Return the attributes that a module's code may read."""
    unread = _OF_EVERY_MODULE | _UNREAD_BY_LINEAR if type(module) is nn.Linear else _OF_EVERY_MODULE
    return [name for name in vars(module) if name not in unread]


def _attributes(module: nn.Module, number: int) -> list[Hashable]:
    """Describe a module's attributes: what is not plain is the same only where it is one object."""
    return [
        (name, "its number" if name == "layer_idx" and value == number else _plain(value))
        for name, value in ((name, vars(module)[name]) for name in _names(module))
    ]


def _tensors(module: nn.Module) -> list[Hashable]:
    return [(name, _layout(tensor)) for held in (module._parameters, module._buffers) for name, tensor in held.items()]


def _layout(tensor: Tensor | None) -> Hashable:
    if tensor is None:
        return None
    layout = tensor.shape, tensor.stride(), tensor.requires_grad
    return type(tensor), tensor.dtype, tensor.device, *layout


def _plain(value: Any) -> Hashable:
    if type(value) in _PLAIN:
        return type(value), value
    return (tuple, *map(_plain, value)) if type(value) is tuple else ("object", id(value))


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


# ---- what Dynamo sees


@functools.cache
def _marked(kind: Any) -> Any:
    """Return a class of layers between marks, which do nothing where another one stands for them."""

    def forward(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        hidden = _begins(hidden, self._own, self._number)
        if self._like == self._number:
            hidden = kind.forward(self, hidden, *args, **kwargs)
        ended: Tensor = _ends(hidden, self._number, self._like)
        return ended

    def call(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Without what ``nn.Module`` does around a forward, where there is none: it is traced as well."""
        called = kind.__call__ if self._like == self._number else forward
        out: Tensor = called(self, *args, **kwargs)
        return out

    return type(kind.__name__, (kind,), {"forward": forward, "__call__": call})


def fill(graph: fx.Graph) -> None:
    """Put each layer between its marks, and take the marks out; a graph without marks stays as it is."""
    begins = {node.args[2]: node for node in graph.find_nodes(op="call_function", target=_begins)}
    ends = graph.find_nodes(op="call_function", target=_ends)
    marks = {end.args[1]: _Marks(begins[end.args[1]], end) for end in ends}
    for _, end in list(marks.values()):
        _, number, like = end.args
        if like != number:
            _fill_like(graph, marks[number], marks[like])
    for mark in chain.from_iterable(marks.values()):
        mark.replace_all_uses_with(_hidden(mark))
        graph.erase_node(mark)


class _Marks(NamedTuple):
    begin: fx.Node
    end: fx.Node


def _fill_like(graph: fx.Graph, empty: _Marks, filled: _Marks) -> None:
    copies = dict(zip(_entries(filled), _entries(empty), strict=True))
    nodes = list(graph.nodes)
    with graph.inserting_before(empty.end):
        for node in nodes[nodes.index(filled.begin) + 1 : nodes.index(filled.end)]:
            copies[node] = graph.node_copy(node, lambda read: copies.get(read, read))
    out = _hidden(filled.end)
    empty.end.replace_input_with(empty.begin, copies.get(out, out))


def _hidden(mark: fx.Node) -> fx.Node:
    return cast(fx.Node, mark.args[0])


def _entries(marks: _Marks) -> list[fx.Node]:
    """Return what differs from layer to layer: what comes in, and the layer's own tensors."""
    return [marks.begin, *cast(list[fx.Node], marks.begin.args[1])]


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
        watch = _Watch([layers.own(number, pages) for number in range(len(pages))], faked)
        watched = layers.watched(model, watch)
        state = _State(list(watched.modules()))
        with same_attributes(watched), watch:
            program(**{**arguments, "model": watched})
            if not state.hold():
                raise NoOutlineError("the model changes its attributes")
    if len(watch.calls) != len(pages):
        raise NoOutlineError("not every layer of the list was called")
    layers.sort([(layers.describe(number), calls) for number, calls in enumerate(watch.calls)])
    return layers


@functools.cache
def _seen(kind: Any) -> Any:
    """Return a class of layers that tell a watch what they do."""

    def forward(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        inside = functools.partial(kind.forward, self)
        watch: _Watch = self._watch
        return watch.see(self._number, inside, hidden, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward})


class _Watch(TorchFunctionMode):
    """Sees what the layers of a model do in one run.

    Attributes:
        calls: for each layer the functions that it called, and on what.
    """

    def __init__(self, own: Sequence[Sequence[Tensor]], faked: Callable[[Any], Any]) -> None:
        """Nothing has been called yet.

        Args:
            own: each layer's tensors.
            faked: puts fake tensors in place of others, so that nothing is written to those.
        """
        super().__init__()
        self._faked = faked
        self.calls: list[Hashable] = []
        self._kept: list[object] = [own]  # so that nothing takes another's identity
        self._names: dict[int, tuple[int | None, str, tuple[int, ...]]] = {}  # a layer, and what it is to that
        self._layer: int | None = None
        self._lines: list[Hashable] = []
        for layer, tensors in enumerate(own):
            for number, tensor in enumerate(tensors):
                self._names[id(tensor)] = layer, "own", (number,)

    def see(self, layer: int, inside: Callable[..., Tensor], hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run a layer and note what it does.

        Raises:
            NoOutlineError: it is not the next one, or does not give what it takes, changed.
        """
        if layer != len(self.calls) or self._layer is not None:
            raise NoOutlineError("layers are not called one after the other")
        self._layer, self._lines = layer, []
        self._name(hidden, "hidden")
        others = {name: value for name, value in kwargs.items() if name != BATCH_ARGUMENT}
        self._lines.append((self._describe(args), self._describe(others), id(kwargs.get(BATCH_ARGUMENT))))
        out = inside(hidden, *args, **kwargs)
        if not isinstance(out, Tensor) or _layout(out) != _layout(hidden):
            raise NoOutlineError("a layer gives something else than it takes")
        self._lines.append(self._describe(out))
        self.calls.append(tuple(self._lines))
        self._names.pop(id(out))
        self._layer = None
        return out

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a call."""
        result = func(*self._faked(args), **self._faked(kwargs or {}))
        line = func, self._describe(args), self._describe(kwargs)
        if self._layer is not None:
            self._lines.append(line)
            for place, tensor in enumerate(result if isinstance(result, (tuple, list)) else [result]):
                if isinstance(tensor, Tensor) and id(tensor) not in self._names:
                    self._name(tensor, "made", len(self._lines), place)
        return result

    def _name(self, tensor: Tensor, what: str, *number: int) -> None:
        self._kept.append(tensor)
        self._names[id(tensor)] = self._layer, what, number

    def _describe(self, value: Any) -> Hashable:
        if isinstance(value, Tensor):
            return self._describe_tensor(value)
        if isinstance(value, (tuple, list)):
            return type(value), *map(self._describe, value)
        if isinstance(value, dict):
            return dict, *map(self._describe, value.items())
        if isinstance(value, slice):
            return slice, *map(self._describe, (value.start, value.stop, value.step))
        self._kept.append(value)
        return _plain(value)

    def _describe_tensor(self, tensor: Tensor) -> Hashable:
        self._kept.append(tensor)
        layer, what, number = self._names.get(id(tensor), (self._layer, "other", (id(tensor),)))
        if layer != self._layer and what == "made":
            raise NoOutlineError("a layer reads what another one has made")
        return what, number, None if layer == self._layer else layer
