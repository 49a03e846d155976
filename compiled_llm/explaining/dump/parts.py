"""The parts of a model in a dump: modules, with layers that are alike taken together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from compiled_llm.explaining.dump.links import SourceLink

_LAYER = re.compile(r"(?P<list>.*)\.(?P<number>\d+)")


@dataclass(frozen=True)
class Part:
    """A module, or several layers that are alike.

    Attributes:
        modules: their paths, in the order in which they run; an empty one is what is around the model.
        links: of each module, what its lines became.
    """

    modules: list[str]
    links: list[list[SourceLink]]

    @property
    def title(self) -> str:
        """``model.layers.0-29, alike``."""
        if len(self.modules) == 1:
            return self.modules[0] or "around the model"
        numbers = ", ".join(_ranges([int(_number(module)) for module in self.modules]))
        return f"{self.modules[0].removesuffix(_number(self.modules[0]))}{numbers}, alike"

    @property
    def shown(self) -> int:
        """The number of the module that stands for all: the middle one, as ends are fused with what is around them."""
        return len(self.modules) // 2

    def figures(self) -> tuple[int, int, int]:
        """Return how many lines the one that is shown has, what nodes they became, and what kernels compute these."""
        links = self.links[self.shown]
        kernels = {kernel for link in links for kernel in link.kernels}
        return len(links), sum(len(link.nodes) for link in links), len(kernels)


def parts_of(links: Iterable[SourceLink]) -> list[Part]:
    """Return the parts of a model in the order in which they run first."""
    by_module: dict[str, list[SourceLink]] = {}
    for link in links:
        by_module.setdefault(link.layer, []).append(link)
    alike: dict[Any, Part] = {}
    for module, own in by_module.items():
        part = alike.setdefault(_signature(module, own), Part([], []))
        part.modules.append(module)
        part.links.append(own)
    return list(alike.values())


def _signature(module: str, links: Sequence[SourceLink]) -> Any:
    """Return what layers that are alike have in common: lines, and how many nodes each became.

    Kernels may differ even so: Inductor fuses a layer with what comes before and after it.
    """
    layer = _LAYER.fullmatch(module)
    became = tuple((link.module.removeprefix(module), link.place, len(link.nodes)) for link in links)
    return (layer["list"], became) if layer else module


def _number(module: str) -> str:
    return module.rpartition(".")[2]


def _ranges(numbers: list[int]) -> Iterator[str]:
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        first, *_, last = [number for _, number in run] * 2
        yield str(first) if first == last else f"{first}-{last}"
