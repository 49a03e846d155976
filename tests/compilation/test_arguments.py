"""Passes read what an op is given by name, so that a new argument cannot make them take one for another."""

from __future__ import annotations

import torch
from torch import fx

from compiled_llm.compilation.passes.arguments import arguments_of, set_arguments
from compiled_llm_ops.contracts.linear import AddRmsNorm


def test_arguments_have_their_names_whether_positional_or_not_and_defaults_are_filled_in() -> None:
    graph = fx.Graph()
    states, update, weight = map(graph.placeholder, ("states", "update", "weight"))
    op = torch.ops.compiled_llm.add_rms_norm.default
    node = graph.call_function(op, (states, update), {"epsilon": 0.5, "weight": weight})
    assert arguments_of(node, AddRmsNorm) == AddRmsNorm(states, update, weight, 0.5, False)
    set_arguments(node, arguments_of(node, AddRmsNorm)._replace(overlap=True))
    assert (node.args, node.kwargs) == ((states, update, weight, 0.5, True), {})
