"""On a CPU, regions have several layers, and of models with many layers equal ones are compiled once."""

from __future__ import annotations

import pytest
from torch import fx

from compiled_llm.compilation import programs as programs
from compiled_llm.compilation.program_list import PREFILL
from compiled_llm.compilation.regions import layers_in_equal_regions
from compiled_llm.kinds.full import Full
from compiled_llm.kinds.kind import Layer
from support.compilation.left_uncompiled import leave_uncompiled
from support.compilation.traced import graphs_for_inductor
from support.huggingface.recurrent_families import recurrent_model
from support.parity import wrap_and_compare
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread")]

FULL, WINDOW = Layer(4, 2, 16, -1, 0.0, Full()), Layer(4, 2, 16, 6, 0.0, Full())
PREFILL_AND_DECODE = 2


def noted_graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """Return the graphs that Inductor is given from now on; they run as they are, with two layers in a region."""
    compiled = graphs_for_inductor(monkeypatch)
    monkeypatch.setattr(programs, "_LAYERS_IN_REGION_ON_CPU", 2)  # fewer layers are to be traced
    return compiled


@pytest.mark.parametrize(
    ("windows", "regions"),
    [
        pytest.param([False] * 7, 1, id="few layers", marks=pytest.mark.whole),
        pytest.param([False] * 9, 3, id="one kind"),
        pytest.param([True, True, False] * 4, 3, id="two kinds in turns", marks=pytest.mark.whole),
    ],
)
def test_equal_regions_of_several_layers_are_compiled_once(windows, regions, seed, monkeypatch, whole):
    """Without --whole in decode steps; test_regions.py has the prefills."""
    compiled = noted_graphs(monkeypatch)
    if not whole:
        leave_uncompiled(monkeypatch, PREFILL)
    kinds = [f"{'sliding' if window else 'full'}_attention" for window in windows]
    model = tiny_qwen3(
        num_hidden_layers=len(kinds), eos_token_id=None, layer_types=kinds, use_sliding_window=True, sliding_window=6
    )
    wrap_and_compare(model, seed)
    assert len(compiled) == regions * (PREFILL_AND_DECODE if whole else 1)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("family", "recurrent"),
    [
        pytest.param("Qwen3_5", "linear_attention", marks=pytest.mark.whole),
        ("Lfm2", "conv"),  # convolutions alone
    ],
)
def test_regions_begin_with_recurrent_layers_too(family, recurrent, seed, monkeypatch):
    compiled = noted_graphs(monkeypatch)
    kinds = [recurrent, "full_attention"] * 4
    wrap_and_compare(recurrent_model(family, seed, num_hidden_layers=len(kinds), layer_types=kinds), seed)
    assert len(compiled) == 3 * PREFILL_AND_DECODE, "the first layers, those between, the last"


@pytest.mark.whole
@pytest.mark.slow
def test_compiled_regions_compute_what_huggingface_does(seed):
    wrap_and_compare(tiny_qwen3(num_hidden_layers=17, eos_token_id=None), seed)


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
    assert layers_in_equal_regions(layers, at_least=4) == together
