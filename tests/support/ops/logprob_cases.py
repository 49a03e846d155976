"""What `top_logprobs` must give of any logits."""

from __future__ import annotations

import torch
from torch import Tensor


def logits_of(kind: str, rows: int, vocabulary: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """`normal` ones; `ties`, of which many are equal; `filtered`, of which few are left; `strided`, in wider rows."""
    generator = torch.Generator(device).manual_seed(vocabulary)
    logits = torch.randn(rows, vocabulary + 3, generator=generator, device=device) * 3
    if kind == "ties":
        logits = logits.round()
    if kind == "filtered":
        kept = logits[:, :vocabulary].topk(3).values[:, -1:]
        logits = logits.masked_fill(logits < kept, -torch.inf)
    logits = logits.to(dtype)[:, :vocabulary]
    return logits if kind == "strided" else logits.contiguous()


def check_packed(packed: Tensor, logits: Tensor, tokens: Tensor, num_logprobs: int) -> None:
    assert (packed.shape, packed.dtype) == ((len(logits), 2 + 2 * num_logprobs), torch.int32)
    expected = torch.log_softmax(logits.double(), dim=-1)
    sampled, values = (
        packed[:, columns].contiguous().view(torch.float32) for columns in (slice(1), slice(2, 2 + num_logprobs))
    )
    of_chosen = expected.gather(1, tokens.clamp(min=0)[:, None])
    torch.testing.assert_close(sampled.double(), of_chosen, atol=1e-5, rtol=1e-6)
    scores = logits.float()
    likelier = (scores > scores.gather(1, tokens.clamp(min=0)[:, None])).sum(dim=1)
    assert torch.equal(packed[:, 1].long(), likelier + 1)
    torch.testing.assert_close(values.double(), expected.topk(num_logprobs).values, atol=1e-5, rtol=1e-6)
    found = packed[:, 2 + num_logprobs :].long()
    assert torch.equal(scores.gather(1, found), scores.topk(num_logprobs).values)
    for row, own in zip(found, values, strict=True):
        kept = row[own > -torch.inf]
        assert len(set(kept.tolist())) == len(kept), "a token stands there twice"
