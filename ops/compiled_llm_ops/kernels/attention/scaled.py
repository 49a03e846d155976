"""Keys and values in the dtype of their pages, for the Triton kernels that write them and those that read them."""

# Shapes: M heads or queries, D' head dimension as loaded, K kv heads, N keys.

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # whether kernels run without a GPU, where PTX does not


@triton.jit
def as_stored(states, pages, scale, saturated, mask):
    """Return heads ``[M, D']`` as ``pages`` hold them: in fp8 divided by their scale, clamped and rounded."""
    # ``scale`` is a number, or ``[M, 1]``. To ``saturated`` is added how many numbers under the mask are clamped. Both
    # may be None, and are if pages are of another dtype.
    if pages.dtype.element_ty == tl.float8e4nv:
        numbers = states.to(tl.float32)
        if scale is not None:
            # PyTorch rounds its divisions in the same way, so the CPU kernel writes the same bytes.
            numbers = tl.div_rn(numbers, scale)
        if saturated is not None:
            clamped = mask & (tl.abs(numbers) > 448.0)
            if numbers.shape[0] == 1:
                # Of one head each by itself: there are hardly any, and to count them its threads would wait for others.
                zeros = tl.zeros(clamped.shape, tl.int32)
                tl.atomic_add(saturated + zeros, (zeros + 1).to(tl.int64), mask=clamped, sem="relaxed")
            else:
                count = tl.sum(clamped.to(tl.int32))
                tl.atomic_add(saturated, count.to(tl.int64), mask=count > 0, sem="relaxed")
        numbers = tl.clamp(numbers, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        numbers = states
    return numbers.to(pages.dtype.element_ty)


@triton.jit
def as_multiplied(q, scale, pages):
    """Queries ``[M, D']`` in the dtype that keys of ``pages`` are multiplied in, and a factor on their logits."""
    # One instruction makes float16 of two numbers of fp8; bfloat16 takes several. float16 is too narrow for all that
    # queries of bfloat16 can be, so each query is divided by a power of two, which is exact, and its logits are
    # multiplied by it: then the factor is ``[M, 1]``.
    if pages.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        numbers = q.to(tl.float32)
        largest = tl.max(tl.abs(numbers), 1)[:, None]
        # The bits of the exponent alone, and not those of zero.
        power = tl.maximum(largest.to(tl.int32, bitcast=True) & 0x7F800000, 0x10000000).to(tl.float32, bitcast=True)
        return (numbers / power).to(tl.float16), scale * power
    else:  # noqa: RET505  the kernel has one branch, known when it is compiled
        return q, scale


@triton.jit
def no_values(queries: tl.constexpr, DIM: tl.constexpr, pages):
    """Return sums of no values, a tuple as ``add_values`` takes it: ``[M, D']`` or, of fp8, two ``[M, D' / 2]``."""
    if pages.dtype.element_ty == tl.float8e4nv:
        half = tl.zeros([queries, DIM // 2], tl.float32)
        return half, half
    else:  # noqa: RET505  the kernel has one branch, known when it is compiled
        return (tl.zeros([queries, DIM], tl.float32),)


@triton.jit
def add_values(sums, weights, values, slot, mask, DIM: tl.constexpr):
    """Return ``sums``, and values at ``values + slot`` times their ``weights`` ``[M, N]``."""
    # Tensor cores take values of several keys at a time. Those of 16 bits are loaded like that from shared memory,
    # those of 8 bits one by one (``ldmatrix`` transposes 16 bits). So fp8 is loaded as pairs of 16 bits, and what lies
    # at even places is summed apart from what lies at odd ones: 764 instructions for 64 keys of size 128, not 1,343.
    # ``slot`` ``[N]`` int64 are multiples of D'; values outside of ``mask`` ``[N]``, whose weights are zeros, are not
    # read.
    if values.dtype.element_ty == tl.float8e4nv:
        pairs_ptr = values.to(tl.pointer_type(tl.int16), bitcast=True)
        places = (slot // 2)[:, None] + tl.arange(0, DIM // 2)[None, :]
        if mask is None:
            pairs = tl.load(pairs_ptr + places)
        else:
            pairs = tl.load(pairs_ptr + places, mask=mask[:, None], other=0)
        even, odd = _unpacked(pairs)
        even, odd = even.to(weights.dtype), odd.to(weights.dtype)
        return (
            tl.dot(weights, even, sums[0], input_precision="ieee"),
            tl.dot(weights, odd, sums[1], input_precision="ieee"),
        )
    else:  # noqa: RET505
        places = values + slot[:, None] + tl.arange(0, DIM)[None, :]
        v = tl.load(places) if mask is None else tl.load(places, mask=mask[:, None], other=0.0)
        return (tl.dot(weights, v.to(weights.dtype), sums[0], input_precision="ieee"),)


@triton.jit
def faded(sums, fade):
    """Return sums of values, each row times its ``fade`` ``[M]``."""
    if len(sums) == 2:
        return sums[0] * fade[:, None], sums[1] * fade[:, None]
    else:  # noqa: RET505
        return (sums[0] * fade[:, None],)


@triton.jit
def summed(sums):
    """Return sums of values as ``[M, D']``."""
    if len(sums) == 2:
        return tl.interleave(sums[0], sums[1])
    else:  # noqa: RET505
        return sums[0]


@triton.jit
def _unpacked(pairs):
    """Return what lies at even and at odd places of fp8, of which ``pairs`` int16 hold two each, in float16."""
    # Two instructions for two numbers of either; what the compiler makes of shifts takes eight.
    if INTERPRETED:
        even, odd = (pairs & 0xFF).to(tl.uint8), ((pairs >> 8) & 0xFF).to(tl.uint8)
        return even.to(tl.float8e4nv, bitcast=True).to(tl.float16), odd.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:  # noqa: RET505
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 even, odd;
            .reg .b16 low, high, unused;
            prmt.b32 even, $2, 0, 0x4420;
            prmt.b32 odd, $2, 0, 0x4431;
            mov.b32 {low, unused}, even;
            mov.b32 {high, unused}, odd;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }
            """,
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
