"""The programs of a model, one entry each: which steps it runs, and how it is compiled."""

# A symbolic prefill, and a second one for rows without cached tokens, where layers attend to these directly; a decode
# step for batch 1, one for all larger batches, and one for rows that begin with the same pages. Steps that give more
# outputs than logits run in programs of their own, made of these. One more is for calls of the model itself whose rows
# are new, and needs no pages. Parts have programs of their own, and so has what rows bring besides ids.

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from compiled_llm.compilation.inputs import DecodeInputs, ExtraTensors, OwnInputs, PrefillInputs, UnpagedInputs
from compiled_llm.compilation.options import decode_options, prefill_options
from compiled_llm.compilation.program import (
    PREFILL as PREFILL,
    PREFILL_ALONE as PREFILL_ALONE,
    Program,
    ProgramInputs,
    with_outputs,
)
from compiled_llm.compilation.steps import decode_step, prefill_step, unpaged_step
from compiled_llm.features import Seams, features

DECODE_ONE, DECODE_MANY = "decode, batch 1", "decode, larger batches"
UNPAGED = "forward without pages"
DECODE_SHARED = "decode, shared pages read once"


def _reads_ids(inputs: ProgramInputs, alone: bool = False) -> bool:
    return isinstance(inputs, PrefillInputs) and inputs.alone is alone


def _decodes(inputs: ProgramInputs, one_row: bool, shared: bool) -> bool:
    """Whether the step decodes one row or more, of one new token each."""
    if not isinstance(inputs, DecodeInputs) or (inputs.shared is not None) is not shared:
        return False
    return (inputs.slots.shape[0] == 1) is one_row


def _is_unpaged(inputs: ProgramInputs) -> bool:
    return isinstance(inputs, UnpagedInputs)


def _decode(name: str, one_row: bool, shared: bool = False) -> Program:
    """Return a program of decode steps."""
    serves = partial(_decodes, one_row=one_row, shared=shared)
    options = partial(decode_options, one_row=one_row)
    return Program(name, serves, decode_step, options, decodes=True, on_demand=shared)


_UNPAGED = Program(UNPAGED, _is_unpaged, unpaged_step, prefill_options, on_demand=True)


class ProgramsPart(Protocol):
    """A part with programs."""

    PROGRAMS: Sequence[Program]


PROGRAMS: tuple[Program, ...] = (
    *(program for part in features(Seams[ProgramsPart]("compilation", "PROGRAMS")) for program in part.PROGRAMS),
    Program(PREFILL, _reads_ids, prefill_step, prefill_options),
    Program(PREFILL_ALONE, partial(_reads_ids, alone=True), prefill_step, prefill_options, on_demand=True),
    _decode(DECODE_ONE, one_row=True),
    _decode(DECODE_MANY, one_row=False),
    _decode(DECODE_SHARED, one_row=False, shared=True),
    _UNPAGED,
)


def _naming_its_program(inputs: ProgramInputs) -> ExtraTensors | OwnInputs | None:
    """Return what of the inputs says which program runs them; None if the list does."""
    if isinstance(inputs, PrefillInputs):
        return inputs.extra
    return None if isinstance(inputs, (DecodeInputs, UnpagedInputs)) else inputs


def program_for(inputs: ProgramInputs) -> Program:
    """Return the program that runs a step with these inputs."""
    if _UNPAGED.serves(inputs):  # first: its calls are short, and looking through all others takes a part of them
        return _UNPAGED
    named = _naming_its_program(inputs)
    program = next(own for own in PROGRAMS if own.serves(inputs)) if named is None else named.program
    wants = inputs.wants
    return program._replace(name=with_outputs(program.name, wants), on_demand=True) if wants else program
