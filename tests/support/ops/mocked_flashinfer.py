"""FlashInfer's wrapper class as a mock with the real signatures, so that plans run without a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from compiled_llm_ops import Geometry, PageTable
from compiled_llm_ops.contracts import PagedAttention, PlannedBatch
from compiled_llm_ops.flashinfer import hopper, plan as plans, versions, workspace
from compiled_llm_ops.flashinfer.plan import FlashInferPlan
from compiled_llm_ops.flashinfer.splitting import SPLIT

flashinfer: Any = pytest.importorskip("flashinfer", exc_type=ImportError)

DATA = Path(flashinfer.__file__).parent / "data"
PREFILL = flashinfer.BatchPrefillWithPagedKVCacheWrapper
GEOMETRY = Geometry(4, 2, 128, 16, -1, 0.0, torch.bfloat16, torch.bfloat16)
HOST = PageTable(*(torch.tensor(column, dtype=torch.int32) for column in ([0, 1, 2], [0, 3, 4], [5, 6, 7, 8], [9, 2])))
"""Two rows of one query each."""
NUMBERS = [0, 2, *range(2, 15)]
"""What the planner decides; the second one is the number of tokens."""


class Mocked(NamedTuple):
    """A workspace on the CPU, and FlashInfer's wrapper class as a mock with the real signatures."""

    workspace: workspace.FlashInferWorkspace
    prefill: mock.Mock

    @property
    def wrapper(self) -> Any:
        return self.prefill.return_value

    @property
    def planner(self) -> mock.Mock:
        return self.wrapper._cached_module.plan


class UnusedEvent:
    def synchronize(self) -> None: ...

    def record(self, stream: object) -> None: ...


@pytest.fixture
def mocked(monkeypatch: pytest.MonkeyPatch) -> Mocked:
    h200 = SimpleNamespace(
        multi_processor_count=132, max_threads_per_multi_processor=2048, shared_memory_per_multiprocessor=228 * 1024
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
    monkeypatch.setattr(torch.cuda, "Event", UnusedEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(hopper, "has_kernels", lambda device: False)
    for module in (workspace, plans):
        monkeypatch.setattr(module, "pinned", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    prefill = mock.create_autospec(PREFILL)
    prefill.return_value._cached_module = mock.Mock()
    prefill.return_value._cached_module.plan.return_value = NUMBERS
    monkeypatch.setattr(flashinfer, PREFILL.__name__, prefill)
    versions.uniform_q_len_argument.cache_clear()
    # The mock stands for the class; whether the planner takes one argument more is read off the real one.
    monkeypatch.setattr(prefill, "plan", PREFILL.plan)
    return Mocked(workspace.FlashInferWorkspace("cpu", 1024), prefill)


class MockedPlan:
    """A plan on the CPU, decided and launched as the ops do it on CUDA."""

    def __init__(self, mocked: Mocked, geometry: Geometry, captured_tokens: int, variant: int) -> None:
        self.owner = FlashInferPlan(mocked.workspace, 2**20)
        self._workspace = mocked.workspace.buffer
        self._geometry, self._how = geometry, (captured_tokens, variant)

    def plan(self, host: PageTable) -> None:
        starts, pages, last = host.qo_indptr.numpy(), host.indptr.numpy(), host.last_page_len.numpy()
        self.owner.decide(PlannedBatch(starts, pages, last, self._geometry, self._workspace, *self._how))

    def run(
        self, query: Tensor, pages: Tensor, out: Tensor, lse: Tensor, scale: float, table: PageTable = HOST
    ) -> None:
        args = PagedAttention(query, pages, *table, self.owner.tensor, self._workspace, scale)
        self.owner.launch(args, out, lse)


def make_plan(
    mocked: Mocked, geometry: Geometry = GEOMETRY, *, captured_tokens: int = -1, variant: int = SPLIT
) -> MockedPlan:
    return MockedPlan(mocked, geometry, captured_tokens, variant)


def tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, pages, and where results and log-sum-exps go."""
    query = torch.zeros(2, 4, 128, dtype=torch.bfloat16)
    pages = torch.zeros(3, 2, 2, 16, 128, dtype=torch.bfloat16)
    return query, pages, torch.empty_like(query), torch.empty(2, 4)
