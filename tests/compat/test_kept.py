"""Code of Inductor's runs without its graph, in torch as it is; each test says what breaks if it fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from compiled_llm.compat.torch.inductor import compile_with_inductor, inductor_cache
from compiled_llm.compat.torch.kept.region_code import RegionCode, load_code, noting_code
from compiled_llm.compat.torch.kept.traced_graph import (
    TracedSize,
    TracedTensor,
    size_guards,
    traced_arguments,
    traced_inputs,
    written_objects,
)

pytestmark = pytest.mark.slow


class Traced:
    """A function that was compiled, and all that was noted of it."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            with noting_code() as found:
                compiled = compile_with_inductor(module, inputs, {})
            self.codes = [*found]
            self.inputs, self.written, self.sizes = [*traced_inputs(module.graph)], written_objects(), size_guards()
            self.looked_at = [*traced_arguments({"x": arguments[0]}, ("x",))]
            return compiled

        with torch.no_grad():
            self.result = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*arguments)

    @property
    def code(self) -> RegionCode:
        (code,) = self.codes
        return code


def loaded(code: RegionCode, folder: Path) -> Any:
    (folder / "inductor").symlink_to(inductor_cache())
    return load_code(folder, code.encoded())


def scaled(x: Tensor, weight: Tensor) -> Tensor:
    return torch.relu(x @ weight) * 2


def test_code_of_inductor_s_runs_as_it_did_with_its_graph(tmp_path: Path) -> None:
    """If not, no program is taken as it was kept: a code file has other imports, kernels or names."""
    x, weight = torch.randn(4, 8), torch.randn(8, 8)
    torch._dynamo.mark_dynamic(x, 0)
    traced = Traced(scaled, x, weight)
    assert traced.code.refused is None
    assert traced.code.kernels
    values = [entry.value if isinstance(entry, TracedTensor) else 4 for entry in traced.inputs]
    (result,) = loaded(traced.code, tmp_path)(values)
    assert torch.equal(result, traced.result)
    assert [type(entry) for entry in traced.inputs].count(TracedSize) == 1
    (seen,) = traced.looked_at
    assert seen.value is x
    assert isinstance(seen.sizes[0], str)
    assert traced.sizes[1][seen.sizes[0]][0] == 2
    assert traced.written == []


def test_what_aotautograd_does_beside_the_code_is_noticed() -> None:
    """If not, a kept program would leave it out: its results would be wrong."""
    refused = Traced(lambda x: (x + 1, x.view(-1)), torch.randn(2, 3)).code.refused
    assert refused == "output 1 is a view of input 0"


class Counter:
    calls = 0


def test_what_is_written_besides_tensors_is_noticed() -> None:
    """If not, a kept program would leave it out."""
    counter = Counter()

    def counting(x: Tensor) -> Tensor:
        counter.calls += 1
        return x + 1

    (written,) = Traced(counting, torch.randn(2)).written
    assert written.endswith(".calls")


def test_misaligned_inputs_are_copied_and_written_back(tmp_path: Path) -> None:
    """As Inductor does before kernels of Triton's; these are only given addresses that are multiples of 16."""
    traced = Traced(lambda x: x.add_(1), torch.zeros(4))
    said: Mapping[str, Any] = {**traced.code.encoded(), "aligned": [0], "written": [0]}
    (tmp_path / "inductor").symlink_to(inductor_cache())
    held = torch.zeros(5)[1:]
    load_code(tmp_path, said)([held])
    assert held.tolist() == [1.0] * 4
