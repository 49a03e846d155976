"""Profiles: JSON of which steps requests have used and how often, without content, for the next process to prepare."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from compiled_llm.compilation.artifacts.manifest import MadeFor, differences
from compiled_llm.compilation.graphs.step_key import Phase, StepKey

FORMAT = 1

_NUMBERS = ("tokens", "rows", "variant", "uses")


@dataclass(frozen=True)
class Profile:
    """The steps that requests have used."""

    made_for: MadeFor  # the model and all else that decides the sizes
    uses: Mapping[StepKey, int]  # how often each step was used
    embeddings: int = 0  # how many prefills began from embeddings

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a file of ``save``; ValueError if there is none, or it is no profile of this format."""
        try:
            content = Path(path).expanduser().read_bytes()
        except OSError as error:
            raise ValueError(f"profile={os.fspath(path)!r} cannot be read: {error.strerror}") from None
        try:
            return cls._decoded(content)
        except ValueError as error:
            raise ValueError(f"profile={os.fspath(path)!r} {error}; remove it, and have it saved again") from None

    @classmethod
    def _decoded(cls, content: bytes) -> Profile:
        try:
            fields = json.loads(content)
            version = fields["format"]
            if version == FORMAT:
                uses = dict(map(_use, fields["steps"]))
                return cls({**fields["made_for"]}, uses, _count(fields["embeddings"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError("is damaged, or is no profile") from None
        raise ValueError(f"has format {version!r}, and this version reads {FORMAT}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, atomically: at any moment the file is whole, the old one or the new."""
        target = Path(path).expanduser().absolute()
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.unfinished-", dir=target.parent)
        unfinished = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(self._encoded())
                file.flush()
                os.fsync(handle)
            unfinished.chmod(0o644)
            unfinished.replace(target)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    def _encoded(self) -> bytes:
        names = ("phase", *_NUMBERS)  # none of them gives hidden states
        steps = [dict(zip(names, (*step.numbers, uses), strict=True)) for step, uses in self.by_use]
        fields = {"format": FORMAT, "made_for": dict(self.made_for), "embeddings": self.embeddings, "steps": steps}
        return json.dumps(fields, indent=1).encode() + b"\n"

    @property
    def by_use(self) -> list[tuple[StepKey, int]]:
        """The steps and how often each was used, the most used ones first."""
        return sorted(self.uses.items(), key=lambda entry: (-entry[1], entry[0]))

    @property
    def masked(self) -> bool:
        """Whether tokens were sampled under masks."""
        return any(step.masked for step in self.uses)

    def check(self, here: MadeFor) -> None:
        """Raise ValueError, with the differences, if it is of a model or options with other sizes."""
        if different := differences(self.made_for, here):
            raise ValueError(
                f"profile: it was saved for something else: {'; '.join(different)}; use one that was saved with this "
                "model and these options"
            )

    def after(self, earlier: Profile | None) -> Profile:
        """Return this one with the uses of earlier runs, which count half as much with each run."""
        if earlier is None:
            return self
        uses = Counter({step: uses // 2 for step, uses in earlier.uses.items()})
        uses.update(self.uses)
        return Profile(self.made_for, +uses, self.embeddings + earlier.embeddings // 2)


def _use(row: Mapping[str, Any]) -> tuple[StepKey, int]:
    if row["phase"] not in get_args(Phase):
        raise ValueError
    tokens, rows, variant, uses = (_count(row[name]) for name in _NUMBERS)
    return StepKey.numbered(row["phase"], tokens, rows, variant), uses


def _count(number: object) -> int:
    if type(number) is not int or number < 0:
        raise ValueError
    return number
