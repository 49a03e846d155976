"""What the seconds of a start are spent on in this process, besides what it marks: some functions are timed."""

from __future__ import annotations

import functools
import importlib
import operator
import time
from collections import Counter
from typing import Any

_COMPILED_LLM = {
    "trial forwards": ("huggingface.wrap:layers_of", "huggingface.wrap:default_positions"),
    "artifacts checked and copied": ("compilation.artifacts.artifacts:Artifacts.read",),
    "kept programs read": ("compilation.programs:Programs.__init__",),
    "hashes compared": ("compilation.kept.prints:Prints.differences",),
    "kept code loaded": ("compilation.kept.take:_Taken.load",),
    "layers compared": ("compilation.tracing.outline:Outline._find_layers",),
    "graphs by Inductor": ("compilation.backend:Inductor._compiled",),
    "CUDA graphs captured": ("compilation.graphs.capture:GraphCapture._capture",),
}
_TORCH = {"Dynamo's frames, with the backend": ("torch._dynamo.convert_frame:_compile",)}


class Spent:
    """Seconds by what they were spent on; parts of one may be another, and threads count for themselves."""

    def __init__(self) -> None:
        """Begin to time; imports what is timed."""
        self.seconds: Counter[str] = Counter()
        own = {what: tuple(f"compiled_llm.{place}" for place in places) for what, places in _COMPILED_LLM.items()}
        for what, places in {**own, **_TORCH}.items():
            for place in places:
                self._time(what, place)

    def _time(self, what: str, place: str) -> None:
        module, _, path = place.partition(":")
        owner_path, _, name = path.rpartition(".")
        owner: Any = importlib.import_module(module)
        owner = operator.attrgetter(owner_path)(owner) if owner_path else owner
        held = vars(owner)[name]
        function = getattr(held, "__func__", held)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[what] += time.perf_counter() - start

        setattr(owner, name, classmethod(timed) if isinstance(held, classmethod) else timed)
