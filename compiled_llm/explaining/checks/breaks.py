"""Graph breaks: turns Dynamo's messages into findings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from compiled_llm.compilation.program_list import DECODE_ONE, PREFILL
from compiled_llm.compilation.steps import decode_step, prefill_step
from compiled_llm.explaining.advice import advise_break
from compiled_llm.explaining.findings import Finding
from compiled_llm.model.places import NOWHERE, Place, blame, is_users, stack_in

_REASON = re.compile(r"Graph Break Reason: (.*?)\s*(?:Developer debug context|User code traceback)", re.DOTALL)
_AT = re.compile(r"Graph break in user code at (?P<file>.+):(?P<line>\d+)")


def findings_in(messages: Iterable[str]) -> list[Finding]:
    """Return a finding for each message, marked as a consequence if an earlier break may have caused it."""
    found = [_finding(message) for message in messages]
    certain = any(is_users(finding.place) for finding in found)
    return [replace(finding, follows=certain and not is_users(finding.place)) for finding in found]


def finding_of(error: Exception, program: str) -> Finding:
    """Return the finding for the error that kept a program from being compiled whole."""
    said = str(error)
    place = blame(stack_in(said))
    reason, advice = advise_break(said, place.source)
    return Finding(
        "graph break", place, reason, advice, (program,), detail=said.partition("from user code:")[0].strip()
    )


def _finding(message: str) -> Finding:
    said = _REASON.search(message)
    place = _place(message)
    detail = said[1] if said else message
    reason, advice = advise_break(detail, place.source)
    return Finding("graph break", place, reason, advice, tuple(_programs(message)), detail=detail)


def _place(message: str) -> Place:
    stack = stack_in(message.partition("User code traceback:")[2] or message)
    if stack:
        return blame(_without_ours_python(stack))
    at = _AT.search(message)
    return Place(at["file"], int(at["line"]), "") if at else NOWHERE


def _without_ours_python(stack: Sequence[Place]) -> list[Place]:
    """Drop the traceback inside Dynamo that some messages end with."""
    inside = next((index for index, place in enumerate(stack) if "/torch/_dynamo/" in place.file), None)
    return list(stack if inside in (None, 0) else stack[:inside])


def _programs(message: str) -> Iterator[str]:
    for function, program in ((prefill_step, PREFILL), (decode_step, DECODE_ONE)):
        if re.search(rf"in {function.__name__}\b", message):
            yield program
