"""The ops of latent attention on a GPU, against dense attention, and replayed with other rows."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from compiled_llm_ops import (
    append_latent,
    latent_attention_lse,
    latent_decode,
    latent_decode_lse,
    plan_paged_attention,
    planned_latent_attention,
    planned_latent_attention_lse,
    ragged_attention,
    ragged_attention_lse,
)
from compiled_llm_ops.backends import backend_named
from compiled_llm_ops.kernels.pdl import has_pdl
from support.gpu import captured
from support.ops.latent_rows import MIXES, RAGGED, LatentRows, RaggedRows, check_any_batch

pytestmark = pytest.mark.gpu

SIZES = [(16, 512, 64), (20, 512, 64), (128, 512, 64), (40, 256, 32)]
LENGTHS = [1, 31, 32, 33, 0, 64, 65, 3000]
CLOSE = {"rtol": 2e-2, "atol": 1e-2}


def rows_of(lengths: Any, queries: Any = None, **sizes: Any) -> LatentRows:
    return LatentRows(lengths, queries, **{"dtype": torch.bfloat16, "device": "cuda", "page_size": 16, **sizes})


def compare(rows: LatentRows, out: torch.Tensor, lse: torch.Tensor) -> None:
    expected, expected_lse = rows.expected()
    wrong = ~torch.isclose(out.float(), expected, **CLOSE).flatten(1).all(1)
    print("queries that differ:", wrong.nonzero().flatten().tolist(), "of rows with tokens:", rows.lengths)
    torch.testing.assert_close(out.float(), expected, **CLOSE)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("heads", "rank", "size"), SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_invariant_bits_depend_on_a_rows_tokens_alone(heads, rank, size, dtype, seed):
    lengths = [300, 1, 64, 33, 129]
    rows = rows_of(lengths, lengths, heads=heads, rank=rank, size=size, dtype=dtype, seed=seed)
    ops = (lambda args: latent_attention_lse(*args)), (lambda args: latent_decode_lse(*args))
    check_any_batch(rows, *ops, seed, times=20)


@pytest.mark.parametrize(("heads", "rank", "size"), SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_decode(heads, rank, size, dtype, seed):
    rows = rows_of(LENGTHS, heads=heads, rank=rank, size=size, dtype=dtype, seed=seed)
    args = rows.decode_arguments()
    compare(rows, *latent_decode_lse(*args))
    torch.testing.assert_close(args.pages, rows.written(), rtol=0, atol=0, equal_nan=True)
    for length in (1, 2000, 9000):
        alone = rows_of([length], heads=heads, rank=rank, size=size, dtype=dtype, seed=seed)
        compare(alone, *latent_decode_lse(*alone.decode_arguments()))
    many = rows_of([200, 1100, 0, 1, 64, 257] * 11, heads=heads, rank=rank, size=size, dtype=dtype, seed=seed)
    compare(many, *latent_decode_lse(*many.decode_arguments()))


@pytest.mark.parametrize(("heads", "rank", "size"), SIZES)
@pytest.mark.parametrize("mix", MIXES)
def test_packed_queries(heads, rank, size, mix, seed):
    rows = rows_of(*MIXES[mix], heads=heads, rank=rank, size=size, seed=seed)
    compare(rows, *latent_attention_lse(*rows.arguments()))
    if -1 not in rows.places[1]:
        args = rows.append_arguments()
        append_latent(*args)
        torch.testing.assert_close(args.pages, rows.written(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("heads", "rank", "size"), SIZES)
@pytest.mark.parametrize("chosen", [1, 33, 2048])
def test_chosen_tokens(heads, rank, size, chosen, seed):
    sizes = {"heads": heads, "rank": rank, "size": size, "chosen": chosen, "seed": seed}
    rows = rows_of(LENGTHS, **sizes)
    args = rows.decode_arguments()
    compare(rows, *latent_decode_lse(*args))
    torch.testing.assert_close(args.pages, rows.written(), rtol=0, atol=0, equal_nan=True)
    rows = rows_of([1500, 1, 900, 0], [30, 1, 300, 2], **sizes)
    compare(rows, *latent_attention_lse(*rows.arguments()))


def test_long_packed_rows(seed):
    rows = rows_of([500, 1, 900], [500, 1, 30], heads=16, rank=512, size=64, seed=seed)
    compare(rows, *latent_attention_lse(*rows.arguments()))


@pytest.mark.parametrize("chosen", [None, 700])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_captured_launch_is_replayed_with_any_lengths(overlap, chosen, seed):
    if overlap and not has_pdl(torch.device("cuda")):
        pytest.skip("needs compute capability 9.0")
    rows = rows_of([4000, 2000, 700, 1], heads=16, rank=512, size=64, chosen=chosen, seed=seed)
    args = rows.decode_arguments()
    graph, out = captured(lambda: latent_decode(*args._replace(overlap=overlap)))
    for lengths in ([1, 1, 1, 1], [33, 0, 700, 1], [4000, 1999, 16, 0], [17, 2000, 1, 1]):
        args.lengths.copy_(torch.tensor(lengths))
        args.pages.nan_to_num_(0.5)
        if args.chosen is not None:
            args.chosen.copy_(torch.rand(4, 4000).argsort(-1)[:, :700] - 9)
        before = args.pages.clone()
        graph.replay()
        expected = latent_decode(*args._replace(pages=before))
        assert torch.equal(out, expected), lengths
        assert torch.equal(args.pages, before), lengths


def test_replays_with_other_tables_lists_and_lengths_equal_launches(seed, whole):
    """Rows change their places in the table, and pages, lengths and chosen tokens are drawn for each replay."""
    rows = rows_of([2000] * 6, heads=16, rank=512, size=64, chosen=300, seed=seed)
    args = rows.decode_arguments()
    args.pages.nan_to_num_(0.5)
    graph, out = captured(lambda: latent_decode(*args))
    draw, starts = random.Random(seed), args.starts.clone()
    numbers = args.indices[: 6 * 125].clone()
    for replay in range(1000 if whole else 40):
        args.lengths.copy_(torch.tensor([draw.choice([0, 1, 16, 17, draw.randint(0, 2000)]) for _ in range(6)]))
        args.starts.copy_(starts[torch.randperm(6, device="cuda")])
        args.indices[: len(numbers)].copy_(numbers[torch.randperm(len(numbers), device="cuda")])
        args.chosen.copy_(torch.rand(6, 2000, device="cuda").argsort(-1)[:, :300] - 9)
        before = args.pages.clone()
        graph.replay()
        assert torch.equal(out, latent_decode(*args._replace(pages=before))), replay
        assert torch.equal(args.pages, before), replay


def test_sizes_without_a_kernel_raise(seed):
    rows = rows_of([3], rank=24, size=16, seed=seed)
    with pytest.raises(ValueError, match="no kernel for R=24"):
        latent_decode(*rows.decode_arguments())


EXPANDED = pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (256, 256), (96, 64)])


@pytest.mark.parametrize("mix", [*RAGGED, "long"])
@EXPANDED
def test_new_rows_attend_to_their_own_tokens(mix, head_dim, value_dim, seed):
    counts = RAGGED.get(mix, [1500, 3, 700])
    sizes = {"heads": 16, "head_dim": head_dim, "value_dim": value_dim}
    rows = RaggedRows(counts, dtype=torch.bfloat16, device="cuda", seed=seed, **sizes)
    out, lse = ragged_attention_lse(*rows.arguments())
    expected, expected_lse = rows.expected()
    torch.testing.assert_close(out.float(), expected, **CLOSE)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-2, atol=1e-2)


def test_attention_to_own_tokens_is_replayed_with_other_rows(seed):
    rows = RaggedRows([200, 40, 16], heads=16, head_dim=192, value_dim=128, dtype=torch.bfloat16, device="cuda")
    graph, out = captured(lambda: ragged_attention(*rows.arguments()))
    for starts in ([0, 1, 2, 256], [0, 256, 256, 256], [0, 100, 228, 256]):
        rows.qo_indptr.copy_(torch.tensor(starts))
        graph.replay()
        assert torch.equal(out, ragged_attention(*rows.arguments())), starts


# ---- by FlashInfer's plan


class Planned:
    """FlashInfer's plan for rows, made through the op."""

    def __init__(self, rows: LatentRows, captured: bool = False) -> None:
        self.backend, self.geometry = backend_named("flashinfer"), rows.planned_arguments().geometry
        tokens, device = sum(rows.queries), rows.pages.device
        nbytes = self.backend.workspace_bytes([self.geometry], device)
        self.workspace = self.backend.workspace(device, nbytes)
        size = self.backend.plan_bytes([self.geometry], device, tokens, len(rows.lengths))
        self.owner = self.backend.new_plan(self.workspace, size)
        self._captured = (tokens, 0) if captured else (-1, -1)
        self.plan(rows)

    def plan(self, rows: LatentRows) -> None:
        buffers = self.owner.tensor, self.owner.numbers, *rows.host_columns, self.workspace.buffer
        plan_paged_attention(*buffers, *self.geometry, *self._captured)

    def arguments(self, rows: LatentRows) -> Any:
        return rows.planned_arguments(self.owner.tensor, self.workspace.buffer)


