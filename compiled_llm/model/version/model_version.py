"""One version of the model: the only place that says what we take for granted of it, and whether it still holds.

A wrapped model stays its user's, and nothing announces a change: an optimizer's step, ``.data = ...``, ``setattr``. So
we compare it with what we remember, each part at most once a *check*, when it is first asked for. A part that differs
gets another number, and is remembered as it is now. Whoever relies on a part keeps the number that it had then.

| part | what is compared | who acts on a change |
|---|---|---|
| ``tensors`` | modules; parameters, buffers, tensors in attributes: which, and where | ``GraphManager.check_model`` |
| ``layers`` | the layers' modules, classes and attributes, names and order of their tensors | ``Outline.of`` |
| ``code`` | ``forward`` of all classes; methods and torch's functions, if traced | ``GraphManager.check_model`` |
| ``values`` | these; other modules' attributes, containers, writes to tensors | ``ModelRunner.forget_changed`` |
| ``placement`` | device, dtype, the hooks of inner modules | ``ModelRunnerLifecycle.current`` |
| ``probed`` | configs, attributes of attention and what is around it | ``ModelRunnerLifecycle.placement`` |

The first drops CUDA graphs, and lays weights that are multiplied as one out again. The second traces all layers, also
those that an equal one stood for. The third compiles all programs again, the fourth forgets the keys and values of
earlier texts. The fifth makes another model runner, the last runs the probes of ``wrap`` again; these are no part of a
check, but compared whenever they are asked for, by any thread: that is before a path is chosen, together with the
``obstacles`` to ours.

A check begins with the first step of a call, with the next one after code of the user's has run (a streamer, a
criterion, a processor) and said so (``expect_changes``), before anything is compiled, and every 0.1 s while an engine
runs. Writes through ``.data`` or into tensors of inference mode leave no trace, nor do changes inside objects of other
kinds, on classes, in closures and globals, unless traced hooks read them (``users_code``).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from compiled_llm.compat.forks import lock
from compiled_llm.compat.torch.tensors import addresses_of
from compiled_llm.model.version.code import Code, Place, places_of
from compiled_llm.model.version.contents import Contents
from compiled_llm.model.version.module_state import ModuleState
from compiled_llm.model.version.module_tree import Hooks, ModuleTree, Obstacles
from compiled_llm.model.version.probed_state import ProbedState, probed_words
from compiled_llm.model.version.tensors import Tensors
from compiled_llm.model.version.training import Difference
from compiled_llm.model.version.users_code import parts_of


class Placement(NamedTuple):
    """The place of a model, its type, and what tells the hooks inside it apart from others."""

    device: torch.device
    dtype: torch.dtype
    hooks: Hooks


class ModelVersion:
    """A comparison of a model with what it was; it keeps no model alive."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: int,
        walked: Callable[[PreTrainedModel], None] = lambda model: None,
        code: Callable[[], Sequence[object]] = tuple,
    ) -> None:
        """Remember each part when it is first asked for; only a weak reference to the model is kept."""
        # ``walked`` is called with the model at the first walk over its modules, and whenever modules were replaced.
        # ``code`` returns functions of the user's that its programs run besides its modules; the same sequence until
        # they are others.
        self.checks = 0  # how many have begun
        self.let_gos = 0  # how often all was dropped that the model is compared with
        # an object of its own for each time that code of the user's may have changed the model
        self.expected = object()
        self._known = known = _Remembered()
        self._model = weakref.ref(model, lambda _: known.forget())
        self._layer_count = layers
        self._walked = walked
        self._code_of_user = code
        self._lock = lock()  # a runner may be made while the loop of another one runs
        self._numbers = itertools.count(1)
        self._code = Code()
        self._probed_words: tuple[str, ...] = ()
        self._tensors = self._layers = self._rest = self._form = self._functions = self._read = 0
        self._remembered_at = self._probed = 0

    def expect_changes(self) -> None:
        """Note that code of the user's may have changed the model: the next step checks it."""
        self.expected = object()

    def begin_check(self) -> None:
        """Begin a check: all is compared again when it is next asked for."""
        with self._lock:
            self.checks += 1
            self._known.compared.clear()

    @property
    def tensors(self) -> int:
        """Another number whenever there are other tensors, or they are elsewhere."""
        with self._lock:
            self._compare_modules()
            self._compare_tensors()
            return self._tensors

    @property
    def layers(self) -> int:
        """Another number whenever the layers' code may do something else, but for the values of their tensors."""
        with self._lock:
            self._compare_modules()
            self._compare_layers()
            return self._layers

    @property
    def values(self) -> int:
        """Another number whenever the model may compute something else."""
        with self._lock:
            self._compare_modules()
            self._compare_tensors()
            self._compare_layers()
            self._compare_rest()
            self._compare_code()
            number = max(self._tensors, self._layers, self._rest, self._functions, self._read)
            if number != self._remembered_at:  # attributes may hold other containers and tensors now
                self._known.tensors = Tensors(self._modules())
                self._known.contents = Contents.in_modules(self._modules())
                self._remembered_at = number
            return number

    @property
    def form(self) -> int:
        """Another number whenever the model may compute something else, but for writes to tensors, and other tensors.

        And after ``let_go``, which leaves nothing to compare with.
        """
        _ = self.values
        with self._lock:
            return max(self._layers, self._form, self._functions, self._read)

    def take_in_tensors(self) -> int:
        """Return ``tensors`` as of now; those that attributes have got meanwhile are compared from now on, too."""
        with self._lock:
            self._known.compared.clear()
            self._compare_modules()
            self._compare_tensors()
            self._known.tensors = Tensors(self._modules())
            return self._tensors

    @property
    def code(self) -> int:
        """Another number whenever a function was replaced in a place that is watched."""
        with self._lock:
            self._compare_code()
            return self._functions

    def change_code(self) -> None:
        """Let ``code`` be another number: programs are to do something else."""
        with self._lock:
            self._functions = next(self._numbers)

    def watch_code(self, places: Iterable[Place]) -> None:
        """Watch more places, as they are now."""
        with self._lock:
            self._code.watch(places)

    def let_go(self) -> None:
        """Drop the remembered tensors, and modules that the model no longer has; the next comparison remembers anew."""
        # A tensor that was replaced may share its memory with the new one, which would count as someone else's.
        with self._lock:
            self.let_gos += 1
            self.begin_check()
            if self._known.layers is not None:
                self._compare_modules()
                self._compare_layers()
            self._known.let_go()

    def list_of_layers(self) -> tuple[str, nn.ModuleList] | None:
        """Return the model's list of layers with its name; None if there is none."""
        with self._lock:
            return self._tree().list_of_layers

    @property
    def adapted(self) -> bool:
        """Whether the model has layers of PEFT's LoRA."""
        with self._lock:
            return self._tree().adapted

    def classes(self) -> set[type[nn.Module]]:
        """Return the classes of the model and of its modules."""
        return {*map(type, self._modules())}

    # ---- at any moment, from any thread

    @property
    def probed(self) -> int:
        """Another number whenever the probes of ``wrap`` may find something else in the model."""
        model, known = self._require_model(), self._known
        with self._lock:
            if known.probed is None or not known.probed.valid():
                state, now = ProbedState(model), probed_words(model)
                if now != self._probed_words:
                    self._probed = next(self._numbers)
                    self._probed_words = now
                known.probed = state
            return self._probed

    @property
    def placement(self) -> Placement:
        """Where the model is, of what type, and the hooks that would be compiled into its programs."""
        self._require_model()
        with self._lock:
            tree = self._tree()
            dtype = next(parameter.dtype for parameter in tree.parameters() if parameter.is_floating_point())
            return Placement(next(tree.parameters()).device, dtype, tree.hooks())

    def obstacles(self, placement: Placement | None = None) -> Obstacles:
        """Return the parts that keep a call on HuggingFace's forward; ``placement`` if that was just asked for."""
        with self._lock:
            tree = self._tree() if placement is None else self._known.tree or self._tree()
            return tree.obstacles(tree.hooks() if placement is None else placement.hooks, self._require_model())

    def training(self) -> Difference | None:
        """Return a module that acts otherwise in training mode, if the model as a whole is in it."""
        model = self._require_model()
        if not model.training:  # mostly; ``obstacles`` looks at each module
            return None
        with self._lock:
            return self._tree().training(model)

    def hooked_embeddings(self) -> list[list[str]]:
        """Return the paths of embeddings with forward hooks, in the modules that there were at the last comparison."""
        with self._lock:
            return (self._known.tree or self._tree()).hooked_embeddings()

    # ---- each at most once a check; numbers change before what is remembered does, so that no interrupt loses a change

    def _compare_modules(self) -> None:
        known = self._known
        if "modules" in known.compared:
            return
        tree = self._tree()
        if known.layers is None or not known.layers.has_its_dictionaries():
            known.tensors = known.contents = None
            self._layers = next(self._numbers)
            known.layers = ModuleState(tree.layers)
        if known.others is None or not known.others.has_its_dictionaries():
            known.tensors = known.contents = None
            self._rest = self._form = next(self._numbers)
            known.others = ModuleState(tree.others, root=self._model())
        known.compared.add("modules")

    def _compare_tensors(self) -> None:
        known = self._known
        if not known.is_due("tensors"):
            return
        self._compare_code_of_user()
        held = [] if known.read is None else addresses_of(known.read.tensors)
        if known.tensors is None or held != known.held or not known.tensors.valid():
            self._tensors = next(self._numbers)
            known.tensors = Tensors(self._modules())
            known.held = held

    def _compare_code_of_user(self) -> None:
        known, functions = self._known, self._code_of_user()
        if functions is known.functions and (known.read is None or known.read.valid()):
            return
        self._read = next(self._numbers)
        known.functions = functions
        known.read = Contents(functions, parts_of, outside=self._modules()) if functions else None

    def _compare_layers(self) -> None:
        layers = self._known.layers
        assert layers is not None, "modules have been compared"
        if self._known.is_due("layers") and not layers.has_its_attributes():
            self._layers = next(self._numbers)
            self._known.layers = ModuleState(layers.modules)

    def _compare_rest(self) -> None:
        known, model = self._known, self._model()
        if not known.is_due("rest"):
            return
        if known.has_its_rest(type(model)):
            return
        assert known.others is not None, "modules have been compared"
        number = next(self._numbers)
        if not known.has_its_form(type(model)):
            self._form = number
        self._rest = number
        known.others = ModuleState(known.others.modules, root=model)
        known.contents = Contents.in_modules(self._modules())
        known.kind = type(model)

    def _compare_code(self) -> None:
        if self._known.is_due("code") and not self._code.valid():
            self._functions = next(self._numbers)
            self._code.remember()

    def _tree(self) -> ModuleTree:
        """Return the modules as they are now; what was remembered of others is forgotten."""
        known = self._known
        if known.tree is None or not known.tree.valid():
            model = self._require_model()
            self._walked(model)
            known.tree = ModuleTree(model, self._layer_count)
            self._code.watch(places_of(self.classes()))
            known.probed = None
            if known.layers is not None and known.layers.modules != known.tree.layers:
                known.layers = None
            known.let_go()
        return known.tree

    def _modules(self) -> list[nn.Module]:
        return [*self._require_model().modules()]

    def _require_model(self) -> PreTrainedModel:
        model = self._model()
        if model is None:
            raise RuntimeError("the model of this cache or runner no longer exists")
        return model


