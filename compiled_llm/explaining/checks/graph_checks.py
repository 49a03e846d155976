"""Looks for nodes that a compiled graph may contain and a CUDA graph may not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, fx

from compiled_llm.compat.torch.tensors import unbacked_symbols
from compiled_llm.compilation.program_list import PREFILL, PREFILL_ALONE
from compiled_llm.explaining.advice import advise_break, advise_change
from compiled_llm.explaining.findings import Finding
from compiled_llm.explaining.tracing import Trace
from compiled_llm.model.places import blame, stack_in


def uncapturable(trace: Trace, device: torch.device) -> Iterator[Finding]:
    """Yield findings on nodes that keep a program from being captured, or make the host wait for the device."""
    for graph in trace.graphs[:1]:
        yield from _data_dependent(graph, trace.name)
        if device.type == "cuda":
            yield from _on_the_cpu(graph, trace.name)
    if trace.name not in (PREFILL, PREFILL_ALONE):  # which is never captured
        yield from _mutated(trace)


def _data_dependent(graph: fx.GraphModule, program: str) -> Iterator[Finding]:
    known: set[object] = set()
    for node in graph.graph.nodes:
        value = node.meta.get("example_value")
        fresh = set() if value is None else set(_symbols(value)) - known
        if fresh:
            known |= fresh
            said = f"{_name(node)} makes a number or shape that only the device knows (unbacked)"
            place = blame(stack_in(node.meta.get("stack_trace") or ""))
            reason, advice = advise_break(said, place.source)
            yield Finding("no CUDA graph", place, reason, advice, (program,), detail=said)


def _symbols(value: object) -> Iterable[object]:
    values = value if isinstance(value, (tuple, list)) else [value]
    return [
        symbol
        for entry in values
        if isinstance(entry, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))
        for symbol in unbacked_symbols(entry)
    ]


def _on_the_cpu(graph: fx.GraphModule, program: str) -> Iterator[Finding]:
    for node in graph.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if isinstance(value, Tensor) and value.device.type == "cpu":
            user = next(iter(node.users), node)
            reason, advice = advise_change("on the CPU")
            place = blame(stack_in(user.meta.get("stack_trace") or ""))
            yield Finding("no CUDA graph", place, reason, advice, (program,), detail=f"{node.name} is on the CPU")


def _mutated(trace: Trace) -> Iterator[Finding]:
    for node in trace.mutated:
        place = blame(stack_in(node.meta.get("stack_trace") or ""))
        reason, advice = advise_change("mutated")
        yield Finding(
            "no CUDA graph", place, reason, advice, (trace.name,), detail=f"{_name(node)} writes to a mutated input"
        )


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
