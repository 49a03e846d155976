"""Filtering logits before a draw, with settings for each row.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compiled_llm_ops.library import define


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Set the logits of tokens that may not be drawn to -inf: by top-k, of those by top-p, of those by min-p.

    Args:
        logits: ``[B, V]`` float32, already divided by the temperature.
        top_k: ``[B]`` int32, keep the k largest; 0 keeps all.
        top_p: ``[B]`` float32, keep the smallest set of largest ones whose probability exceeds p; 1.0 keeps all.
        min_p: ``[B]`` float32, keep those at least p times as probable as the most probable; 0.0 keeps all.

    Returns:
        ``[B, V]`` float32, contiguous. The largest logit of a row is always kept.

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source:
        The order and the sets are those of transformers' logits warpers. On CUDA FlashInfer
        ``flashinfer.sampling.top_k_mask_logits`` and ``top_p_renorm_probs``, which need no sorting
        (https://flashinfer.ai/2025/03/10/sampling.html). Top-p: https://arxiv.org/abs/1904.09751, min-p:
        https://arxiv.org/abs/2407.01082.
    """
    out: Tensor = _filter_logits(logits, top_k, top_p, min_p)
    return out


def _check(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise ValueError(f"filter_logits: logits must be [B, V] float32; got {tuple(logits.shape)} {logits.dtype}")
    rows = logits.shape[:1]
    if not top_k.shape == top_p.shape == min_p.shape == rows:
        raise ValueError(
            f"filter_logits: top_k, top_p and min_p must be {list(rows)}, one entry a row; got "
            f"{list(top_k.shape)}, {list(top_p.shape)} and {list(min_p.shape)}"
        )


def _fake(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    return logits.new_empty(logits.shape)


def _cpu(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    _check(logits, top_k, top_p, min_p)
    out = logits.clone(memory_format=torch.contiguous_format)
    for row, (k, p, least) in enumerate(zip(top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True)):
        if 0 < k < logits.shape[1]:
            out[row].masked_fill_(out[row] < out[row].topk(k).values[-1], -math.inf)
        if p < 1.0:
            ascending, order = out[row].sort()
            removed = ascending.softmax(dim=0).cumsum(dim=0) <= 1.0 - p
            removed[-1] = False
            out[row, order[removed]] = -math.inf
        if least > 0.0:
            probabilities = out[row].softmax(dim=0)
            out[row].masked_fill_(probabilities < least * probabilities.max(), -math.inf)
    return out


def _cuda(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    from compiled_llm_ops.flashinfer_backend import mask_top_k, renormalise_top_p

    _check(logits, top_k, top_p, min_p)
    every = logits.shape[1]
    kept = mask_top_k(logits.contiguous(), torch.where(top_k == 0, every, top_k.clamp(max=every)))
    probabilities = renormalise_top_p(kept.softmax(dim=-1), top_p)
    floor = min_p[:, None] * probabilities.amax(dim=-1, keepdim=True)
    return kept.masked_fill((probabilities <= 0) | (probabilities < floor), -math.inf)


_filter_logits = define(
    "filter_logits(Tensor logits, Tensor top_k, Tensor top_p, Tensor min_p) -> Tensor",
    fake=_fake,
    cpu=_cpu,
    cuda=_cuda,
)
