"""Steps that draft on a GPU: captured, they give the tokens of plain steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiled_llm.compilation.drafts import NEW_TOKENS, drafted_step
from support.compilation.drafted_cases import DRAFTERS, case_of, check
from support.gpu import needs_cuda, seeded

pytestmark = [pytest.mark.gpu, needs_cuda]


class Captured:
    """A step that is captured at its first call, and replayed from then on."""

    def __init__(self) -> None:
        self._graph: Any = None
        self._outputs: Any = None

    def __call__(self, *given: Any) -> Any:
        if self._graph is None:
            inputs, tables = given[2:4]
            written = inputs.lengths, inputs.positions, tables.next_token, tables.counts, tables.recent
            before = [own.clone() for own in written]
            drafted_step(*given)  # which compiles kernels, and advances
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._outputs = drafted_step(*given)
            for own, kept in zip(written, before, strict=True):
                own.copy_(kept)
        self._graph.replay()
        return self._outputs


@seeded
def test_tokens_of_captured_steps_are_those_of_plain_steps(seed: int) -> None:
    """By each drafter, and with each number of tokens; in one test, which has the kernels compiled once."""
    case = case_of(2, seed, "cuda")
    for new in NEW_TOKENS:
        for name, drafter in DRAFTERS.items():
            print(f"{name} drafts, {new} tokens")
            check(case, drafter(case), lambda step, new=new: new, Captured())
