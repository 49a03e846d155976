"""Random cases: features that are drawn by a seed, on a model that some cases next to each other share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from support.combined.feature import Feature
from support.combined.features import FEATURES
from support.combined.playing import Playing, RefusedError, Subject

OF_MODEL = [feature for feature in FEATURES if feature.of_model]
OF_ENGINE = [feature for feature in FEATURES if not feature.of_model]


@dataclass
class Cases:
    """The cases of seeds that rise; each is a model with features, and an engine with more of them.

    Attributes:
        played, refused, answers: how many engines, combinations and requests, and answers there were.
        happened: in how many engines what features are about has happened.
    """

    gpu: bool
    on_a_model: int  # seeds next to each other that share one
    compiles: bool = True  # whether features are drawn for which a CPU compiles, which takes seconds
    played: int = 0
    refused: int = 0
    answers: int = 0
    happened: Counter[str] = field(default_factory=Counter)
    _number: int = -1
    _subject: Subject | None = None
    _of_model: Sequence[Feature] = ()

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

    @property
    def _drawn(self) -> Sequence[Feature]:
        return [feature for feature in OF_MODEL if self.compiles or "mode" not in feature.wrap]

    def _subject_of(self, number: int) -> Subject:
        """Return the model of a group of cases, which is made once."""
        if number == self._number and self._subject is not None:
            return self._subject
        self._number, self._subject, draw = number, None, Random(number)
        while self._subject is None:
            features = draw.sample(self._drawn, draw.choice((0, 1, 1, 2, 2)))
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
