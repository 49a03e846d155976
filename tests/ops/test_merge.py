"""Results of attention over parts of the keys, merged: that over all of them, whatever the parts are.

Shapes: T tokens, N states, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from compiled_llm_ops import merge_state, merge_state_in_place, merge_states
from support.ops.merge_parts import Parts
from support.ops.op_cases import merge_in_place_cases

pytestmark = pytest.mark.core


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(0, 2**31))
def test_parts_merge_to_the_whole(sizes, seed):
    parts = Parts(sizes, seed)
    parts.check(*merge_states(parts.v, parts.s))
    v, s = parts.v[:, 0].clone(), parts.s[:, 0].clone()
    for part in range(1, len(sizes)):
        alone = merge_state(v, s, parts.v[:, part], parts.s[:, part])
        merge_state_in_place(v, s, parts.v[:, part], parts.s[:, part])
        torch.testing.assert_close((v, s), alone, equal_nan=True)
    if len(sizes) > 1:
        parts.check(v, s)


def test_no_states_are_attention_over_no_key():
    v, s = merge_states(torch.empty(3, 0, 2, 8), torch.empty(3, 0, 2))
    assert torch.equal(v, torch.zeros(3, 2, 8))
    assert torch.equal(s, torch.full((3, 2), -torch.inf))


def test_tokens_outside_of_the_mask_stay():
    case, masked = merge_in_place_cases()
    *state, mask = masked
    before = [tensor.clone() for tensor in state[:2]]
    merge_state_in_place(*state, mask)
    expected = merge_state(*before, *state[2:])
    for written, merged, old in zip(state[:2], expected, before, strict=True):
        assert torch.equal(written[mask], merged[mask])
        torch.testing.assert_close(written[~mask], old[~mask], rtol=0, atol=0, equal_nan=True)
    assert case[4] is None


WRONG: list[tuple[Callable[..., Any], Callable[[], tuple[Any, ...]], str]] = [
    (merge_states, lambda: (torch.ones(3, 2, 8), torch.ones(3, 2)), r"v must be \[T, N, H, D\].*\(3, 2, 8\)"),
    (merge_states, lambda: (torch.ones(3, 1, 2, 8), torch.ones(3, 2)), r"of v must be \(3, 1, 2\) float32.*\(3, 2\)"),
    (merge_state, lambda: (*state(), state()[0], state()[1].double()), r"of v_b must be.*float32; got.*float64"),
    (merge_state, lambda: (*state(), *state(dim=4)), r"v_a and v_b must be alike; got \(3, 2, 8\).*\(3, 2, 4\)"),
    (merge_state, lambda: (*state(), state()[0].half(), state()[1]), r"alike; got .*float32 and .*float16"),
    (merge_state, lambda: (state()[0].int(), state()[1], *state()), r"v_a must be \[T, H, D\], floats; got .*int32"),
    (merge_state_in_place, lambda: (*state(), *state(), torch.ones(3)), r"mask must be \[3\] bool; got \(3,\)"),
    (merge_state_in_place, lambda: (*state(), *state(), torch.ones(2).bool()), r"mask must be \[3\] bool; got \(2,\)"),
    (merge_state_in_place, lambda: (torch.ones(2, 3, 8).transpose(0, 1), state()[1], *state()), "must be contiguous"),
]


def state(dim: int = 8) -> tuple[Tensor, Tensor]:
    return torch.ones(3, 2, dim), torch.ones(3, 2)


@pytest.mark.parametrize(("op", "case", "message"), WRONG, ids=[row[2] for row in WRONG])
def test_states_that_do_not_fit_are_refused(op, case, message):
    with pytest.raises(ValueError, match=message):
        op(*case())
