"""The ops of drafts on the CPU: against code that looks at a token at a time."""

from __future__ import annotations

import pytest
import torch

from compiled_llm.compilation.sampling.sampling import Sampling
from compiled_llm_ops import NOT_ACCEPTED, NOT_DRAFTED, accept_drafts, ngram_drafts, write_texts
from compiled_llm_ops.contracts.sampling import COUNTED, FOLLOWING, MAX_FOLLOWED
from support.ops.draft_cases import expected_drafts, some_drafts, some_texts, some_writes
from support.ops.sampling_cases import BRANCHES, EDITED

SETTINGS = [*BRANCHES, *EDITED]


def test_what_follows_the_longest_ending_is_proposed(seed: int) -> None:
    proposed = 0
    for number in range(60):
        args = some_texts(seed * 1000 + number, k=1 + number % 7)
        tokens, counts = ngram_drafts(*args)
        for row, (slot, length) in enumerate(zip(args.slots.tolist(), args.lengths.tolist(), strict=True)):
            text, sizes = args.texts[slot, :length].tolist(), (int(args.longest[slot]), int(args.shortest[slot]))
            expected = expected_drafts(text, *sizes, args.k)
            assert tokens[row].tolist() == expected + [0] * (args.k - len(expected)), (number, row)
            assert counts[row] == len(expected)
            proposed += len(expected)
    assert proposed > 300


@pytest.mark.parametrize(
    ("text", "longest", "expected"),
    [
        ([1, 2, 3, 1, 2], 3, [3, 1, 2]),
        ([1, 2, 7, 3, 2, 8, 1, 2], 3, [7, 3, 2]),
        ([1, 2, 7, 3, 2, 8, 1, 2], 1, [8, 1, 2]),
        ([5, 5, 5], 3, [5]),
        ([5] * 9, 3, [5, 5, 5]),
        ([1, 2, 1, 2, 1, 2, 1], 2, [2, 1, 2]),
        ([1, 2, 3, 4, 5, 1, 2, 6, 1, 2], 2, [6, 1, 2]),
        ([1, 2, 3, 4, 5, 1, 2, 1, 2], 2, [3, 4, 5]),
        ([1, 2, 3], 3, []),
        ([4, -1, 4], 1, []),
        ([], 3, []),
    ],
)
def test_worked_examples(text: list[int], longest: int, expected: list[int]) -> None:
    texts, sizes = torch.tensor([[*text, 9]], dtype=torch.int32), torch.tensor([longest], dtype=torch.int32)
    length = torch.tensor([len(text)], dtype=torch.int32)
    tokens, counts = ngram_drafts(texts, torch.tensor([0]), length, sizes, torch.ones_like(sizes), 3)
    assert tokens[0, : int(counts)].tolist() == expected


def test_tokens_go_into_texts_and_nowhere_else(seed: int) -> None:
    for number in range(20):
        args = some_writes(seed * 100 + number)
        expected = args.texts.clone()
        for slot, start, tokens in zip(args.slots.tolist(), args.starts.tolist(), args.tokens.tolist(), strict=True):
            for place, token in enumerate(tokens, start):
                if 0 <= place < expected.shape[1]:
                    expected[slot, place] = token
        write_texts(*args)
        assert torch.equal(args.texts, expected)


@pytest.mark.parametrize("new", [1, 2, 4, 8])
def test_drafts_count_as_far_as_they_are_right(new: int, seed: int) -> None:
    accepted = 0
    for number in range(10):
        args = some_drafts(seed * 100 + number, SETTINGS, new)
        counts, recent = args.counts.clone(), args.recent.clone()
        tokens = accept_drafts(*args)
        for row, slot in enumerate(args.slots.tolist()):
            sampled, drafts, offered = args.sampled[row].tolist(), args.drafts[row].tolist(), int(args.offered[row])
            kept = 1
            while kept <= offered and drafts[kept - 1] == sampled[kept - 1]:
                kept += 1
            others = [NOT_ACCEPTED] * (offered + 1 - kept) + [NOT_DRAFTED] * (new - 1 - offered)
            assert tokens[row].tolist() == sampled[:kept] + others
            assert args.next_token[slot] == max(0, sampled[kept - 1])
            for place, token in enumerate(sampled[:kept]):
                if token >= 0 and args.adjustments[slot] & COUNTED:
                    counts[slot, token] += 2
                if token >= 0 and args.adjustments[slot] // FOLLOWING & MAX_FOLLOWED:
                    recent[slot, (int(args.positions[row]) + place) % (MAX_FOLLOWED + 1)] = token
            accepted += kept - 1
        assert torch.equal(args.counts, counts)
        assert torch.equal(args.recent, recent)
    assert accepted >= 20 * (new - 1)


def test_counts_of_accepted_tokens_stay_in_their_range(seed: int) -> None:
    args = some_drafts(seed, [Sampling(presence_penalty=0.5)], 4)
    args.sampled[:], args.drafts[:], args.offered[:] = 2, 2, 3
    args.counts[:, 2], args.counts[:, 3] = 32763, 5
    accept_drafts(*args)
    assert args.counts[0, 2:4].tolist() == [32767, 5]
