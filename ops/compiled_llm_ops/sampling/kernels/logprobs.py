"""The CUDA kernels of ``logprobs``, in Triton."""

# The first kernel reads the logits once, with the whole device, and writes, for each span, the largest one, the mass
# and how many tokens are more likely than the given one, and the largest logit of each tile of neighbouring tokens. The
# second, one program a row, takes the most likely tokens one after the other: each lies in the tile with the largest
# remaining logit.
# Shapes: R rows, V vocabulary, K most likely tokens.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm_ops.contracts.sampling import TopLogprobs

_TILE = tl.constexpr(128)
_SPAN = tl.constexpr(4096)
_NO_TOKEN = tl.constexpr(2**31 - 1)
_WARPS = 4


def top_logprobs(args: TopLogprobs) -> Tensor:
    """Launch the kernels, and return ``[R, 2 + 2 * K]`` int32; ``args`` are checked, with logits of at most 32 bits."""
    logits = args.logits if args.logits.stride(1) == 1 else args.logits.contiguous()
    rows, vocabulary = logits.shape
    tiles, spans = triton.cdiv(vocabulary, _TILE.value), triton.cdiv(vocabulary, _SPAN.value)
    device = logits.device
    peaks = torch.empty(rows, tiles, dtype=torch.float32, device=device)
    largest = torch.empty(rows, spans, dtype=torch.float32, device=device)
    mass = torch.empty(rows, spans, dtype=torch.float32, device=device)
    likelier = torch.empty(rows, spans, dtype=torch.int32, device=device)
    packed = torch.empty(rows, 2 + 2 * args.num_logprobs, dtype=torch.int32, device=device)
    shared = (logits, logits.stride(0), args.tokens, vocabulary, peaks, tiles, largest, mass, likelier, spans)
    _summarise_for_logprobs[(rows, spans)](*shared, num_warps=_WARPS)
    _take_likeliest[(rows,)](
        *shared, packed, args.num_logprobs, padded_tiles=triton.next_power_of_2(tiles),
        padded_spans=triton.next_power_of_2(spans), num_warps=_WARPS,
    )  # fmt: skip
    return packed


@triton.jit
def _summarise_for_logprobs(
    logits, stride, tokens, vocabulary, peaks, tiles, largest, mass, likelier, spans
):  # fmt: skip
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = logits + row * stride
    sampled = tl.load(source + tl.maximum(tl.load(tokens + row), 0)).to(tl.float32)
    place = span * _SPAN + tl.arange(0, _SPAN)
    scores = tl.load(source + place, mask=place < vocabulary, other=float("-inf")).to(tl.float32)
    peak = tl.max(scores, axis=0)
    base = tl.where(peak > float("-inf"), peak, 0.0)
    at = row * spans + span
    tl.store(largest + at, peak)
    tl.store(mass + at, tl.sum(tl.exp(scores - base), axis=0))
    tl.store(likelier + at, tl.sum((scores > sampled).to(tl.int32), axis=0))
    tile = span * (_SPAN // _TILE) + tl.arange(0, _SPAN // _TILE)
    of_tiles = tl.max(tl.reshape(scores, (_SPAN // _TILE, _TILE)), axis=1)
    tl.store(peaks + row * tiles + tile, of_tiles, mask=tile < tiles)


@triton.jit(do_not_specialize=["num_logprobs"])
def _take_likeliest(
    logits, stride, tokens, vocabulary, peaks, tiles, largest, mass, likelier, spans, packed, num_logprobs,
    padded_tiles: tl.constexpr, padded_spans: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source, result = logits + row * stride, packed + row * (2 + 2 * num_logprobs)
    span = tl.arange(0, padded_spans)
    inside = span < spans
    of_spans = tl.load(largest + row * spans + span, mask=inside, other=float("-inf"))
    peak = tl.max(of_spans, axis=0)
    masses = tl.load(mass + row * spans + span, mask=inside, other=0.0)
    total = tl.sum(tl.where(of_spans > float("-inf"), masses * tl.exp(of_spans - peak), 0.0), axis=0)
    normaliser = peak + tl.log(total)
    rank = 1 + tl.sum(tl.load(likelier + row * spans + span, mask=inside, other=0), axis=0)
    sampled = tl.load(source + tl.maximum(tl.load(tokens + row), 0)).to(tl.float32) - normaliser
    tl.store(result, sampled.to(tl.int32, bitcast=True))
    tl.store(result + 1, rank)

    tile, lane = tl.arange(0, padded_tiles), tl.arange(0, _TILE)
    left = tl.load(peaks + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
    value, token = peak + 1.0, tl.max(tile, axis=0) * 0 - 1  # above all others
    for number in range(num_logprobs):
        first = tl.argmax(left, axis=0) * _TILE
        place = first + lane
        scores = tl.load(source + place, mask=place < vocabulary, other=float("-inf")).to(tl.float32)
        # What comes before in the order, by score and then by token, has been taken.
        remains = (place < vocabulary) & ((scores < value) | ((scores == value) & (place > token)))
        value = tl.max(tl.where(remains, scores, float("-inf")), axis=0)
        token = tl.min(tl.where(remains & (scores == value), place, _NO_TOKEN), axis=0)
        token = tl.minimum(token, vocabulary - 1)
        tl.store(result + 2 + number, (value - normaliser).to(tl.int32, bitcast=True))
        tl.store(result + 2 + num_logprobs + number, token)
        remains = remains & ((scores < value) | (place > token))
        left = tl.where(tile * _TILE == first, tl.max(tl.where(remains, scores, float("-inf")), axis=0), left)
