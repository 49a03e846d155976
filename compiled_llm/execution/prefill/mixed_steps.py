"""Whether a prompt and the rows that run are faster in one launch than in two.

One launch reads the weights once; two read them twice. It costs what follows, and pays where that is less:

- The host prepares it in a millisecond or two, which small models do not take to read their weights.
- Running rows may push the launch into a larger captured shape, whose padding is computed, too. Up to some hundred
  tokens the device waits for weights, and padding is free.
- Running rows attend as rows of a prefill, one query each, which takes about as long again as reading their keys and
  values in a decode step.

Fitted to an H200 (Qwen3 of 0.6B and 8B; 1 to 120 rows of 256 and 2,048 tokens, prompts of 64, 256 and 1,024): docs/
design/engine.md has the figures. All of it is in units of the time that the weights take, so it holds for other devices
as far as their arithmetic and bandwidth stand in the same proportion.
"""

from __future__ import annotations

from typing import NamedTuple

LEAST_WEIGHTS = 8 * 10**9
"""Bytes; 1.2 GB do not pay, 14 GB do, and nothing between was measured."""
FREE_TOKENS = 128
TOKENS_A_READ = 200
"""The tokens that the device computes while it reads the weights."""


class MixedStep(NamedTuple):
    """What one launch in place of two would save and cost.

    Attributes:
        weights: the bytes that two launches read once more.
        alone: the tokens that the prompts' launch computes, padding included.
        together: those of a launch of prompts and running rows.
        kept: the bytes of the running rows' keys and values.
    """

    weights: int
    alone: int
    together: int
    kept: int

    @property
    def pays(self) -> bool:
        padding = max(0, self.together - max(self.alone, FREE_TOKENS))
        return self.weights >= LEAST_WEIGHTS and padding / TOKENS_A_READ + self.kept / self.weights < 1
