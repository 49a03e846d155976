"""Texts that repeat themselves, what has to be proposed after them, and drafts of which some are right.

Shapes: B rows, q tokens sampled in each, X slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from compiled_llm.compilation.sampling.sampling import Sampling
from compiled_llm_ops.drafts.contracts import AcceptDrafts, NgramDrafts, WriteTexts
from support.ops.sampling_cases import tables_of


def expected_drafts(text: Sequence[int], longest: int, shortest: int, k: int) -> list[int]:
    """What comes after the longest ending of a text: at the latest place with k tokens after it, or the latest."""
    for size in range(longest, max(1, shortest) - 1, -1):
        wanted, found = list(text[-size:]), list[list[int]]()
        for start in range(len(text) - size - 1, -1, -1):
            if len(wanted) == size and min(wanted) >= 0 and list(text[start : start + size]) == wanted:
                found.append(list(text[start + size : start + size + k]))
        if found:
            drafts = next((own for own in found if len(own) == k), found[0])
            unknown = [at for at, token in enumerate(drafts) if token < 0]
            return drafts[: unknown[0]] if unknown else drafts
    return []


def some_texts(seed: int, rows: int = 9, length: int = 70, k: int = 4) -> NgramDrafts:
    """Texts of few different tokens, some of them unknown, of lengths from none to all."""
    rng = np.random.default_rng(seed)
    texts = rng.integers(0, rng.integers(1, 9), (rows + 2, length))
    texts[rng.random(texts.shape) < 0.03] = -1
    lengths = rng.integers(0, length + 1, rows)
    lengths[:4] = [0, 1, 2, length]
    shortest = rng.integers(0, 4, rows + 2)
    columns = (texts, shortest + rng.integers(0, 4, rows + 2), shortest, lengths)
    texts, longest, shortest, lengths = (torch.from_numpy(column.astype(np.int32)) for column in columns)
    return NgramDrafts(texts, torch.from_numpy(rng.permutation(rows + 2)[:rows]), lengths, longest, shortest, k)


def some_writes(seed: int) -> WriteTexts:
    rng = np.random.default_rng(seed)
    texts = torch.zeros(6, 12, dtype=torch.int32)
    starts = torch.tensor([0, 3, 10, 12, -2], dtype=torch.int32)
    tokens = torch.from_numpy(rng.integers(1, 100, (5, int(rng.integers(1, 8)))))
    return WriteTexts(texts, torch.from_numpy(rng.permutation(6)[:5]), starts, tokens)


def some_drafts(seed: int, settings: Sequence[Sampling], new: int, vocabulary: int = 40) -> AcceptDrafts:
    """Rows of which some have right drafts, some of them no usable logits, and some say the same token twice."""
    rng = np.random.default_rng(seed)
    rows, tables = len(settings), tables_of(settings, vocabulary)
    sampled = torch.from_numpy(rng.integers(0, 4, (rows, new)))
    sampled[torch.from_numpy(rng.random((rows, new)) < 0.05)] = -1
    drafts = sampled[:, :-1].clamp(min=0)
    drafts[torch.from_numpy(rng.random(drafts.shape) < 0.15)] += 1
    return AcceptDrafts(
        sampled,
        drafts,
        torch.from_numpy(rng.integers(0, new, rows).astype(np.int32)),
        torch.from_numpy(rng.permutation(rows)),
        torch.from_numpy(rng.integers(1000, 1010, rows)),
        tables.numbers[4],
        tables.next_token,
        tables.counts,
        tables.recent,
    )
