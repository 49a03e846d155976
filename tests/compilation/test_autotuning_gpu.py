"""On a GPU Inductor's tilings are chosen by how long they take as they run: one after the other, in a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.utils import fresh_cache

from compiled_llm.compat.torch import autotuning
from compiled_llm.compat.torch.autotuning import time_kernels_in_graphs
from support.gpu import needs_cuda

pytestmark = [pytest.mark.gpu, needs_cuda]


def norm_and_rotate(queries: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What a prefill does to its queries `[T, heads, head_dim]`, and overwrites them."""
    normed = queries.float() * torch.rsqrt(queries.float().square().mean(-1, keepdim=True) + 1e-6)
    normed = (normed * weight).to(queries.dtype)
    left, right = normed.chunk(2, dim=-1)
    return queries.copy_(normed * cos + torch.cat([-right, left], -1) * sin)


def test_tilings_are_timed_in_graphs_and_what_a_kernel_overwrites_is_kept(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    time_kernels_in_graphs()
    captured: list[object] = []
    several: list[int] = []
    capture, benchmark = autotuning.captured_into, CachingAutotuner.benchmark_all_configs

    def counted(*args: Any) -> Any:
        captured.append(args)
        return capture(*args)

    def seen(self: CachingAutotuner, *args: Any, **kwargs: Any) -> dict[Any, float]:
        several.append(len(self.launchers))
        timed = benchmark(self, *args, **kwargs)
        print({str(launcher.config): took for launcher, took in timed.items()})
        return timed

    monkeypatch.setattr(autotuning, "captured_into", counted)
    monkeypatch.setattr(CachingAutotuner, "benchmark_all_configs", seen)
    torch.manual_seed(seed)
    queries = torch.randn(512, 16, 128, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(128, device="cuda", dtype=torch.bfloat16)
    cos, sin = torch.randn(2, 512, 1, 128, device="cuda", dtype=torch.bfloat16)
    expected = norm_and_rotate(queries.clone(), weight, cos, sin)
    options: dict[str, Any] = {"triton.enable_pdl": torch.cuda.get_device_capability() >= (9, 0)}
    with fresh_cache():
        out = torch.compile(norm_and_rotate, options=options, dynamic=True)(queries, weight, cos, sin)
    torch.testing.assert_close(out, expected, rtol=5e-2, atol=0.1)  # rounded elsewhere
    assert several, "no kernel had several tilings"
    assert len(captured) == sum(several)
    torch._dynamo.reset()
