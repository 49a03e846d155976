"""The programs that are kept of one model, on one machine, with one set of options."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from compiled_llm.compilation.artifacts.checked_folder import RefusedError, check_folder
from compiled_llm.compilation.kept.cache.room import MOST_OF_A_NAME, make_room, newest, remove
from compiled_llm.compilation.kept.cache.stored_program import StoredProgram, folder_name_of, write
from compiled_llm.compilation.kept.kept_program import KeptProgram

logger = logging.getLogger("compiled_llm.graphs")


class ProgramCache:
    """The programs of one key."""

    def __init__(self, root: Path, made_for: Mapping[str, Any]) -> None:
        """``root`` has those of all keys; ``made_for`` are values of JSON, equal wherever a program may be taken."""
        self._root = root
        self._made_for = made_for
        key = hashlib.sha256(json.dumps(made_for, sort_keys=True).encode()).hexdigest()[:20]
        self._folder = root / key

    def read(self) -> list[StoredProgram]:
        """Return the programs, that which was last used first; one that is damaged is removed."""
        try:
            if not self._folder.exists():
                return []
            for folder in (self._root, self._folder):
                check_folder(folder)
            return [*self._entries()]
        except (OSError, RefusedError) as error:
            _say_once(f"programs that are kept in {self._root} are not used: {_reason(error)}")
            return []

    def keep(self, program: KeptProgram, files: Mapping[str, Path]) -> None:
        """Write a program on a thread, which the end of this process waits for."""
        # Callers do so right after the first run of a program, when a request waits for its token.
        if program.refused is None:
            try:
                threading.Thread(target=self.write, args=(program, files), name="compiled_llm kept programs").start()
            except RuntimeError:  # the interpreter is shutting down
                return

    def write(self, program: KeptProgram, files: Mapping[str, Path]) -> None:
        """Write a program with its code, and make room for it."""
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_folder(self._root)
            if self._folder.exists():
                check_folder(self._folder)
            if write(self._folder, program, files, self._made_for, self._root):
                self._forget_oldest(program.name)
                make_room(self._root)
        except (OSError, RefusedError) as error:
            _say_once(f"programs are not kept in {self._root}: {_reason(error)}")

    def _entries(self) -> Iterator[StoredProgram]:
        for folder in newest(self._folder.iterdir()):
            try:
                yield StoredProgram.read(folder, self._made_for)
            except (OSError, ValueError) as error:
                logger.debug("compiled_llm: %s is removed: %s", folder, error)
                remove(folder)

    def _forget_oldest(self, name: str) -> None:
        """Remove the oldest programs of a name: a model's code has been edited a few times."""
        own = [folder for folder in self._folder.iterdir() if folder.name.rpartition("-")[0] == folder_name_of(name)]
        for folder in newest(own)[MOST_OF_A_NAME:]:
            remove(folder)


@functools.cache  # once a process and reason
def _say_once(what: str) -> None:
    logger.info("compiled_llm: %s", what)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
