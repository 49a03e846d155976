"""The op that writes tokens into the texts of rows."""

# Shapes: B rows, n tokens of each, X slots, L tokens of a text.

from __future__ import annotations

import torch

from compiled_llm_ops.drafts.contracts import WriteTexts
from compiled_llm_ops.library import define_op, kernel_of


@define_op(WriteTexts, writes=("texts",))
def write_texts(args: WriteTexts) -> None:
    """Write tokens of rows into their texts, side by side.

    Args:
        texts: ``[X, L]`` int32, contiguous, written: the tokens of each slot's row.
        slots: ``[B]`` int64, the slot of each row.
        starts: ``[B]`` int32, where the first of a row's tokens goes; those before 0 or from L on go nowhere.
        tokens: ``[B, n]`` int64.

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source:
        As vLLM keeps the tokens of requests, https://docs.vllm.ai. On CUDA a Triton kernel of our own.
    """


def _check(args: WriteTexts) -> None:
    texts, rows = args.texts, args.slots.shape[0]
    if texts.dim() != 2 or texts.dtype != torch.int32 or not texts.is_contiguous():
        raise ValueError(f"write_texts: texts must be [X, L] int32, contiguous; got {list(texts.shape)} {texts.dtype}")
    wanted = {
        "slots": ([rows], torch.int64),
        "starts": ([rows], torch.int32),
        "tokens": ([rows, args.tokens.shape[-1]], torch.int64),
    }
    for name, (shape, dtype) in wanted.items():
        tensor = getattr(args, name)
        if list(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(f"write_texts: {name} must be {shape} {dtype}; got {list(tensor.shape)} {tensor.dtype}")


@kernel_of(write_texts, "CPU")
def _cpu(args: WriteTexts) -> None:
    _check(args)
    places = args.starts[:, None] + torch.arange(args.tokens.shape[1], device="cpu")
    rows, columns = ((places >= 0) & (places < args.texts.shape[1])).nonzero(as_tuple=True)
    args.texts[args.slots[rows], places[rows, columns]] = args.tokens[rows, columns].int()


@kernel_of(write_texts, "CUDA")
def _cuda(args: WriteTexts) -> None:
    from compiled_llm_ops.drafts.kernels import texts as kernels

    _check(args)
    with torch.cuda.device_of(args.texts):
        kernels.write_texts(args)
