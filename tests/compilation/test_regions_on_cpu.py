"""On a CPU, regions have several layers: models with many of them compile in half of the time, and run as fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

import compiled_llm
from compiled_llm.compilation import backend
from compiled_llm.model.layer_probe import Layer, layers_alike
from support.parity import assert_account_is_empty, greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread")]

FULL, WINDOW = Layer(4, 2, 16, -1, 0.0), Layer(4, 2, 16, 6, 0.0)
OPTIONS: dict[str, Any] = {"page_size": 4, "kv_memory": "2000 tokens", "max_batch_size": 8, "progress": False}
PREFILL_AND_DECODE = 2


def check(model: Any, seed: int) -> None:
    inputs = mixed_prompts([5, 19, 11], 128, seed)
    expected = greedy(model, inputs, 12)
    compiled_llm.wrap(model, **OPTIONS)
    for _ in range(2):
        torch.testing.assert_close(greedy(model, inputs, 12), expected)
    stats = model.compiled.stats()
    assert (stats.graph_breaks, stats.recompiles) == (0, 0)
    assert_account_is_empty(model)


@pytest.mark.parametrize(
    ("windows", "regions"),
    [
        pytest.param([False] * 15, 1, id="few layers"),
        pytest.param([False] * 18, 3, id="one kind"),
        pytest.param(([True] * 4 + [False]) * 4, 3, id="two kinds in turns"),
    ],
)
def test_equal_regions_of_several_layers_are_compiled_once(windows, regions, seed, monkeypatch):
    compiled: list[fx.GraphModule] = []

    def noted(module: fx.GraphModule, inputs: Any, options: Any) -> Callable[..., Any]:
        compiled.append(module)
        return module.forward

    monkeypatch.setattr(backend, "compile_with_inductor", noted)
    kinds = [f"{'sliding' if window else 'full'}_attention" for window in windows]
    model = tiny_qwen3(
        num_hidden_layers=len(kinds), eos_token_id=None, layer_types=kinds, use_sliding_window=True, sliding_window=6
    )
    check(model, seed)
    assert len(compiled) == regions * PREFILL_AND_DECODE


@pytest.mark.slow
def test_compiled_regions_compute_what_huggingface_does(seed):
    check(tiny_qwen3(num_hidden_layers=17, eos_token_id=None), seed)


@pytest.mark.parametrize(
    ("layers", "together"),
    [
        ([FULL] * 30, 4),
        ([WINDOW, FULL] * 12, 4),
        (([WINDOW] * 5 + [FULL]) * 4, 6),
        ([FULL, FULL, WINDOW] * 6, 6),
        ([WINDOW, *[FULL] * 29], 30),
        ([FULL], 4),
    ],
)
def test_a_region_holds_whole_turns_of_layers(layers, together):
    assert layers_alike(layers, at_least=4) == together
