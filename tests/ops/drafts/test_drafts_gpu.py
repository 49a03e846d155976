"""The ops of drafts on a GPU: as on a CPU, and replayed over other texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiled_llm_ops import accept_drafts, ngram_drafts, sample_tokens, write_texts
from support.gpu import captured, needs_cuda, on_gpu, seeded
from support.ops.draft_cases import some_drafts, some_texts, some_writes
from support.ops.sampling_cases import BRANCHES, EDITED, arguments

pytestmark = [pytest.mark.gpu, needs_cuda]
SETTINGS = [*BRANCHES, *EDITED]


@seeded
@pytest.mark.parametrize("length", [70, 3008, 40_960])
def test_what_is_proposed_is_what_the_cpu_proposes(length: int, seed: int) -> None:
    for number in range(20):
        args = some_texts(seed + number, rows=40, length=length, k=3 + number % 5)
        if number % 2 and length > 70:  # one place is far away
            args.texts[:] = torch.arange(length) + 9
            args.texts[:, 37 * number : 37 * number + 9] = args.texts[:, -9:]
        for ours, expected in zip(ngram_drafts(*on_gpu(args)), ngram_drafts(*args), strict=True):
            assert torch.equal(ours.cpu(), expected), number


@seeded
def test_replays_look_through_the_texts_of_the_moment(seed: int) -> None:
    given = on_gpu(some_texts(seed, rows=40, length=3008))
    graph, outputs = captured(lambda: ngram_drafts(*given))
    for number in range(10):
        args = some_texts(seed + number, rows=40, length=3008)
        for static, fresh in zip(given[:5], args[:5], strict=True):
            static.copy_(fresh)
        graph.replay()
        for ours, expected in zip(outputs, ngram_drafts(*args), strict=True):
            assert torch.equal(ours.cpu(), expected)


@seeded
def test_texts_are_written_and_drafts_accepted_as_on_the_cpu(seed: int) -> None:
    for number in range(10):
        assert_same(write_texts, some_writes(seed + number), ("texts",))
        for new in (2, 4, 8):
            assert_same(accept_drafts, some_drafts(seed + number, SETTINGS, new), ("next_token", "counts", "recent"))


def assert_same(op: Any, args: Any, written: tuple[str, ...]) -> None:
    given = on_gpu(args)
    ours, expected = op(*given), op(*args)
    assert expected is None or torch.equal(ours.cpu(), expected)
    for name in written:
        assert torch.equal(getattr(given, name).cpu(), getattr(args, name)), name


@seeded
def test_tokens_that_tables_lack_are_seen_as_on_the_cpu_but_for_near_ties(seed: int) -> None:
    settings = SETTINGS * 4
    logits, seeds = 3 * torch.randn(len(settings), 49_152), torch.randint(2**62, (len(settings),))
    for width in (1, 3, 7):
        args = arguments(logits, seeds, settings)._replace(before=torch.randint(-1, 12, (len(settings), width)))
        given = on_gpu(args)
        assert int((sample_tokens(*given).cpu() != sample_tokens(*args)).sum()) <= 2, width
        assert torch.equal(given.counts.cpu(), args.counts)
        assert torch.equal(given.recent.cpu(), args.recent)