@pytest.mark.parametrize("heads", [16, 20, 128])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("mix", [*(name for name in MIXES if name != "rows without tokens"), "long", "decode"])
def test_planned_by_flashinfer(heads, page_size, mix, seed):
    long = {"long": ([500, 1, 3000], [500, 1, 30]), "decode": ([1, 31, 32, 33, 64, 65, 9000], None)}
    lengths, queries = long.get(mix) or MIXES[mix]
    rows = rows_of(lengths, queries, heads=heads, rank=512, size=64, page_size=page_size, seed=seed)
    made = Planned(rows)
    out, lse = planned_latent_attention_lse(*made.arguments(rows))
    compare(rows, out, lse)
    assert torch.equal(out, planned_latent_attention(*made.arguments(rows)))


@pytest.mark.parametrize("queries", [[1, 1, 1, 1], [40, 3, 1, 20]], ids=["decode", "prefill"])
def test_a_captured_launch_follows_each_plan(queries, seed):
    rows = rows_of([4000, 2000, 700, 64], queries, heads=16, rank=512, size=64, seed=seed)
    made = Planned(rows, captured=True)
    args = made.arguments(rows)
    graph, out = captured(lambda: planned_latent_attention(*args))
    for lengths in ([64, 64, 64, 64], [65, 2000, 33, 32], [3999, 80, 700, 63], [40, 1999, 1, 20]):
        other = rows_of(lengths, queries, heads=16, rank=512, size=64, seed=seed)
        made.plan(other)
        for place, states in zip(args[:3], other.planned_arguments()[:3], strict=True):
            place.nan_to_num_(0.0)[: len(states)].copy_(states)
        args.indptr.copy_(other.indptr)
        args.indices[: len(other.indices)].copy_(other.indices)
        args.last_page_len.copy_(other.host_columns[2])
        graph.replay()
        torch.testing.assert_close(out.float(), other.expected()[0], **CLOSE)


def test_flashinfer_has_latents_of_one_size(seed):
    rows = rows_of([3], rank=256, size=32, seed=seed)
    assert "no kernel for latents of 256 + 32" in backend_named("flashinfer").missing_kernel(
        rows.planned_arguments().geometry
    )
