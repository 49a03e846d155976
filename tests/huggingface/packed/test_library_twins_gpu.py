"""Weights that libraries packed themselves, on a GPU: logits as exact as theirs, by our kernels and by their own."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import compiled_llm
from support.execution.launches import launches_of_steps
from support.execution.twins import Twins, assert_parity_together, parity
from support.gpu import needs_cuda
from support.huggingface.library_twins import LIBRARIES, library_twins, packed_layers, values_of

pytestmark = [pytest.mark.gpu, needs_cuda]

SIZES: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8}
MOST = 8
STEPS = 60


class Case(NamedTuple):
    """A model, and who multiplies its weights."""

    twins: Twins
    weights: dict[str, int]


CASES = [pytest.param((name, packed), id=f"{name}, {packed=}") for name in LIBRARIES for packed in ("auto", False)]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    name, packed = request.param
    pytest.importorskip(LIBRARIES[name].package)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # each call would say that it rounds to float16
    made = library_twins(name, request.config.getoption("seed"), SIZES, max_batch_size=MOST, packed=packed)
    made.wrapped.compiled.warmup([1, MOST])
    yield Case(made, {LIBRARIES[name].kernels: len(packed_layers(made.plain))} if packed else {})
    compiled_llm.unwrap(made.wrapped)
    gc.collect()
    torch.cuda.empty_cache()


def test_codes_stand_for_what_the_library_multiplies_by(case: Case) -> None:
    for name, layer in packed_layers(case.twins.plain.model.layers[0]).items():
        values = values_of(layer)
        ones = torch.eye(layer.in_features, dtype=torch.bfloat16, device=values.device)
        torch.testing.assert_close(
            layer(ones).t().float(), values, rtol=2**-7, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("rows", [1, MOST])
def test_logits_are_as_exact_as_the_library_s(case: Case, rows: int, seed: int) -> None:
    lengths = [1 + (number * 37 + 20) % 100 for number in range(rows)]
    assert_parity_together(parity(case.twins, lengths, STEPS, seed + rows))
    stats = case.twins.wrapped.compiled.stats()
    assert (stats.graph_breaks, stats.recompiles, stats.cudagraph_skips) == (0, 0, 0)
    assert stats.weights == case.weights


@pytest.mark.unchecked_pages
@pytest.mark.parametrize("rows", [1, MOST])
def test_a_step_is_one_cuda_graph(case: Case, rows: int) -> None:
    loop = case.twins.wrapped.compiled.generate_loop()
    for number in range(rows):
        loop.admit(np.full(3 + number % 20, 7), 40)
    for _ in range(4):
        loop.step()
    assert launches_of_steps(case.twins.wrapped, loop, 4) in ([], ["cudaGraphLaunch"] * 4)
    loop.close()


def test_nothing_is_refused(case: Case) -> None:
    report = compiled_llm.explain(case.twins.wrapped)
    assert not {"refused", "error", "graph break"} & {finding["kind"] for finding in report.data["findings"]}, str(
        report
    )
