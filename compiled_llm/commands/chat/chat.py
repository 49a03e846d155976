"""The chat itself: a question, its answer, the next question; and commands that begin with a slash."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from compiled_llm.commands.chat.conversation import Conversation
from compiled_llm.commands.chat.terminal import Terminal
from compiled_llm.commands.errors import complaint
from compiled_llm.commands.figures import answer_figures
from compiled_llm.commands.options.images import check_images
from compiled_llm.execution.reporting.plain_text import plain_text
from compiled_llm.execution.reporting.progress import ProgressDisplay

if TYPE_CHECKING:
    from compiled_llm.commands.remote.answer import AnswerFigures

COMMANDS = {
    "/clear": "forget what was said, and begin a new chat",
    "/retry": "answer the last question again",
    "/image FILE": "show the model an image with the next question",
    "/system TEXT": "set the system message; without TEXT, show it",
    "/stats": "show speed, cached tokens and pages",
    "/exit": "end the chat, as Ctrl-D does",
}
_KEYS = {
    '"""': "begins and ends a message of several lines",
    "Ctrl-C": "end the answer; at the prompt, the second one ends the chat",
}
_COMMAND = re.compile(r"(/[a-z]+)|(/system|/image)\s+(\S.*)", re.DOTALL)  # a question may begin with a slash, too
_ENDS = ("/exit", "/quit", "/bye")


@dataclasses.dataclass
class Chat:
    """A chat on a terminal, until there are no more questions; ``failed`` once one was not answered."""

    _conversation: Conversation
    _given: dict[str, Any]
    _terminal: Terminal
    _last: AnswerFigures | None = None
    failed: bool = False

    def run(self) -> None:
        """Go on until the end of the questions, `/exit`, or Ctrl-C twice; without a terminal it is raised."""
        interrupted = False
        while True:
            try:
                if (text := self._terminal.question()) is None or text.lower() in _ENDS:
                    return
                interrupted = self._take(text)
            except KeyboardInterrupt:
                if not self._terminal.interactive:
                    raise
                if interrupted:
                    return
                interrupted = True
                self._terminal.tell("Ctrl-C again, or Ctrl-D, ends the chat")

    def _take(self, text: str) -> bool:
        """Answer a question or obey a command; return whether Ctrl-C has ended it."""
        try:
            if (found := _COMMAND.fullmatch(text)) is not None:
                return self._obey(found[1] or found[2], found[3])
            return bool(text.strip()) and self._answer(text.strip())
        except (OSError, RuntimeError, ValueError) as error:
            self._terminal.complain(complaint(error))
            self.failed = True
            return False

    def _obey(self, command: str, rest: str | None) -> bool:
        match command:
            case "/help":
                self._terminal.tell(_table({**COMMANDS, **_KEYS}.items()))
            case "/clear":
                self._conversation.messages.clear()
                self._conversation.images.clear()
                self._terminal.say("a new chat")
            case "/system":
                self._conversation.system = rest or self._conversation.system
                self._terminal.tell(f"system message: {self._conversation.system or 'none'}")
            case "/image" if rest is not None:
                check_images([Path(rest)], "/image")
                self._conversation.images.append(Path(rest))
                self._terminal.tell(f"goes with the next question: {rest}")
            case "/stats":
                self._terminal.tell(_table(self._figures()))
            case "/retry":
                return self._answer(self._conversation.take_back())
            case _:
                raise ValueError(f"there is no {command}; /help says what there is")
        return False

    def _answer(self, question: str) -> bool:
        """Write an answer as it comes; return whether Ctrl-C has ended it in a terminal."""
        model = self._conversation.model
        if model.refresh():
            self._terminal.say(f"the server has another model now: {model.name}")
        handle = model.submit(self._conversation.with_question(question), self._given)
        answer = ""
        interrupted = False
        try:
            pieces = iter(handle.text())
            with ProgressDisplay(not self._terminal.quiet, brief=True).task("reading the question"):
                first = next(pieces, "")
            for piece in chain([first], pieces):
                answer += piece
                self._terminal.write(piece)
        except KeyboardInterrupt:
            if not self._terminal.interactive:
                raise
            interrupted = True
        finally:
            handle.cancel()  # whatever kept the answer from being read
            self._conversation.add(question, answer)
            self._terminal.write("\n" if answer else "")
        self._last = handle.figures()
        if interrupted:
            self._terminal.tell("stopped; Ctrl-C again, or Ctrl-D, ends the chat")
        elif self._last.finish_reason == "length":
            self._terminal.say(f"cut after {self._last.tokens} tokens")
        return interrupted

    def _figures(self) -> Iterator[tuple[str, str]]:
        if (last := self._last) is None:
            yield "last answer", "none yet"
        else:
            said = answer_figures(last.tokens, last.seconds, last.first_token_seconds)
            yield "last answer", f"{said} ({last.finish_reason})"
            if last.prompt_tokens is not None:
                yield "its prompt", f"{last.prompt_tokens} tokens, {last.cached_tokens or 0} of them cached"
        yield from self._conversation.model.figures()


def _table(rows: Iterable[tuple[str, str]]) -> str:
    table = Table.grid(padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    return plain_text(table)
