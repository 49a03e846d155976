"""Random cases: features that are drawn by a seed, on a model that some cases next to each other share."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from support.combined.feature import Feature
from support.combined.features import FEATURES
from support.combined.playing import Playing, RefusedError, Subject

OF_MODEL = [feature for feature in FEATURES if feature.of_model]
OF_ENGINE = [feature for feature in FEATURES if not feature.of_model]
_COMPILING = 8
"""Of so many models on a CPU, one may have features for which it compiles, none of those that usual runs begin with."""


@dataclass
class Cases:
    """The cases of seeds that rise; each is a model with features, and an engine with more of them.

    Attributes:
        played, refused, answers: how many engines, combinations and requests, and answers there were.
        happened: in how many engines what features are about has happened.
        faults: what is wrong, in words, of each seed that has failed.
    """

    gpu: bool
    on_a_model: int  # seeds next to each other that share one
    played: int = 0
    refused: int = 0
    answers: int = 0
    happened: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    _number: int = -1
    _subject: Subject | None = None
    _of_model: Sequence[Feature] = ()

    def try_seed(self, seed: int) -> None:
        """Play the case of a seed, print what is wrong, and note it in ``faults``."""
        try:
            self.play(seed)
        except Exception as error:
            said = str(error) if isinstance(error, AssertionError) else "".join(traceback.format_exception(error))
            print(f"FAULT at --fuzz-seed={seed}: {said}", flush=True)
            self.faults.append(f"--fuzz-seed={seed}: {said}")
            self._subject = None  # whatever has happened to it

    def play(self, seed: int) -> None:
        """Play the case of a seed; AssertionError says what is wrong, and how to play it again."""
        subject, draw = self._subject_of(seed // self.on_a_model), Random(seed)
        few = 1 if len(self._of_model) > 1 else 2
        while True:
            features = [*self._of_model, *draw.sample(OF_ENGINE, draw.randint(few, few + 1))]
            try:
                playing = Playing(subject, features, draw.randrange(2**31))
                break
            except RefusedError:
                self.refused += 1
        marker = " -m gpu" if self.gpu else ""
        said = f"{subject.name} with {', '.join(map(str, features))}: --fuzz-seed={seed} --fuzz-cases=1{marker}"
        print(said, flush=True)
        playing.play()
        self.played += 1
        self.answers += playing.answers
        self.refused += playing.refused
        self.happened.update(playing.happened)
        assert not playing.faults, "\n\n".join([said, *playing.faults])

    def _subject_of(self, number: int) -> Subject:
        """Return the model of a group of cases, which is made once."""
        if number == self._number and self._subject is not None:
            return self._subject
        self._number, self._subject, draw = number, None, Random(number)
        compiles = self.gpu or number % _COMPILING == _COMPILING - 1
        possible = [feature for feature in OF_MODEL if compiles or "mode" not in feature.wrap]
        while self._subject is None:
            features = draw.sample(possible, draw.choice((0, 1, 1, 2, 2)))
            names = {feature.subject for feature in features if feature.subject} or {"full attention"}
            if len(names) > 1 or len([feature for feature in features if feature.weights]) > 1:
                continue
            try:
                self._subject = Subject.of(*names, features, number, self.gpu)
            except RefusedError:
                self.refused += 1
        self._of_model = features
        return self._subject

    def __str__(self) -> str:
        happened = ", ".join(f"{name} in {count}" for name, count in sorted(self.happened.items()))
        return f"{self.played} engines, {self.answers} answers, {self.refused} refused; {happened}"
