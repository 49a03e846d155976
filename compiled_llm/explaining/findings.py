"""Findings, one for each line at fault."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from compiled_llm.model.places import NOWHERE, Place

Kind = Literal[
    "refused",
    "error",
    "graph break",
    "recompile",
    "pinned",
    "no CUDA graph",
    "captured again",
    "cold start",
    "slow path",
]
"""Kinds of findings: what ``wrap`` refuses, what forward raises, where tracing stops, and slower paths."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, the line at fault if it has one, and the remedy."""

    kind: Kind
    place: Place
    reason: str
    advice: str
    programs: tuple[str, ...] = ()  # the names of our programs in which it was found
    detail: str = ""  # torch's own words
    # for a recompile, the name or attribute that the graph relied on; ``old`` is its value when the graph was compiled,
    # ``new`` its value when the graph did not fit any more
    pinned_by: str = ""
    old: str = ""
    new: str = ""
    follows: bool = False  # whether it was seen only after tracing had stopped already, and may be a consequence

    def data(self) -> dict[str, Any]:
        data = dict(vars(self))
        place: Place = data.pop("place")
        return {**data, **place._asdict(), "source": place.source, "programs": list(self.programs)}


@dataclass
class Findings:
    """Findings without repetition: what is wrong with a line is said once, for all programs."""

    entries: dict[tuple[str, str, int, str], Finding] = field(default_factory=dict)

    def add(self, finding: Finding) -> None:
        """Add a finding, or its programs to the finding that says the same."""
        key = (finding.kind, finding.place.file, finding.place.line, finding.reason)
        known = self.entries.get(key)
        if known is None:
            self.entries[key] = finding
        else:
            programs = tuple(dict.fromkeys([*known.programs, *finding.programs]))
            self.entries[key] = replace(known, programs=programs, follows=known.follows and finding.follows)

    def extend(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self.add(finding)

    def sorted(self) -> list[Finding]:
        """Return causes before consequences, each in the order in which they were found."""
        return sorted(self.entries.values(), key=lambda finding: finding.follows)


def general(kind: Kind, reason: str, advice: str, place: Place = NOWHERE, detail: str = "") -> Finding:
    return Finding(kind, place, reason, advice, detail=detail)
