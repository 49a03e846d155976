"""The programs of a model, one entry each: which steps it runs, and how it is compiled.

A symbolic prefill, a second one that reads embeddings in place of token ids, for calls with ``inputs_embeds``, a decode
step for batch 1 and one for all larger batches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from compiled_llm.compilation.inputs import DecodeInputs, PrefillInputs
from compiled_llm.compilation.options import decode_options, prefill_options
from compiled_llm.compilation.steps import decode_step, prefill_step
from compiled_llm.config import WrapConfig

PREFILL, DECODE_ONE, DECODE_MANY = "prefill", "decode, batch 1", "decode, larger batches"
PREFILL_EMBEDDED = "prefill from embeddings"

StepInputs: TypeAlias = PrefillInputs | DecodeInputs


class Program(NamedTuple):
    """One compiled function of a model.

    Attributes:
        name: its name in reports.
        serves: whether it runs a step with these inputs; of several programs, the first in ``PROGRAMS`` does.
        step: the function that is traced.
        options: Inductor's options for it.
        decodes: whether each row has one new token.
        on_demand: whether it is compiled only for calls that need it, so that reports leave it out before.
    """

    name: str
    serves: Callable[[StepInputs], bool]
    step: Callable[..., Any]
    options: Callable[[WrapConfig, torch.device], dict[str, Any]]
    decodes: bool = False
    on_demand: bool = False


def _reads_embeddings(inputs: StepInputs) -> bool:
    return isinstance(inputs, PrefillInputs) and inputs.ids.dim() == 3


def _reads_ids(inputs: StepInputs) -> bool:
    return isinstance(inputs, PrefillInputs) and inputs.ids.dim() == 2


def _has_one_row(inputs: StepInputs) -> bool:
    return isinstance(inputs, DecodeInputs) and inputs.slots.shape[0] == 1


PROGRAMS: tuple[Program, ...] = (
    Program(PREFILL, _reads_ids, prefill_step, prefill_options),
    Program(PREFILL_EMBEDDED, _reads_embeddings, prefill_step, prefill_options, on_demand=True),
    Program(DECODE_ONE, _has_one_row, decode_step, partial(decode_options, one_row=True), decodes=True),
    Program(
        DECODE_MANY,
        lambda inputs: isinstance(inputs, DecodeInputs),
        decode_step,
        partial(decode_options, one_row=False),
        decodes=True,
    ),
)


def program_for(inputs: StepInputs) -> Program:
    """Return the program that runs a step with these inputs."""
    return next(program for program in PROGRAMS if program.serves(inputs))