@dataclass
class _Remembered:
    """A model's parts as they were; ``compared`` names those that the current check has compared already."""

    # ``functions`` are the user's, which ``read`` this; ``held`` has the addresses of the tensors in it.

    tree: ModuleTree | None = None
    layers: ModuleState | None = None
    others: ModuleState | None = None
    tensors: Tensors | None = None
    contents: Contents | None = None
    probed: ProbedState | None = None
    kind: type | None = None
    functions: Sequence[object] = ()
    read: Contents | None = None
    held: list[int] = field(default_factory=list)
    compared: set[str] = field(default_factory=set)

    def is_due(self, part: str) -> bool:
        """Return whether a part was not yet compared; from now on it was."""
        due = part not in self.compared
        self.compared.add(part)
        return due

    def has_its_rest(self, kind: type) -> bool:
        return self.contents is not None and self.contents.valid() and self._has_its_others(kind)

    def has_its_form(self, kind: type) -> bool:
        """Return whether the rest is the same, but for writes to tensors."""
        return self.contents is not None and self.contents.same_objects() and self._has_its_others(kind)

    def _has_its_others(self, kind: type) -> bool:
        return self.others is not None and self.others.has_its_attributes() and kind is self.kind

    def let_go(self) -> None:
        """Forget all but the modules, and the state of the layers."""
        self.others = self.tensors = self.contents = self.read = None
        self.functions = ()
        self.compared.clear()

    def forget(self) -> None:
        self.tree = self.layers = self.probed = None
        self.let_go()
