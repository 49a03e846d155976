"""The chat itself: a question, its answer, the next question; and commands that begin with a slash."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import signal
from contextlib import nullcontext
from typing import TYPE_CHECKING

from compiled_llm.commands.chat.conversation import Conversation
from compiled_llm.commands.chat.figures import figures_of
from compiled_llm.commands.chat.partner import Partner
from compiled_llm.commands.chat.terminal import Terminal
from compiled_llm.commands.errors import complaint
from compiled_llm.execution.reporting.progress import ProgressDisplay

if TYPE_CHECKING:
    from compiled_llm.client.handle import RemoteHandle
    from compiled_llm.engine.thread.handle import RequestHandle
    from compiled_llm.requests.outputs import RequestOutput
    from compiled_llm.requests.sampling_params import SamplingParams

COMMANDS = {
    "/clear": "forget what was said, and begin a new chat",
    "/retry": "answer the last question again",
    "/system TEXT": "set the system message; without TEXT, show it",
    "/stats": "show speed, cached tokens and pages",
    "/exit": "end the chat, as Ctrl-D does",
}
_KEYS = {
    '"""': "begins and ends a message of several lines",
    "Ctrl-C": "end the answer; at the prompt, the second one ends the chat",
}
_COMMAND = re.compile(r"(/[a-z]+)(?:\s+(\S.*))?", re.DOTALL)
_ENDS = ("/exit", "/quit", "/bye")
_SILENT_SECONDS = 0.5
"""After which it is said that an answer is on its way."""


@dataclasses.dataclass
class Chat:
    """Reads questions and writes answers until there are no more questions; ``failed`` once one was not answered."""

    _partner: Partner
    _conversation: Conversation
    _params: SamplingParams
    _terminal: Terminal
    _last: RequestOutput | None = None
    failed: bool = False

    def run(self) -> None:
        """Go on until the end of the questions, `/exit`, or Ctrl-C twice.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed, and stdin is no terminal.
        """
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
            found = _COMMAND.fullmatch(text)
            if found is None or (found[2] and found[1] != "/system"):  # a text may begin with a slash
                return bool(text.strip()) and self._answer(text.strip())
            return self._obey(found[1], found[2])
        except (OSError, RuntimeError, ValueError) as error:
            self._terminal.complain(complaint(error))
            self.failed = True
            return False

    def _obey(self, command: str, rest: str | None) -> bool:
        match command:
            case "/help":
                self._terminal.tell("\n".join(f"{name:<14}{what}" for name, what in {**COMMANDS, **_KEYS}.items()))
            case "/clear":
                self._conversation.messages.clear()
                self._terminal.say("a new chat")
            case "/system":
                self._conversation.system = rest or self._conversation.system
                self._terminal.tell(f"system message: {self._conversation.system or 'none'}")
            case "/stats":
                self._terminal.tell(figures_of(self._partner.engine.stats(), self._last))
            case "/retry":
                if (question := self._conversation.take_back()) is None:
                    raise ValueError("/retry: there is no question to answer again")
                return self._answer(question)
            case _:
                raise ValueError(f"there is no {command}; /help says what there is")
        return False

    def _answer(self, question: str) -> bool:
        if self._partner.refresh():
            self._terminal.say(f"the engine process has another model now: {self._partner.name}")
        self._conversation.tokenizer = self._partner.tokenizer
        prompt = self._conversation.prompt(question)
        answer: list[str] = []
        try:
            handle = self._partner.engine.submit(prompt, self._params_for(len(prompt)))
            try:
                interrupted = asyncio.run(self._write(handle, answer))
            finally:
                handle.cancel()  # whatever kept the answer from being read
            self._last = handle.result()
        finally:
            self._conversation.add(question, "".join(answer))
            if any(answer):
                self._terminal.write("\n")
        if interrupted:
            self._terminal.tell("stopped; Ctrl-C again, or Ctrl-D, ends the chat")
        elif self._last.finish_reason == "length":
            self._terminal.say(f"cut after {len(self._last.token_ids)} tokens")
        return interrupted

    async def _write(self, handle: RequestHandle | RemoteHandle, answer: list[str]) -> bool:
        """Write an answer as it comes, and keep its pieces; return whether Ctrl-C has ended it in a terminal."""
        interrupted = asyncio.Event()

        def interrupt() -> None:
            interrupted.set()
            handle.cancel()

        if self._terminal.interactive:
            # Not in the midst of anything, as KeyboardInterrupt would be; the end of the loop takes it off.
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt)
        pieces = aiter(handle.text())
        first = asyncio.ensure_future(anext(pieces, ""))
        await asyncio.wait([first], timeout=_SILENT_SECONDS)
        display = ProgressDisplay(not self._terminal.quiet, brief=True)
        with nullcontext() if first.done() else display.task("reading the question"):
            answer.append(await first)
        self._terminal.write(answer[0])
        async for piece in pieces:
            answer.append(piece)
            self._terminal.write(piece)
        return interrupted.is_set()

    def _params_for(self, prompt: int) -> SamplingParams:
        most = self._partner.max_tokens
        if prompt >= most:
            raise ValueError(
                f"the chat has {prompt} tokens, and with the answer there can be {most}; /clear begins a new one"
            )
        return dataclasses.replace(self._params, max_tokens=min(self._params.max_tokens or most, most - prompt))
