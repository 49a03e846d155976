"""Keys and values in the dtype of their pages, for the Triton kernels that write them and those that read them.

Shapes: M heads, D' head dimension as loaded, K kv heads.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def as_stored(states, pages, scale, head, saturated, mask):
    """Return heads ``[M, D']`` as ``pages`` hold them: in fp8 divided by their scale, clamped and rounded.

    ``scale`` ``[K]`` is read at ``head``, a number or ``[M, 1]``. To ``saturated`` is added how many numbers under the
    mask are clamped. Both may be None, and are if pages are of another dtype.
    """
    if pages.dtype.element_ty == tl.float8e4nv:
        numbers = states.to(tl.float32)
        if scale is not None:
            # PyTorch rounds its divisions in the same way, so the CPU kernel writes the same bytes.
            numbers = tl.div_rn(numbers, tl.load(scale + head))
        if saturated is not None:
            count = tl.sum((mask & (tl.abs(numbers) > 448.0)).to(tl.int32))
            tl.atomic_add(saturated, count.to(tl.int64), mask=count > 0, sem="relaxed")
        numbers = tl.clamp(numbers, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        numbers = states
    return numbers.to(pages.dtype.element_ty)


@triton.jit
def as_multiplied(q, scale, pages):
    """Return queries ``[M, D']`` in the dtype that keys of ``pages`` are multiplied in, and the factor on their logits.

    One instruction makes float16 of two numbers of fp8; bfloat16 takes several. float16 is too narrow for all that
    queries of bfloat16 can be, so each query is divided by a power of two, which is exact, and its logits are
    multiplied by it: then the factor is ``[M, 1]``.
    """
    if pages.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        numbers = q.to(tl.float32)
        largest = tl.max(tl.abs(numbers), 1)[:, None]
        # The bits of the exponent alone, and not those of zero.
        power = tl.maximum(largest.to(tl.int32, bitcast=True) & 0x7F800000, 0x10000000).to(tl.float32, bitcast=True)
        return (numbers / power).to(tl.float16), scale * power
    else:  # noqa: RET505  the kernel has one branch, known when it is compiled
        return q, scale
