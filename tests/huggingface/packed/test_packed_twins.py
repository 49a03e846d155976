"""What `test_packed_twins_gpu.py` measures, on a CPU with few steps.

There a weight is unpacked to the same 16 bits: ratios of errors are near 1. That of FP8, whose rows are not rounded,
is far below.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.execution import twins
from support.packed_twins import PACKS, packed_twins

SIZES: dict[str, Any] = {"vocab_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("int4", "FP8") else pytest.mark.whole) for name in PACKS]
)
def test_logits_are_as_exact_as_the_library_s(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twins, "DEVICE", "cpu")
    made = packed_twins(name, seed, SIZES, mode="eager", max_batch_size=2, kv_memory="256 tokens")
    twins.assert_parity_together(twins.parity(made, [9, 3], 40, seed))
    assert made.exact.lm_head.weight.dtype == torch.float32
