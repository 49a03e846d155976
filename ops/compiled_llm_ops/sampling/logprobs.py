"""Log-probabilities of one token a row, and of the most likely ones."""

# Shapes: R rows, V vocabulary, K most likely tokens.

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm_ops.contracts.sampling import TopLogprobs
from compiled_llm_ops.library import define_op, kernel_of

_AT_ONCE = 2**24  # numbers of ``[R, V]`` float32 that are computed together on a CPU


@define_op(TopLogprobs)
def top_logprobs(args: TopLogprobs) -> Tensor:
    """Return the log-probability of a token of each row, its rank, and the most likely tokens; CUDA reads logits once.

    Args:
        logits: ``[R, V]`` of any floating dtype, computed with in float32, with any stride between rows.
        tokens: ``[R]`` int64, one a row; a negative one counts as the first.
        num_logprobs: K, how many of the most likely tokens, from 0 to V.

    Returns:
        ``[R, 2 + 2 * K]`` int32: the bits of the token's log-probability in float32; its rank, which is 1 plus the
        number of more likely tokens; the bits of the K largest log-probabilities in descending order; and their
        tokens. Which of several equally likely tokens are among them is not defined.

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source:
        ``torch.log_softmax`` and ``torch.topk``: https://docs.pytorch.org/docs/stable/generated/torch.topk.html. On
        CUDA ``kernels.logprobs``.
    """
    return args.logits.new_empty(args.logits.shape[0], 2 + 2 * args.num_logprobs, dtype=torch.int32)


def _check(args: TopLogprobs) -> None:
    logits, tokens, num_logprobs = args
    if logits.dim() != 2 or not logits.dtype.is_floating_point:
        raise ValueError(f"top_logprobs: logits must be [R, V] floats; got {list(logits.shape)} {logits.dtype}")
    if tokens.shape != logits.shape[:1] or tokens.dtype != torch.int64:
        raise ValueError(
            f"top_logprobs: tokens must be [{logits.shape[0]}] int64; got {list(tokens.shape)} {tokens.dtype}"
        )
    if not 0 <= num_logprobs <= logits.shape[1]:
        raise ValueError(f"top_logprobs: num_logprobs={num_logprobs} must be from 0 to {logits.shape[1]}")


@kernel_of(top_logprobs, "CPU")
def _cpu(args: TopLogprobs) -> Tensor:
    _check(args)
    rows = max(1, _AT_ONCE // args.logits.shape[1])
    parts = zip(args.logits.split(rows), args.tokens.split(rows), strict=True)
    return torch.cat([_of_some(logits, tokens, args.num_logprobs) for logits, tokens in parts])


def _of_some(logits: Tensor, tokens: Tensor, num_logprobs: int) -> Tensor:
    values = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    sampled = values.gather(1, tokens.clamp(min=0)[:, None])
    ranks = (values > sampled).sum(dim=-1, keepdim=True) + 1
    best, places = values.topk(num_logprobs)
    return torch.cat([sampled.view(torch.int32), ranks.int(), best.view(torch.int32), places.int()], dim=1)


@kernel_of(top_logprobs, "CUDA")
def _cuda(args: TopLogprobs) -> Tensor:
    from compiled_llm_ops.sampling.kernels import logprobs as triton_logprobs

    _check(args)
    if args.logits.dtype == torch.float64:
        args = args._replace(logits=args.logits.float())
    with torch.cuda.device_of(args.logits):
        return triton_logprobs.top_logprobs(args)
