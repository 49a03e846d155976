"""A command line of `vllm serve`: what it is here, and which of its options change nothing or are refused."""

from __future__ import annotations

import re
import shlex
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from compiled_llm.commands.serve.vllm_options import OURS, instead_of

ALWAYS = {
    "--enable-prefix-caching --enable-chunked-prefill --async-scheduling --enable-auto-tool-choice": "",
    "--tensor-parallel-size -tp --pipeline-parallel-size -pp --data-parallel-size -dp --nnodes -n": "1",
    "--kv-cache-dtype --load-format --tokenizer-mode --generation-config --runner --convert": "auto",
    "--block-size": "16",
}
"""Options of vLLM that change nothing here if they have this value, or none if it is empty."""

_FLAG = re.compile(
    r"--(no|enable|use|skip|calculate|allow)-.+|--disable-(?!access-log-for-endpoints).+"
    r"|--(async-scheduling|enforce-eager|trust-remote-code|headless|numa-bind|tokens-only|grpc|fully-sharded-loras)"
)
"""Options of vLLM without a value; what else follows them is the model."""
_SEVERAL = ("--api-key", "--lora-modules", "--cudagraph-capture-sizes", "--middleware", "--logits-processors")


class VllmLine(NamedTuple):
    """vLLM's options on a command line: as typed if ``always`` so, sentences if ``refused``; ``ours`` has the rest."""

    ours: list[str]
    always: list[str]
    refused: list[str]


def read_line(arguments: Sequence[str]) -> VllmLine:
    line = VllmLine([], [], [])
    rest = deque(arguments)
    while rest:
        argument = rest.popleft()
        typed, equals, value = argument.partition("=")
        said = instead_of(typed) if argument.startswith("-") else None
        if said is None:
            line.ours.append(argument)
            continue
        name = typed.replace("_", "-")
        values = [value] if equals else _values(name, rest)
        if _holds_always(name, values):
            line.always.append(shlex.join([typed, *values]))
            continue
        line.refused.append(f"{typed} is an option of vLLM: {said}")
        ours = OURS.get(" ".join([name, *values]), OURS.get(name, ""))
        line.ours.extend(shlex.split(ours.format(shlex.quote(" ".join(values)))))
    return line


def _values(name: str, rest: deque[str]) -> list[str]:
    """Take an option's values off the rest of a line."""
    values: list[str] = []
    most = 0 if _FLAG.fullmatch(name) else len(rest) if name in _SEVERAL else 1
    while rest and len(values) < most and not re.match(r"-(?!\d)", rest[0]):
        values.append(rest.popleft())
    return values


def _holds_always(name: str, values: Sequence[str]) -> bool:
    return any(name in names.split() and " ".join(values) == value for names, value in ALWAYS.items())
