"""A program as it is kept: inputs, calls of compiled functions, outputs, and what has to hold for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from compiled_llm.compilation.kept.layout import Shapes, Size, Sizes
from compiled_llm.compilation.kept.paths import Path

FORMAT = 1


class Call(NamedTuple):
    """A call of a compiled function; values are numbered, inputs first, then results in the order of the calls."""

    code: int
    values: Sequence[int]
    results: int  # how many it has


@dataclass(frozen=True)
class KeptProgram:
    """One trace of one program, or why it is not kept."""

    name: str  # the program's
    refused: str | None = None
    inputs: Sequence[Path | Size] = ()  # where a tensor lies, or a size
    calls: Sequence[Call] = ()
    codes: Sequence[Mapping[str, Any]] = ()  # as ``RegionCode.encoded``
    result: Any = None  # how values are packed, as ``packing`` says
    tensors: Sequence[Sizes] = ()  # of arguments that differ from call to call
    guards: Sequence[str] = ()  # what has to hold for sizes
    ranges: Mapping[str, Sequence[int | None]] = field(default_factory=dict)
    form: Sequence[str] = ()  # of arguments that differ from call to call
    model: str = ""  # the form of the model's tensors
    written: Sequence[int] = ()  # the inputs that are written to
    shared: Sequence[Sequence[int]] = ()  # those that share memory with one of them
    fingerprint: Any = None  # as ``Fingerprint.encoded``

    @property
    def shapes(self) -> Shapes:
        return Shapes(self.tensors, self.guards, self.ranges)

    def encoded(self) -> bytes:
        return json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True, indent=1).encode() + b"\n"

    @classmethod
    def decoded(cls, content: bytes) -> KeptProgram:
        """Read what ``encoded`` returns; ValueError if it is something else, or of another format."""
        try:
            fields = json.loads(content)
            if fields.pop("format") != FORMAT:
                raise ValueError("it is of another format")
            fields["inputs"] = [tuple(entry) if isinstance(entry, list) else entry for entry in fields["inputs"]]
            fields["calls"] = [Call(*entry) for entry in fields["calls"]]
            fields["tensors"] = [Sizes(tuple(path), sizes, strides) for path, sizes, strides in fields["tensors"]]
            return cls(**fields)
        except (KeyError, TypeError) as error:
            raise ValueError(f"no kept program: {error}") from None
