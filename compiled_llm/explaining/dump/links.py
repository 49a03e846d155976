"""From a line of source to the graph nodes that it became, and to the kernels that compute them; part by part."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import fx

from compiled_llm.model.places import Place, blame, stack_in

KERNELS = re.compile(r"\[Provenance debug handles\] (?P<name>\S+:\d+)")
NODES = re.compile(r"^\s+(?P<name>\w+)(?:: .*?)? = ")
_LAYER = re.compile(r"(?P<list>.*)\.(?P<number>\d+)")


@dataclass
class SourceLink:
    """A line of source in one module, with the nodes and kernels that it became."""

    module: str  # the path of the module that ran it; empty around the model
    place: Place
    nodes: list[str]  # names in Dynamo's graph
    kernels: list[str]  # names in Inductor's code, each with the number of its first call

    @property
    def layer(self) -> str:
        """The module's path up to the number of its layer; the whole of it outside of layers."""
        match = re.match(r".*?\.\d+(?=\.|$)", self.module)
        return match[0] if match else self.module


def links_of(graph: fx.GraphModule, provenance: Mapping[str, Any]) -> list[SourceLink]:
    """Return the lines of Dynamo's graph in the order in which they run, by Inductor's ``provenance``, if any."""
    lines: dict[tuple[str, Place], tuple[list[str], dict[str, str]]] = {}
    for node in graph.graph.nodes:
        if node.op.startswith("call"):
            line = _module_of(node), blame(stack_in(node.meta.get("stack_trace") or ""))
            nodes, kernels = lines.setdefault(line, ([], {}))
            nodes.append(node.name)
            for kernel in kernels_of(node.name, provenance):
                kernels.setdefault(_without_call(kernel), kernel)
    return [SourceLink(*line, nodes, list(kernels.values())) for line, (nodes, kernels) in lines.items()]


def kernels_of(node: str, provenance: Mapping[str, Any]) -> Iterator[str]:
    for post in provenance.get("preToPost", {}).get(node, ()):
        for kernel in provenance.get("postToCppCode", {}).get(post, ()):
            if _computes(kernel, post):
                yield kernel


def _without_call(kernel: str) -> str:
    return kernel.partition(":")[0]


def _computes(kernel: str, post: str) -> bool:
    """Whether the kernel does the node's own work: Inductor traces a library's kernel back to all of its inputs too."""
    if not kernel.startswith(("torch.ops.", "extern_kernels.")):
        return True
    parts = _without_call(kernel).split(".")
    operator = parts[3] if parts[0] == "torch" else parts[1]
    return post.startswith((operator, f"add{operator}"))


def _module_of(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return ""
    path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", str(stack[-1][0]))
    return re.sub(r"^L?\.?model\.", "", path)


def lines_of(names: re.Pattern[str], code: str) -> dict[str, int]:
    """Return the first line of each name: of ``NODES`` in a printed graph, or of ``KERNELS`` in Inductor's code."""
    lines: dict[str, int] = {}
    for number, line in enumerate(code.split("\n"), 1):
        if match := names.search(line):
            lines.setdefault(match["name"], number)
    return lines


@dataclass(frozen=True)
class Part:
    """A module, or several layers that are alike: their paths in the order in which they run, and the links of each."""

    modules: list[str]
    links: list[list[SourceLink]]

    @property
    def title(self) -> str:
        """Such as ``model.layers.0-29, alike``."""
        if len(self.modules) == 1:
            return self.modules[0] or "around the model"
        layers = [module.rpartition(".") for module in self.modules]
        numbers = ", ".join(_ranges([int(number) for *_, number in layers]))
        return f"{layers[0][0]}.{numbers}, alike"

    @property
    def shown(self) -> int:
        """The number of the module that stands for all: the middle one, as ends are fused with what is around them."""
        return len(self.modules) // 2


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
    # Without kernels, as Inductor fuses a layer with what comes before and after it.
    layer = _LAYER.fullmatch(module)
    became = tuple((link.module.removeprefix(module), link.place, len(link.nodes)) for link in links)
    return (layer["list"], became) if layer else module


def _ranges(numbers: list[int]) -> Iterator[str]:
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        first, *_, last = [number for _, number in run] * 2
        yield str(first) if first == last else f"{first}-{last}"
