"""Answers judged by a model in float32, which is given each text and asked for its best token at each place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from compiled_llm.engine.engine import Engine
from compiled_llm.requests.sampling_params import SamplingParams


class Judged(NamedTuple):
    """How many tokens of an engine's answers there were, and how many were not the best in float32."""

    steps: int
    tokens: int
    missed: int

    def is_worse_than(self, other: Judged) -> bool:
        """Whether more of these miss than noise explains, which is four deviations of the difference of two shares."""
        share = (self.missed + other.missed) / (self.tokens + other.tokens)
        noise = math.sqrt(max(share, 1 / self.tokens) * (1 / self.tokens + 1 / other.tokens))
        return self.missed / self.tokens > other.missed / other.tokens + 4 * noise


def judged(
    model: PreTrainedModel, exact: PreTrainedModel, prompts: Sequence[list[int]], new: int, steps: int, **options: Any
) -> Judged:
    """Answer prompts greedily until the engine has run so many steps, each time beginning with another token."""
    params, not_best, tokens = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True), 0, 0
    with Engine(model, max_num_seqs=len(prompts), **options) as engine:
        turn = 0
        while engine.stats().steps < steps:
            turn += 1
            for output in engine.generate([[turn, *prompt] for prompt in prompts], params):
                not_best += missed(exact, output.prompt_token_ids, output.token_ids)
                tokens += new
        return Judged(engine.stats().steps, tokens, not_best)


@torch.no_grad()
def missed(exact: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> int:
    """Return how many tokens of an answer are not the best that a model in float32 has after those before."""
    ids = torch.tensor([[*prompt, *answer]], device=exact.device)
    best = exact(input_ids=ids, use_cache=False, logits_to_keep=len(answer) + 1).logits[0, :-1].argmax(dim=1)
    return int((best.cpu() != torch.tensor(list(answer))).sum())
