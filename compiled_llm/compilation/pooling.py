"""Prefills that end at the last token of each prompt: its last hidden state, or what a head makes of it; no logits."""

# Shapes: L tokens whose numbers are wanted, W numbers of each, C of them that end a prompt.

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compiled_llm.compilation.graphs.outputs import StepOutputs
from compiled_llm.compilation.graphs.step_key import POOLED, pools
from compiled_llm.compilation.inputs import PrefillInputs
from compiled_llm.compilation.options import prefill_options
from compiled_llm.compilation.program import PREFILL, PREFILL_ALONE, Program, ProgramInputs
from compiled_llm.compilation.sampling.sampling import NOT_A_TOKEN, SamplingTables
from compiled_llm.compilation.steps import forward_of_prompts
from compiled_llm.kinds.spec import KVCacheSpec
from compiled_llm.model.facts import Forward

if TYPE_CHECKING:
    from compiled_llm.compilation import pooling as this
    from compiled_llm.compilation.program_list import ProgramsPart

    checked: ProgramsPart = this

POOLED_STATE, POOLED_SCORES = f"{POOLED} state", f"{POOLED} scores"
"""What a step wants: the last hidden state, as HuggingFace's models return it, or the scores of a classifier's head."""


def pooled_step(
    model: PreTrainedModel,
    forward: Forward,
    inputs: PrefillInputs,
    tables: SamplingTables,
    pages: list[Tensor],
    specs: tuple[KVCacheSpec, ...],
) -> StepOutputs:
    """Run packed tokens through the model: ``[L, W]`` float32 in place of logits.

    In place of tokens there are ``[C]`` int64 zeros, ``NOT_A_TOKEN`` where a number is not finite.
    """
    if POOLED_SCORES in inputs.wants:
        asked: dict[str, Any] = {"logits_to_keep": inputs.keep}
    else:  # compiled, logits that nobody reads are not computed; uncompiled, those of one token are
        asked = {"logits_to_keep": inputs.keep[:1], "output_hidden_states": True}
    out = forward_of_prompts(model, forward, inputs, tables, pages, specs, **asked)
    found = out.logits[0] if POOLED_SCORES in inputs.wants else out.hidden_states[-1][0, inputs.keep]
    pooled = found.float()
    finite = torch.isfinite(pooled[inputs.sampled]).all(dim=-1)
    return StepOutputs(pooled, torch.where(finite, 0, NOT_A_TOKEN), {})


def _pools(inputs: ProgramInputs, alone: bool) -> bool:
    return pools(inputs.wants) and isinstance(inputs, PrefillInputs) and inputs.alone is alone


PROGRAMS: Sequence[Program] = (
    Program(PREFILL, partial(_pools, alone=False), pooled_step, prefill_options, on_demand=True),
    Program(PREFILL_ALONE, partial(_pools, alone=True), pooled_step, prefill_options, on_demand=True),
)
