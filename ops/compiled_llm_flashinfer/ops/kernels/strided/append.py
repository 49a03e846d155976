"""A Triton kernel that writes keys and values into pages where they lie apart, in any layout."""

# Shapes: T packed tokens, K kv heads, D head dimension of keys, E that of values.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from compiled_llm_flashinfer.ops.contracts import StridedAppend


@triton.jit
def _strided_append(
    key, value, keys, values, token_rows, token_positions, indptr, indices,
    key_row, key_head, key_step, value_row, value_head, value_step,
    keys_page, keys_head, keys_slot, keys_step, values_page, values_head, values_slot, values_step,
    PAGE: tl.constexpr, HEAD: tl.constexpr, VALUE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write one head of one token; axes of the grid: tokens, kv heads."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = tl.load(token_rows + token)
    if row >= 0:
        position = tl.load(token_positions + token)
        page = tl.load(indices + tl.load(indptr + row) + position // PAGE).to(tl.int64)
        slot = position % PAGE
        offs = tl.arange(0, WIDE)
        k = tl.load(key + token * key_row + head * key_head + offs * key_step, mask=offs < HEAD)
        v = tl.load(value + token * value_row + head * value_head + offs * value_step, mask=offs < VALUE)
        k_ptrs = keys + page * keys_page + head * keys_head + slot * keys_slot + offs * keys_step
        v_ptrs = values + page * values_page + head * values_head + slot * values_slot + offs * values_step
        tl.store(k_ptrs, _as_stored(k, keys), mask=offs < HEAD)
        tl.store(v_ptrs, _as_stored(v, values), mask=offs < VALUE)


@triton.jit
def _as_stored(states, pages):
    if pages.dtype.element_ty == tl.float8e4nv and states.dtype != tl.float8e4nv:
        numbers = tl.clamp(states.to(tl.float32), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        return numbers.to(tl.float8e4nv)
    else:  # noqa: RET505  the kernel has one branch, known when it is compiled
        return states.to(pages.dtype.element_ty)


def append(args: StridedAppend) -> None:
    """Launch it, checked. All is on one device, the current one."""
    (tokens, heads, head_dim), value_dim = args.key.shape, args.value.shape[2]
    if not tokens:
        return
    _strided_append[(tokens, heads)](
        *args, *args.key.stride(), *args.value.stride(), *args.keys.stride(), *args.values.stride(),
        PAGE=args.keys.shape[2], HEAD=head_dim, VALUE=value_dim, WIDE=triton.next_power_of_2(max(head_dim, value_dim)),
        num_warps=1,
    )  # fmt: skip
