"""The op that proposes what followed the same tokens earlier in a row's text."""

# Shapes: B rows, X slots, L tokens of a text.

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm_ops.drafts.contracts import NgramDrafts
from compiled_llm_ops.library import define_op, kernel_of


@define_op(NgramDrafts)
def ngram_drafts(args: NgramDrafts) -> tuple[Tensor, Tensor]:
    """Propose what followed the last tokens of each row's text where they stand earlier in it.

    Of a row's last ``longest`` to ``shortest`` tokens, the most that stand earlier in the text with a token after them
    are looked for; where they stand several times, the latest place counts after which there are ``k`` tokens, or the
    latest of all if there are fewer after each: text that goes round in a short circle is proposed for several rounds.

    Args:
        texts: ``[X, L]`` int32, contiguous, the tokens of each slot's row; a negative number stands for a token that is
            not known, which equals none and is not proposed, nor is what comes after it.
        slots: ``[B]`` int64, the slot of each row.
        lengths: ``[B]`` int32, how many tokens each row's text has, at most L; 0 for a row that wants no drafts.
        longest: ``[X]`` int32, the most tokens that are looked for, in each slot.
        shortest: ``[X]`` int32, the fewest; 1 if it is below.
        k: how many tokens to propose for a row at most, 1 or more.

    Returns:
        ``[B, k]`` int32, proposed tokens, 0 where there is none, and ``[B]`` int32, how many there are.

    Raises:
        ValueError: shapes or dtypes do not fit together, or ``k`` is below 1.

    Source:
        Prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding. On CUDA a Triton kernel of our
        own.
    """
    rows = args.slots.shape[0]
    return args.texts.new_empty((rows, args.k)), args.texts.new_empty(rows)


def _check(args: NgramDrafts) -> None:
    texts, slots = args.texts, args.slots
    if texts.dim() != 2 or texts.dtype != torch.int32 or not texts.is_contiguous():
        raise ValueError(f"ngram_drafts: texts must be [X, L] int32, contiguous; got {list(texts.shape)} {texts.dtype}")
    rows, entries = slots.shape[0], texts.shape[0]
    wanted = {
        "slots": ([rows], torch.int64),
        "lengths": ([rows], torch.int32),
        "longest": ([entries], torch.int32),
        "shortest": ([entries], torch.int32),
    }
    for name, (shape, dtype) in wanted.items():
        tensor = getattr(args, name)
        if list(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(f"ngram_drafts: {name} must be {shape} {dtype}; got {list(tensor.shape)} {tensor.dtype}")
    if args.k < 1:
        raise ValueError(f"ngram_drafts: k={args.k} must be 1 or more")


@kernel_of(ngram_drafts, "CPU")
def _cpu(args: NgramDrafts) -> tuple[Tensor, Tensor]:
    _check(args)
    texts = args.texts.numpy()
    tokens = np.zeros((len(args.slots), args.k), dtype=np.int32)
    counts = np.zeros(len(args.slots), dtype=np.int32)
    numbers = args.slots, args.lengths, args.longest[args.slots], args.shortest[args.slots]
    for row, (slot, length, longest, shortest) in enumerate(torch.stack([*map(Tensor.long, numbers)], 1).tolist()):
        found = _following(texts[slot, :length], longest, max(1, shortest), args.k)
        tokens[row, : len(found)] = found
        counts[row] = len(found)
    return torch.from_numpy(tokens), torch.from_numpy(counts)


def _following(text: NDArray[np.int32], longest: int, shortest: int, k: int) -> NDArray[np.int32]:
    """Return what is proposed after a text."""
    earlier = max(0, len(text) - 1)  # places at which the tokens looked for may end
    same, matched = np.ones(earlier, dtype=bool), np.zeros(earlier, dtype=np.int64)
    for back in range(min(longest, earlier)):
        wanted = text[-1 - back]
        same[:back] = False
        same[back:] &= (text[: earlier - back] == wanted) & (wanted >= 0)
        matched += same
    if not earlier or matched.max() < shortest:
        return text[:0]
    places = np.flatnonzero(matched == matched.max())
    whole = places[places < len(text) - k]
    after = (whole if len(whole) else places)[-1] + 1
    following = text[after : after + k]
    return following[: len(following) if (following >= 0).all() else int((following < 0).argmax())]


@kernel_of(ngram_drafts, "CUDA")
def _cuda(args: NgramDrafts) -> tuple[Tensor, Tensor]:
    from compiled_llm_ops.drafts.kernels import ngrams as kernels

    _check(args)
    with torch.cuda.device_of(args.texts):
        return kernels.ngram_drafts(args)
