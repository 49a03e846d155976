"""Classes of other libraries, as objects: a name may be that of another library's class, or of a user's."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn

from compiled_llm.compat.known_functions import has_its_own_forward, is_defined_in


class LibraryClasses:
    """Classes by the places where they lie, whose libraries are not imported to ask about them."""

    def __init__(self, *places: str, forwards: Sequence[str] = ()) -> None:
        """Take places as ``"torch.nn.Linear"``, and the modules whose functions their library puts as ``forward``."""
        self.places, self._forwards, self._added = places, forwards, list[type]()

    def add(self, kind: type) -> None:
        """Take one more class for the library's: one that is laid out as its own, as those of benchmarks and tests."""
        self._added.append(kind)

    def found(self) -> tuple[type, ...]:
        """Return the classes of modules that were imported; of others no object can be."""
        places = (place.rpartition(".") for place in self.places)
        classes = (getattr(sys.modules.get(module), name, None) for module, _, name in places)
        return (*(found for found in classes if isinstance(found, type)), *self._added)

    def have(self, value: object) -> bool:
        """Whether an object is of one of the classes, or of one that derives from it."""
        return isinstance(value, self.found())

    def why_another(self, module: nn.Module) -> str | None:
        """Return why a module may compute something else than these do; None if its class and forward are theirs."""
        kind = type(module)
        if kind not in self.found():
            return f"{torch.typename(module)} is a class of its own"
        replaced = vars(module).get("forward")
        theirs = replaced is None or any(is_defined_in(name, replaced) for name in self._forwards)
        return None if theirs and has_its_own_forward(kind) else "its forward was replaced"
