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
from compiled_llm.compilation.inputs import Pooling, PrefillInputs
from compiled_llm.compilation.options import prefill_options
from compiled_llm.compilation.program import PREFILL, PREFILL_ALONE, Program, ProgramInputs, with_outputs
from compiled_llm.compilation.sampling.sampling import NOT_A_TOKEN, SamplingTables
from compiled_llm.compilation.steps import forward_of_prompts
from compiled_llm.kinds.spec import KVCacheSpec
from compiled_llm.model.facts import Forward

if TYPE_CHECKING:
    from compiled_llm.compilation import pooling as this
    from compiled_llm.compilation.program_list import ProgramsPart

    checked: ProgramsPart = this


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
    if inputs.pooling == "scores":
        asked: dict[str, Any] = {"logits_to_keep": inputs.keep}
    else:  # compiled, logits that nobody reads are not computed; uncompiled, those of one token are
        asked = {"logits_to_keep": inputs.keep[:1], "output_hidden_states": True}
    out = forward_of_prompts(model, forward, inputs, tables, pages, specs, **asked)
    found = out.logits[0] if inputs.pooling == "scores" else out.hidden_states[-1][0, inputs.keep]
    pooled = found.float()
    finite = torch.isfinite(pooled[inputs.sampled]).all(dim=-1)
    return StepOutputs(pooled, torch.where(finite, 0, NOT_A_TOKEN), {})


def _pools(inputs: ProgramInputs, pooling: Pooling, alone: bool) -> bool:
    return isinstance(inputs, PrefillInputs) and inputs.pooling == pooling and inputs.alone is alone


def _program(name: str, pooling: Pooling, alone: bool) -> Program:
    serves = partial(_pools, pooling=pooling, alone=alone)
    return Program(with_outputs(name, (f"pooled {pooling}",)), serves, pooled_step, prefill_options, on_demand=True)


PROGRAMS: Sequence[Program] = (
    _program(PREFILL, "state", alone=False),
    _program(PREFILL_ALONE, "state", alone=True),
    _program(PREFILL, "scores", alone=False),
    _program(PREFILL_ALONE, "scores", alone=True),
)
