"""Strings that end an answer, in text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple


class Match(NamedTuple):
    """The place of a stop string in a text."""

    string: str
    start: int
    end: int


class StopStrings:
    """Strings to look for, all at once: the automaton of Aho and Corasick."""

    # A state is the longest beginning of any of the strings that the text so far ends with, so that each character is
    # looked at once, however many strings there are and however much they repeat themselves.

    def __init__(self, strings: Sequence[str]) -> None:
        # matches a character that one of the strings begins with
        self.firsts = re.compile("|".join(re.escape(first) for first in sorted({string[0] for string in strings})))
        self._strings = strings
        self._next: dict[tuple[int, str], int] = {}
        self._ended = [len(strings)]  # for each state, the string that ends there: the first one of the list
        depths, came = [0], [(0, "")]
        for number, string in enumerate(strings):
            state = 0
            for depth, character in enumerate(string, start=1):
                step = state, character
                state = self._next.setdefault(step, len(depths))
                if state == len(depths):
                    depths.append(depth)
                    came.append(step)
                    self._ended.append(len(strings))
            self._ended[state] = min(self._ended[state], number)
        self._shorter = [0] * len(depths)
        # for each state, how many characters at the text's end may still become a stop string
        self.held = [0] * len(depths)
        goes_on = {state for state, _ in self._next}
        for state in sorted(range(1, len(depths)), key=depths.__getitem__):
            before, character = came[state]
            shorter = self._shorter[state] = self.step(self._shorter[before], character) if before else 0
            self._ended[state] = min(self._ended[state], self._ended[shorter])
            self.held[state] = depths[state] if state in goes_on else self.held[shorter]

    def step(self, state: int, character: str) -> int:
        """Return the state after one more character."""
        while (found := self._next.get((state, character))) is None and state:
            state = self._shorter[state]
        return found or 0

    def ended(self, state: int) -> str | None:
        """Return the string that has ended; of those that end together, the one that is listed first."""
        number = self._ended[state]
        return None if number == len(self._strings) else self._strings[number]


class StopReader:
    """A reader of one text as it comes."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._stops = _known(tuple(strings))
        self._state = self._read = 0

    def take(self, piece: str, counts: bool = True) -> Match | None:
        """Return the stop string that ends first in the next piece, if it ``counts``; after that no more is read."""
        stops, state, place = self._stops, self._state, 0
        while place < len(piece):
            if not state:
                if (first := stops.firsts.search(piece, place)) is None:  # as in nearly all pieces
                    break
                place = first.start()
            state = stops.step(state, piece[place])
            place += 1
            if counts and (string := stops.ended(state)) is not None:
                end = self._read + place
                return Match(string, end - len(string), end)
        self._state, self._read = state, self._read + len(piece)
        return None

    @property
    def begun(self) -> int:
        """How many characters at the text's end may be the beginning of a stop string."""
        return self._stops.held[self._state]


@lru_cache(maxsize=16)
def _known(strings: tuple[str, ...]) -> StopStrings:
    """Cached, since the answers to one request have the same strings."""
    return StopStrings(strings)
