"""The op that keeps drafts as far as they are the tokens that were sampled."""

# Shapes: B rows, q tokens sampled in each, X entries of the tables of settings, V vocabulary.

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm_ops.contracts.sampling import MAX_FOLLOWED
from compiled_llm_ops.drafts.contracts import NOT_ACCEPTED, NOT_DRAFTED, AcceptDrafts
from compiled_llm_ops.library import define_op, kernel_of
from compiled_llm_ops.sampling.adjustments import Places, note_tokens


@define_op(AcceptDrafts, writes=("next_token", "counts", "recent"))
def accept_drafts(args: AcceptDrafts) -> Tensor:
    """Keep a row's sampled tokens as far as the drafts before them are what was sampled, and count and remember them.

    The first token of a row always counts. Each further one does if the one before does, and the draft that it follows
    is that one.

    Args:
        sampled: ``[B, q]`` int64, the token sampled after each that the row fed in; ``NOT_A_TOKEN`` equals no draft.
        drafts: ``[B, q - 1]`` int64, what it fed in after its first token.
        offered: ``[B]`` int32, how many of them may count.
        slots: ``[B]`` int64, each row's entry in the tables; several rows may have one whose adjustments are 0.
        positions: ``[B]`` int64, the position of the row's first sampled token.
        adjustments: ``[X]`` int32, as of ``sample_tokens``.
        next_token: ``[X]`` int64, written: the last token that counts, or 0 if that is ``NOT_A_TOKEN``.
        counts: ``[X, V]`` int16, written as ``sample_tokens`` does for each token that counts.
        recent: ``[X, MAX_FOLLOWED + 1]`` int32, likewise.

    Returns:
        ``[B, q]`` int64, the sampled tokens that count, and ``NOT_ACCEPTED`` or ``NOT_DRAFTED`` for the others.

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source:
        Speculative decoding, https://arxiv.org/abs/2211.17192, where each draft is compared with one sample: rows get
        the tokens that they would get without drafts. On CUDA a Triton kernel of our own.
    """
    return torch.empty_like(args.sampled)


def _check(args: AcceptDrafts) -> None:
    if args.sampled.dim() != 2:
        raise ValueError(f"accept_drafts: sampled must be [B, q]; got {list(args.sampled.shape)}")
    (rows, new), (entries, vocabulary) = args.sampled.shape, args.counts.shape
    wanted = {
        "sampled": ([rows, new], torch.int64),
        "drafts": ([rows, new - 1], torch.int64),
        "offered": ([rows], torch.int32),
        "slots": ([rows], torch.int64),
        "positions": ([rows], torch.int64),
        "adjustments": ([entries], torch.int32),
        "next_token": ([entries], torch.int64),
        "counts": ([entries, vocabulary], torch.int16),
        "recent": ([entries, MAX_FOLLOWED + 1], torch.int32),
    }
    for name, (shape, dtype) in wanted.items():
        tensor = getattr(args, name)
        if list(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(f"accept_drafts: {name} must be {shape} {dtype}; got {list(tensor.shape)} {tensor.dtype}")
    if new > MAX_FOLLOWED + 1:
        raise ValueError(f"accept_drafts: at most {MAX_FOLLOWED + 1} tokens of a row can be sampled; got {new}")


@kernel_of(accept_drafts, "CPU")
def _cpu(args: AcceptDrafts) -> Tensor:
    _check(args)
    new = args.sampled.shape[1]
    at, offered = torch.arange(new, device="cpu"), args.offered[:, None]
    right = (args.drafts == args.sampled[:, :-1]) & (at[:-1] < offered)
    accepted = right.int().cumprod(dim=1).sum(dim=1)
    others = torch.where(at <= offered, NOT_ACCEPTED, NOT_DRAFTED)
    tokens = torch.where(at <= accepted[:, None], args.sampled, others)
    args.next_token[args.slots] = tokens.gather(1, accepted[:, None])[:, 0].clamp(min=0)
    for place in range(new):
        places = Places(args.slots, args.positions + place)
        note_tokens(args.counts, args.recent, places, tokens[:, place], args.adjustments[args.slots])
    return tokens


@kernel_of(accept_drafts, "CUDA")
def _cuda(args: AcceptDrafts) -> Tensor:
    from compiled_llm_ops.drafts.kernels import acceptance as kernels

    _check(args)
    with torch.cuda.device_of(args.sampled):
        return kernels.accept_drafts(args)
