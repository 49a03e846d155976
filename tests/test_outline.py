"""Layers that are alike are traced once: the graph is that of the whole model, and every later change is noticed."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

import compiled_llm
from compiled_llm import compile as programs
from compiled_llm import inductor, outline
from compiled_llm.outline import Outline
from compiled_llm.pieces import Examples, cut, without_symbols
from conftest import tiny_llama, tiny_qwen3
from parity import assert_account_is_empty, greedy, mixed_prompts
from test_families import FAMILIES, make

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread")]

OPTIONS: dict[str, Any] = {"page_size": 4, "kv_memory": "2000 tokens", "max_batch_size": 8, "progress": False}
LAYERS = 5


class Graphs(list[fx.GraphModule]):
    """What comes out of Dynamo, filled, and how many layers of it were traced."""

    traced: list[int]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """Programs are outlined where they are recorded, which is on CUDA; here they run as Dynamo has made them."""
    given = Graphs()
    given.traced = []

    class Backend(inductor.Inductor):
        def __init__(self, *args: Any, in_pieces: bool) -> None:
            super().__init__(*args, in_pieces=True)

        def _compile_pieces(self, module: fx.GraphModule) -> Callable[..., Any]:
            given.append(module)
            module.recompile()
            return module.forward

    def fill(graph: fx.Graph) -> None:
        ends = graph.find_nodes(op="call_function", target=outline._ends)
        given.traced.append(len({node.args[2] for node in ends}))
        outline.fill(graph)

    monkeypatch.setattr(programs, "Inductor", Backend)
    monkeypatch.setattr(inductor, "fill", fill)
    return given


def model_of(**overrides: Any) -> PreTrainedModel:
    return tiny_qwen3(num_hidden_layers=LAYERS, eos_token_id=None, **overrides)


def descriptions(module: fx.GraphModule) -> list[str]:
    examples, found = Examples(module), []
    for piece in cut(module):
        description = piece.describe(examples.of(piece))
        examples.follow(piece, description)
        found.append(without_symbols(description))
    return found


def inputs_to(module: fx.GraphModule) -> list[tuple[str, ...]]:
    """For each attention the sources of the weights and pages around it."""
    return [tuple(_name(node) for node in piece.takes if node.op == "placeholder") for piece in cut(module)]


def _name(node: fx.Node) -> str:
    source = node.meta["grapharg"].source.name
    return source() if callable(source) else source


# ---- the graph


@pytest.mark.parametrize("fuse", [False, True], ids=["apart", "fused"])
def test_what_is_filled_in_is_what_the_whole_would_have_been(fuse, graphs, monkeypatch, seed):
    inputs, tokens = mixed_prompts([5, 9], 128, seed), []
    for whole in (False, True):
        if whole:
            monkeypatch.setattr(Outline, "prepare", lambda self, arguments: arguments["model"])
        model = compiled_llm.wrap(model_of(), **OPTIONS, fuse_projections=fuse)
        tokens.append(greedy(model, inputs, 6, output_logits=True, return_dict_in_generate=True))
    assert graphs.traced == [1, 1, 0, 0]
    for outlined, whole in zip(graphs[:2], graphs[2:], strict=True):
        assert descriptions(outlined) == descriptions(whole)
    assert torch.equal(tokens[0].sequences, tokens[1].sequences)
    assert all(map(torch.equal, tokens[0].logits, tokens[1].logits))
