"""Who owns the counters of captured launches; on a CPU, where nothing is captured."""

from __future__ import annotations

import weakref

import pytest
import torch

from compiled_llm_ops.kernels import counters
from compiled_llm_ops.kernels.counters import SLAB, CapturedCounters, ZeroedCounters

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def slabs(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[torch.Tensor]]:
    made: list[weakref.ref[torch.Tensor]] = []

    def zeroed(device: torch.device) -> torch.Tensor:
        slab = torch.full((SLAB,), 0, dtype=torch.int32)
        made.append(weakref.ref(slab))
        return slab

    monkeypatch.setattr(counters, "_zeroed", zeroed)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    return made


def places(*taken: torch.Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in taken]


def test_each_captured_launch_has_its_own_for_as_long_as_its_owner_lives(slabs):
    zeroed, owner = ZeroedCounters(), CapturedCounters(DEVICE)
    owner.make_room()
    with zeroed.owned_by(owner):
        first, second = zeroed.take(5, DEVICE), zeroed.take(7, DEVICE)
    assert second.data_ptr() - first.data_ptr() == 8 * 4  # aligned to 16 bytes
    owner.make_room()
    assert len(slabs) == 1
    del first, second, owner
    assert slabs[0]() is None


def test_without_an_owner_they_live_as_long_as_what_gives_them(slabs, monkeypatch):
    zeroed = ZeroedCounters()
    with monkeypatch.context() as before_the_capture:
        before_the_capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        before_the_capture.setattr(counters.torch, "zeros", lambda size, **options: torch.ones(2 * size))
        assert zeroed.take(SLAB, DEVICE).all()  # zeroed for each launch
    zeroed.take(7, DEVICE)
    assert len(slabs) == 1
    assert slabs[0]() is not None


def test_a_graph_that_takes_more_than_there_is_zeroes_its_own(slabs, monkeypatch):
    zeroed, owner, made = ZeroedCounters(), CapturedCounters(DEVICE), []
    monkeypatch.setattr(torch, "zeros", lambda *size, **options: made.append(size))
    with zeroed.owned_by(owner):
        zeroed.take(5, DEVICE)
    assert made == [(5,)]
    assert slabs == []
