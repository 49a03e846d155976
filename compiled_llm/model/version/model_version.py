"""One version of the model: the only place that says what we take for granted of it, and whether it still holds.

A wrapped model stays its user's, and nothing announces a change: an optimizer's step, ``.data = ...``, ``setattr``. So
we compare it with what we remember, each part at most once a *look*, when it is first asked for. A part that differs
gets another number, and is remembered as it is now. Whoever relies on a part keeps the number that it had then.

| part | what is compared | what another number leads to |
|---|---|---|
| ``tensors`` | modules; parameters, buffers, tensors in attributes: which, and where | ``GraphManager.check_model`` |
| ``layers`` | the layers' modules, classes and attributes, names and order of their tensors | ``Outline.of`` |
| ``values`` | both; other modules' attributes, entries of containers, writes to tensors | ``ModelRunner.look`` |

The first drops CUDA graphs, and lays weights that are multiplied as one out again. The second traces all layers, also
those that an equal one stood for. The third forgets the keys and values of earlier texts.

A look begins when a decode step is made (not when it is repeated), at each prefill, after code of the user's has run
(a streamer, a criterion, a processor), and every 0.1 s while an engine runs. Writes through ``.data`` or into tensors
of inference mode leave no trace, nor do changes inside objects of other kinds, in classes, closures and globals.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedModel

from compiled_llm.compat.forks import lock
from compiled_llm.model.version.contents import Contents
from compiled_llm.model.version.module_state import ModuleState
from compiled_llm.model.version.tensors import Tensors


class ModelVersion:
    """What a model is, compared with what it was; it keeps no model alive.

    Attributes:
        looks: how many have begun.
    """

    def __init__(self, model: PreTrainedModel, layers: int) -> None:
        """Remember each part when it is first asked for; ``layers`` is how many the model has."""
        self.looks = 0
        self._known = known = _Remembered()
        self._model = weakref.ref(model, lambda _: known.forget())
        self._layer_count = layers
        self._lock = lock()  # a runner may be made while the loop of another one runs
        self._numbers = itertools.count(1)
        self._tensors = self._layers = self._rest = 0

    def look(self) -> None:
        """Begin a look: all is compared again when it is next asked for."""
        with self._lock:
            self.looks += 1
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
            return max(self._tensors, self._layers, self._rest)

    def let_go(self) -> None:
        """Keep no tensors, nor modules that the model no longer has, until they are next asked for.

        A tensor that was replaced may share its memory with the new one, which would count as someone else's.
        """
        with self._lock:
            self.look()
            if self._known.layers is not None:
                self._compare_modules()
                self._compare_layers()
            self._known.let_go()

    def list_of_layers(self) -> tuple[str, nn.ModuleList] | None:
        """Return the model's list of layers and its name; None if there is none."""
        model = self._model()
        if model is None:
            return None
        lists = ((name, module) for name, module in model.named_modules() if type(module) is nn.ModuleList)
        return next((named for named in lists if len(named[1]) == self._layer_count), None)

    # ---- each at most once a look

    def _compare_modules(self) -> None:
        known = self._known
        if not known.is_due("modules") or known.has_its_modules():
            return
        named = self.list_of_layers()
        layers = [] if named is None else [*named[1].modules()]
        if not (known.layers is not None and known.layers.modules == layers and known.layers.has_its_modules()):
            known.layers, self._layers = ModuleState(layers), next(self._numbers)
        model, inside = self._model(), {*layers}
        others = [module for module in self._modules() if module is not model and module not in inside]
        known.let_go()
        known.others, self._rest = ModuleState(others, root=model), next(self._numbers)
        known.compared.add("modules")

    def _compare_tensors(self) -> None:
        known = self._known
        if known.is_due("tensors") and not (known.tensors is not None and known.tensors.valid()):
            known.tensors, self._tensors = Tensors(self._modules()), next(self._numbers)

    def _compare_layers(self) -> None:
        layers = self._known.layers
        assert layers is not None, "modules have been compared"
        if self._known.is_due("layers") and not layers.has_its_attributes():
            self._known.layers, self._layers = ModuleState(layers.modules), next(self._numbers)

    def _compare_rest(self) -> None:
        known, model = self._known, self._model()
        if not known.is_due("rest") or known.has_its_rest(type(model)):
            return
        assert known.others is not None, "modules have been compared"
        known.others, known.contents = ModuleState(known.others.modules, root=model), Contents(self._modules())
        known.kind, self._rest = type(model), next(self._numbers)

    def _modules(self) -> list[nn.Module]:
        model = self._model()
        return [] if model is None else [*model.modules()]


@dataclass
class _Remembered:
    """What is remembered of a model; ``compared`` are the parts that this look has compared."""

    layers: ModuleState | None = None
    others: ModuleState | None = None
    tensors: Tensors | None = None
    contents: Contents | None = None
    kind: type | None = None
    compared: set[str] = field(default_factory=set)

    def is_due(self, part: str) -> bool:
        """Return whether a part was not yet compared; from now on it was."""
        due = part not in self.compared
        self.compared.add(part)
        return due

    def has_its_modules(self) -> bool:
        layers, others = self.layers, self.others
        return layers is not None and layers.has_its_modules() and others is not None and others.has_its_modules()

    def has_its_rest(self, kind: type) -> bool:
        others, contents = self.others, self.contents
        valid = contents is not None and contents.valid() and others is not None and others.has_its_attributes()
        return valid and kind is self.kind

    def let_go(self) -> None:
        """Forget all but the layers."""
        self.others = self.tensors = self.contents = None
        self.compared.clear()

    def forget(self) -> None:
        self.layers = None
        self.let_go()
