"""Whether a prompt and the rows that run are faster in one launch than in two."""

# One launch reads the weights once, two read them twice. Three costs stand against that. The host takes a millisecond
# or two to prepare it, longer than a small model takes to read its weights. Running rows may push the launch into a
# larger captured shape, whose padding is computed, too; up to some hundred tokens the device waits for weights, and
# padding is free. Running rows attend as rows of a prefill, one query each, which takes about as long again as reading
# their keys and values in a decode step.
# The rule is fitted to an H200 alone (Qwen3 of 0.6B and 8B; 1 to 120 rows of 256 and 2,048 tokens, prompts of 64, 256
# and 1,024). The page about the engine's design has the figures.

from __future__ import annotations

from typing import NamedTuple

LEAST_WEIGHTS = 8 * 10**9
"""Bytes of the layers' matrices; 0.9 GB do not pay, 14 GB do, and nothing between was measured."""
FREE_TOKENS = 128
"""Up to so many tokens, a launch waits for weights, so that padding costs nothing."""
TOKENS_A_READ = 200
"""The tokens that the device computes while it reads the weights."""


class MixedStep(NamedTuple):
    """The sizes that decide between one launch and two."""

    weights: int  # the bytes of the layers' matrices, which the second launch would read again
    alone: int  # the tokens that the prompts' launch computes, padding included
    together: int  # those of a launch of prompts and running rows
    kept: int  # the bytes of the running rows' keys and values; layers with windows count whole

    @property
    def pays(self) -> bool:
        padding = max(0, self.together - max(self.alone, FREE_TOKENS))
        return self.weights >= LEAST_WEIGHTS and padding / TOKENS_A_READ + self.kept / self.weights < 1
