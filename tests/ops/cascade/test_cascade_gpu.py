"""Cascade attention on a GPU: as on the CPU, and one captured launch for all groupings and lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm_ops import cascade_attention, cascade_attention_lse, decode_attention_lse
from support.gpu import by_dtype, captured, close, needs_cuda, on_gpu, seeded
from support.ops.cascade_rows import CascadeRows
from support.ops.fp8_pages import fp8_cascade, fp8_written, scales_of, stored
from support.ops.op_cases import preparation

pytestmark = [pytest.mark.gpu, needs_cuda]

MANY = [(range(70), 40), (range(35), 20), (range(35, 70), 9), (range(4, 9), 33), (range(71, 73), 100)]
TAILS = [1 + 37 * row % 300 for row in range(76)]
SIZES: list[dict[str, int]] = [
    {"group": 1, "head_dim": 128},
    {"group": 2, "head_dim": 128},
    {"group": 4, "head_dim": 64},
    {"group": 7, "head_dim": 64, "padded": 128},
    {"group": 2, "head_dim": 256},
    {"group": 3, "head_dim": 96, "padded": 128, "page_size": 1},
]


def rows_of(seed: int, dtype: torch.dtype, runs: Any = MANY, tails: Any = TAILS, **sizes: int) -> CascadeRows:
    given: dict[str, Any] = {"page_size": 16, "processors": 32, "max_items": 256, "max_parts": 2048, **sizes}
    return CascadeRows(runs, tails, dtype=dtype, seed=seed, **given)


@seeded
@by_dtype
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("options", [(), (100,), (700, 3.0)], ids="options={}".format)
def test_kernels_give_what_the_cpu_gives_in_float32(
    options: tuple[Any, ...], sizes: dict[str, int], dtype: torch.dtype, seed: int
) -> None:
    """From the same numbers, so that only the kernels' own arithmetic differs."""
    rows = rows_of(seed, dtype, **sizes)
    given = rows.arguments()
    wide = tuple(value.float() if isinstance(value, Tensor) and value.is_floating_point() else value for value in given)
    expected, expected_lse = cascade_attention_lse(*wide, *options)
    on_device = on_gpu(given)
    for overlap in (False, True):
        named = dict(zip(("window_left", "logits_soft_cap"), options, strict=False))
        out, lse = cascade_attention_lse(*on_device, **named, overlap=overlap)
        tolerance = 2e-3 if dtype is torch.float16 else 1.6e-2
        close(out.float().cpu(), expected, tolerance, "out")
        close(lse.cpu(), expected_lse, 5e-3, "lse")
        assert torch.equal(cascade_attention(*on_device, **named, overlap=overlap), out)
        torch.testing.assert_close(on_device[3].cpu(), rows.written(), rtol=0, atol=0, equal_nan=True)


@seeded
@by_dtype
@pytest.mark.parametrize("kind", ["none", "both", "small"])
@pytest.mark.parametrize("options", [(), (700, 3.0)], ids="options={}".format)
def test_shared_pages_may_be_of_fp8(options: tuple[Any, ...], kind: str, dtype: torch.dtype, seed: int) -> None:
    scales = scales_of(kind, 2)
    rows, read = fp8_cascade(rows_of(seed, dtype, head_dim=128), scales)
    expected, expected_lse = read.expected(*options)
    fp8 = {name: value if value is None else value.cuda() for name, value in scales.given.items()}
    given, named = on_gpu(rows.arguments()), dict(zip(("window_left", "logits_soft_cap"), options, strict=False))
    out, lse = cascade_attention_lse(*given, **named, **fp8)
    close(out.float().cpu(), expected, 4e-3 if dtype is torch.float16 else 1.6e-2, "out")
    close(lse.cpu(), expected_lse, 5e-3, "lse")
    assert torch.equal(given[3].cpu().view(torch.uint8), fp8_written(rows, scales))
    newest = zip((rows.key, rows.value), scales, strict=True)
    assert fp8["saturated"].tolist() == [sum(stored(states, scale).clamped for states, scale in newest)]


@seeded
@by_dtype
def test_queries_and_keys_are_normed_and_turned_as_in_decode(dtype: torch.dtype, seed: int) -> None:
    rows = rows_of(seed, dtype, group=2, head_dim=128)
    query, key, value, pages, starts, lengths, indices, *others = on_gpu(rows.arguments())
    own = on_gpu(preparation(rows.query))
    plain = pages.clone()
    expected = decode_attention_lse(query, key, value, plain, starts, lengths, indices, rows.scale, -1, 0.0, *own)
    out, lse = cascade_attention_lse(query, key, value, pages, starts, lengths, indices, *others, -1, 0.0, *own)
    close(out.float(), expected[0].float(), 2e-2, "out")
    close(lse, expected[1], 1e-2, "lse")
    torch.testing.assert_close(pages, plain, rtol=0, atol=0, equal_nan=True)


@seeded
@pytest.mark.parametrize("window_left", [-1, 150], ids="window={}".format)
@pytest.mark.parametrize("overlap", [False, True], ids="overlap={}".format)
def test_a_captured_launch_holds_for_all_groupings_and_lengths(overlap: bool, window_left: int, seed: int) -> None:
    """Bit for bit as launches outside of the graph; also where there were no runs when it was captured."""
    groupings = [
        ([], TAILS),
        (MANY, TAILS),
        ([(range(76), 300)], [1 + row % 5 for row in range(76)]),
        ([(range(row, row + 2), 3 + row % 7) for row in range(0, 76, 2)], [1 + row * 3 for row in range(76)]),
        ([(range(10, 20), 7), (range(12, 18), 1), (range(13, 15), 90)], [9] * 76),
    ]
    batches = [rows_of(seed, torch.bfloat16, runs, tails, head_dim=128) for runs, tails in groupings]
    pages = max(len(rows.pages) for rows in batches)
    entries = max(len(rows.indices) for rows in batches)

    def arguments(rows: CascadeRows) -> tuple[Any, ...]:
        given = list(on_gpu(rows.arguments()))
        given[3] = torch.cat([given[3], given[3].new_zeros(pages - len(given[3]), *given[3].shape[1:])])
        given[6] = torch.cat([given[6], given[6].new_zeros(entries - len(given[6]))])
        return tuple(given)

    static = arguments(batches[0])
    options: dict[str, Any] = {"window_left": window_left, "overlap": overlap}
    graph, found = captured(lambda: cascade_attention_lse(*static, **options))
    for rows in [*batches, *batches[::-1]]:
        given = arguments(rows)
        for kept, value in zip(static, given, strict=True):
            if isinstance(kept, Tensor):
                kept.copy_(value)
        for result in found:
            result.fill_(torch.nan)
        graph.replay()
        eager = cascade_attention_lse(*given, **options)
        for replayed, launched in zip(found, eager, strict=True):
            assert torch.equal(replayed, launched)
        expected, expected_lse = rows.expected(window_left)
        close(found[0].float().cpu(), expected, 1.6e-2, "out")
        close(found[1].cpu(), expected_lse, 5e-3, "lse")
