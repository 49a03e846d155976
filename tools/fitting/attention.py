"""Attention of decode steps: `kernels/attention/decode_tiling.py`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from random import Random

import torch
from torch import Tensor

from compiled_llm_ops.contracts import FP8, DecodeAttention
from compiled_llm_ops.kernels.attention import decode_tiling
from compiled_llm_ops.kernels.attention.decode_tiling import AttentionTiling, choose_attention_tiling
from fitting.cases import HEAD_DIM, KV_HEADS, PAGE_SIZE, Case, Machine, case_of, pages_of, random
from fitting.measuring import captured

MOST_KEYS = 2**21
"""Keys of all rows, up to which two layers of them fit on the device: 8 GB each."""


def attention_cases(machine: Machine, quick: bool) -> Iterator[Case]:
    max_keys = 40_960  # of Qwen3's rows
    groups = [(2, torch.bfloat16), (2, FP8)] if quick else [*itertools.product((2, 4, 8), (torch.bfloat16, FP8))]
    for gqa, dtype in groups:
        for rows in (1, 8, 32, 256) if quick else (1, 2, 4, 8, 16, 17, 32, 33, 64, 96, 128, 192, 256):
            chosen = choose_attention_tiling(
                rows, KV_HEADS, gqa, HEAD_DIM, max_keys, machine.processors, machine.shared_memory, dtype.itemsize
            )
            candidates = [*attention_tilings(rows, quick), chosen._replace(share_equal=not chosen.share_equal)]
            for name, lengths in row_lengths(rows, quick).items():
                prepare = lambda given=(lengths, gqa, dtype): attention_timer(*given, max_keys)  # noqa: E731
                pages = ", fp8" if dtype == FP8 else ""
                yield case_of("attention", f"B={rows}, G={gqa}{pages}, {name}", candidates, chosen, prepare)


def row_lengths(rows: int, quick: bool) -> dict[str, list[int]]:
    """Rows of equal lengths, of random ones, and one long one among short ones."""
    lengths = (160, 1024, 4096) if quick else (100, 160, 600, 1024, 2048, 4096, 16_384, 32_768)
    found = {f"{length} keys": [length] * rows for length in lengths if rows * length <= MOST_KEYS}
    if rows > 1:
        found["8192 keys and 512"] = [8192] + [512] * (rows - 1)
        chance = Random(rows)
        found["100 to 2048 keys"] = [chance.randint(100, 2048) for _ in range(rows)]
    return found


def attention_tilings(rows: int, quick: bool) -> list[AttentionTiling]:
    """Blocks, pipelines, programs for a row and sizes of shares."""
    row_tile = -(-rows // -(-rows // decode_tiling.MAX_ROWS))
    shapes = [(2**13, 3, 2), (2**13, 5, 2), (2**14, 3, 4), (2**14, 5, 4)]
    found = []
    for values, stages, warps in shapes if quick else [*shapes, (2**13, 3, 4), (2**13, 5, 4)]:
        busy = decode_tiling.BUSY_VALUES // values
        for splits in (1, 4, 16) if quick else (1, 2, 4, 8, 16, 32):
            for unsplit, min_share in ((decode_tiling.ALONE, 1), (busy, busy)):
                sharing = (row_tile, row_tile * splits, unsplit, min_share)
                found.append(AttentionTiling(*sharing, values // HEAD_DIM, stages, warps))
    return found


def attention_timer(
    lengths: Sequence[int], gqa: int, dtype: torch.dtype, max_keys: int
) -> Callable[[AttentionTiling], float]:
    """One layer after the other, so many that no cache holds the keys of all."""
    from compiled_llm_ops.kernels.attention.decode import decode

    counts = [-(-length // PAGE_SIZE) for length in lengths]
    pages = pages_of(sum(counts), dtype)
    scales = torch.ones(2, KV_HEADS, device="cuda").unbind() if dtype == FP8 else (None, None)
    starts = torch.tensor([0, *torch.tensor(counts[:-1]).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    ends = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    indices = torch.zeros(len(lengths) * max_keys // PAGE_SIZE, dtype=torch.int32, device="cuda")
    indices[: sum(counts)] = torch.randperm(sum(counts), device="cuda")
    query = random(len(lengths), KV_HEADS * gqa, HEAD_DIM)
    key, value = random(2, len(lengths), KV_HEADS, HEAD_DIM)

    def launch(tiling: AttentionTiling, number: int) -> Tensor:
        table = (starts, ends, indices)
        args = DecodeAttention(query + 0, key, value, pages[number % len(pages)], *table, HEAD_DIM**-0.5)
        args = args._replace(key_scale=scales[0], value_scale=scales[1])
        return decode(args, None, tiling=tiling, pdl=True)

    return lambda tiling: captured(lambda number: launch(tiling, number))
