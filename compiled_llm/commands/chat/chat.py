"""The chat itself: a question, its answer, the next question; and commands that begin with a slash."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from compiled_llm.commands.chat.answering import write_answer
from compiled_llm.commands.chat.conversation import Conversation
from compiled_llm.commands.chat.figures import figures_of
from compiled_llm.commands.chat.partner import Partner
from compiled_llm.commands.chat.terminal import Terminal
from compiled_llm.commands.errors import complaint

if TYPE_CHECKING:
    from compiled_llm.requests.outputs import RequestOutput
    from compiled_llm.requests.sampling_params import SamplingParams

_HELP = '''\
/clear        forget what was said, and begin a new chat
/retry        answer the last question again
/system TEXT  set the system message; without TEXT, show it
/stats        show speed, cached tokens and pages
/exit         end the chat, as Ctrl-D does
"""           begins and ends a message of several lines
Ctrl-C        end the answer; at the prompt, the second one ends the chat'''
_COMMAND = re.compile(r"/([a-z]+)(?:\s+(\S.*))?", re.DOTALL)
_ENDS = ("exit", "quit", "bye")


class Chat:
    """Reads questions and writes answers until there are no more questions.

    Attributes:
        failed: whether a question could not be answered.
    """

    def __init__(
        self, partner: Partner, conversation: Conversation, params: SamplingParams, terminal: Terminal
    ) -> None:
        """Begin.

        Args:
            partner: answers.
            conversation: to be continued.
            params: how to answer.
            terminal: where questions come from.
        """
        self.failed = False
        self._partner = partner
        self._conversation = conversation
        self._params = params
        self._terminal = terminal
        self._last: RequestOutput | None = None

    def run(self) -> None:
        """Go on until the end of the questions, `/exit`, or Ctrl-C twice.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed, and nobody sits at a terminal.
        """
        interrupted = False
        while True:
            try:
                if (text := self._terminal.question()) is None or text.lower() in [f"/{name}" for name in _ENDS]:
                    return
                interrupted = self._take(text)
            except KeyboardInterrupt:
                if not self._terminal.interactive:
                    raise
                self._terminal.tell("")
                if interrupted:
                    return
                interrupted = True
                self._terminal.tell("Ctrl-C again, or Ctrl-D, ends the chat")

    def _take(self, text: str) -> bool:
        """Do what a line asks for; whether Ctrl-C has ended it."""
        try:
            found = _COMMAND.fullmatch(text)
            if found is None or (found[2] and found[1] != "system"):  # a text may begin with a slash
                return bool(text.strip()) and self._answer(text.strip())
            return self._obey(found[1], found[2])
        except (OSError, RuntimeError, ValueError) as error:
            self._terminal.complain(complaint(error))
            self.failed = True
            return False

    # ---- answers

    def _answer(self, question: str) -> bool:
        if self._partner.refresh():
            self._terminal.say(f"the generator has another model now: {self._partner.name}")
        self._conversation.use(self._partner.tokenizer)
        prompt = self._conversation.prompt(question)
        answer: list[str] = []
        try:
            handle = self._partner.submit(prompt, self._params_for(len(prompt)))
            interrupted = write_answer(handle, self._writing(answer), self._terminal.interactive, self._terminal.quiet)
            self._last = handle.result()
        finally:
            self._conversation.add(question, "".join(answer))
            if answer:
                self._terminal.write("\n")
        if interrupted:
            self._terminal.tell("stopped; Ctrl-C again, or Ctrl-D, ends the chat")
        elif self._last.finish_reason == "length":
            self._terminal.say(f"cut after {len(self._last.token_ids)} tokens")
        return interrupted

    def _writing(self, answer: list[str]) -> Callable[[str], None]:
        def write(piece: str) -> None:
            answer.append(piece)
            self._terminal.write(piece)

        return write

    def _params_for(self, prompt: int) -> SamplingParams:
        """Return how to answer a prompt of so many tokens: with as many as are wanted, and as there is room for.

        Raises:
            ValueError: there is none.
        """
        most = self._partner.max_tokens
        if prompt >= most:
            raise ValueError(
                f"the chat has {prompt} tokens, and with the answer there can be {most}; /clear begins a new one"
            )
        return dataclasses.replace(self._params, max_tokens=min(self._params.max_tokens or most, most - prompt))

    # ---- commands

    def _obey(self, command: str, rest: str | None) -> bool:
        """Do what a command asks for; whether Ctrl-C has ended it."""
        match command:
            case "help":
                self._terminal.tell(_HELP)
            case "clear":
                self._conversation.messages.clear()
                self._terminal.say("a new chat")
            case "system":
                self._set_system(rest)
            case "stats":
                self._terminal.tell(figures_of(self._partner.stats(), self._last))
            case "retry":
                return self._retry()
            case _:
                raise ValueError(f"there is no /{command}; /help says what there is")
        return False

    def _set_system(self, text: str | None) -> None:
        if text is not None:
            self._conversation.system = text
        self._terminal.tell(f"system message: {self._conversation.system or 'none'}")

    def _retry(self) -> bool:
        if (question := self._conversation.take_back()) is None:
            raise ValueError("/retry: there is no question to answer again")
        return self._answer(question)
