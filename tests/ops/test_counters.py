"""The owners of the counters of captured launches; on a CPU, where nothing is captured."""

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


def test_those_of_a_graph_that_is_gone_are_taken_again(slabs):
    owner, graphs = CapturedCounters(DEVICE), []
    for size in (5, 400, 90, 4):
        owner.make_room()
        assert owner.take(size) is not None
        assert owner.take(size) is not None
        graphs.append(owner.taken())
    owner.give_back(graphs[2])
    owner.give_back(graphs[1])
    owner.make_room()
    again = owner.take(2 * (400 + 92))
    first = owner.take(1)
    assert again is not None
    assert first is not None
    assert first.data_ptr() > again.data_ptr() > 0, "what was given back is one span, and the first that fits"
    last = owner.taken()
    for graph in (graphs[0], last, graphs[3]):
        owner.give_back(graph)
    owner.make_room()
    assert len(slabs) == 1
    assert len(owner.take(SLAB)) == SLAB, "all of them are free"


def test_a_thousand_graphs_that_come_and_go_take_no_more_than_a_few(slabs):
    owner, graphs = CapturedCounters(DEVICE), []
    for number in range(1000):
        owner.make_room()
        taken = [owner.take(1 + 37 * number % 4000) for _ in range(3)]
        assert not any(counters is None for counters in taken)
        graphs.append(owner.taken())
        if len(graphs) > 8:
            owner.give_back(graphs.pop(number % 8))
    assert len(slabs) <= 2
    assert owner.nbytes == len(slabs) * SLAB * 4
