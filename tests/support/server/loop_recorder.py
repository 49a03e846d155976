"""``compiled-llm``, which notes what its event loops do at once; run as a script, also by the processes that it starts.

Nothing here depends on how fast the machine is: what is counted are Python's calls in one callback, and characters that
one call of a library is given in a thread that runs an event loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from compiled_llm.engine.grammars.forms.grammar_source import GrammarSource
from compiled_llm.server.openai.tokenizer.vocabulary import Vocabulary

FOLDER = "LOOP_RECORDER"
"""The variable that names the folder in which each process has a file."""
MAX_CALLS, MAX_CHARACTERS = 100_000, 300_000
"""More are noted: 50 ms of Python, and some milliseconds of a library that reads or writes JSON."""


def noted(folder: Path) -> list[dict[str, Any]]:
    """What the processes have noted so far."""
    return [json.loads(line) for file in sorted(folder.iterdir()) for line in file.read_text().splitlines()]


def record(folder: Path) -> None:
    """Note what this process's event loops do from now on."""
    loops = threading.local()

    def note(what: str, size: int, where: str) -> None:
        with (folder / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps({"what": what, "size": size, "where": where[:300]}) + "\n")

    run = asyncio.Handle._run  # of each callback, and of each step of a task

    def counted(handle: asyncio.Handle) -> None:
        calls = 0

        def count(*_: object) -> None:
            nonlocal calls
            calls += 1

        loops.runs = True
        sys.setprofile(count)
        try:
            run(handle)
        finally:
            sys.setprofile(None)
        if calls > MAX_CALLS:
            note("calls", calls, repr(getattr(handle._callback, "__self__", handle)))

    def watched(owner: Any, name: str, size: Callable[..., int]) -> None:
        function = getattr(owner, name)

        def watching(*arguments: Any, **options: Any) -> Any:
            if getattr(loops, "runs", False) and (found := size(*arguments)) > MAX_CHARACTERS:
                note(f"{owner.__name__}.{name}", found, "")
            return function(*arguments, **options)

        setattr(owner, name, watching)

    asyncio.Handle._run = counted  # type: ignore[method-assign]
    watched(json, "loads", lambda text, *_: len(text))
    watched(msgspec.json, "decode", lambda text, *_: len(text))
    for name in ("of_text", "of_chat", "text"):
        watched(Vocabulary, name, lambda _, given, *__: 10 * len(given if isinstance(given, str) else str(given)))
    watched(GrammarSource, "check", lambda source: 100 * len(source.text))


if __name__ == "__main__":
    from compiled_llm.__main__ import main
    from compiled_llm.server import own_process

    sys.path.pop(0)  # this folder
    own_process._MAIN = Path(__file__)
    record(Path(os.environ[FOLDER]))
    main()
