"""An engine process that says what a test has written, and a tokenizer whose templates have tools and thinking."""

from __future__ import annotations

import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from compiled_llm.protocol.frames import Frames, frame_of
from compiled_llm.protocol.messages import (
    VERSION,
    Beat,
    Ended,
    FromClient,
    Hello,
    Ready,
    StepUpdates,
    Submit,
    Summary,
    Update,
    Welcome,
)
from support.engine.text_tokenizers import byte_level
from support.server.engine_processes import PATIENCE
from support.server.running_servers import RunningServer, running_server

TEMPLATE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</s>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>
{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ '\\n<tool_call>\\n' -}}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% if message.role == 'tool' %} of {{ message.name }} by {{ message.tool_call_id }}{% endif -%}
</s>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if think %}<think>
{% elif enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
"""As Qwen's, and it can begin to think, or not: ``chat_template_kwargs={"think": true}``, ``enable_thinking``."""

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}}
RESPONSES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*</s>", "content": "text"},
    },
}


def tool_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = deepcopy(byte_level())
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSES
    return tokenizer


def takes(form: dict[str, Any], text: str) -> bool:
    """Whether a text has the form that a structural tag describes."""
    import xgrammar

    grammar = xgrammar.Grammar.from_structural_tag(json.dumps({"type": "structural_tag", "format": form}))
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([], xgrammar.VocabType.RAW))
    matcher = xgrammar.GrammarMatcher(compiler.compile_grammar(grammar), terminate_without_stop_token=True)
    return bool(matcher.accept_string(text) and matcher.is_completed())


class Script:
    """What is answered, and what was asked.

    Attributes:
        text: of every answer.
        at_once: how many tokens come in a step.
        reason: why an answer ends.
        allowed: released by a test for each step that may come; None if all may.
        asked: the requests.
        answered: how many answers were said to their end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.text, self.at_once, self.reason = "", 3, "stop"
        self.allowed: threading.Semaphore | None = None
        self.asked: list[Submit] = []
        self.answered = 0
        self.tokenizer = tokenizer

    @property
    def prompt(self) -> str:
        """The last prompt."""
        return str(self.tokenizer.decode(self.asked[-1].prompt))

    def tokens(self, text: str) -> list[int]:
        """Of a text."""
        return list(self.tokenizer(text)["input_ids"])

    def answer(self, asked: Submit) -> Iterator[StepUpdates]:
        self.asked.append(asked)
        tokens = self.tokens(self.text)
        ended = Ended(self.reason)  # type: ignore[arg-type]
        answers = range(asked.params.get("n", 1))
        for begin in range(0, len(tokens), self.at_once):
            if self.allowed is not None:
                assert self.allowed.acquire(timeout=PATIENCE)
            new = tokens[begin : begin + self.at_once]
            yield StepUpdates([Update(asked.request, index, new) for index in answers])
        yield StepUpdates([Update(asked.request, index, [], None, ended) for index in answers])
        yield StepUpdates([], [Summary(asked.request, 0, 0.0, 0.0, 0.0)])
        self.answered += 1


@contextmanager
def scripted(
    path: Path, tokenizer: PreTrainedTokenizerBase, sampling: dict[str, int | float] | None = None
) -> Iterator[Script]:
    """An engine process at a path; it names a folder beside it as its tokenizer's."""
    folder = path.parent / "tokenizer"
    tokenizer.save_pretrained(folder)
    ready = Ready("tiny", len(tokenizer), [1], 4000, 8, str(folder), sampling=sampling or {}, images=True)
    script = Script(tokenizer)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        threading.Thread(target=_accept, args=(listening, ready, script), daemon=True).start()
        yield script
        listening.shutdown(socket.SHUT_RDWR)


@contextmanager
def speaking_server(
    tokenizer: PreTrainedTokenizerBase, sampling: dict[str, int | float] | None = None, **options: Any
) -> Iterator[tuple[Script, RunningServer]]:
    """An API server of an engine process that says what a test has written."""
    with tempfile.TemporaryDirectory(prefix="uds-") as folder:
        path = Path(folder) / "socket"
        with scripted(path, tokenizer, sampling) as script, running_server(path, **options) as api_server:
            yield script, api_server


def _accept(listening: socket.socket, ready: Ready, script: Script) -> None:
    with suppress(OSError):
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=_serve, args=(connection, ready, script), daemon=True).start()


def _serve(connection: socket.socket, ready: Ready, script: Script) -> None:
    frames: Frames[Any] = Frames(FromClient)
    sending = threading.Lock()

    def send(*messages: Any) -> None:
        with sending:
            connection.sendall(b"".join(map(frame_of, messages)))

    with connection, suppress(OSError):
        while data := connection.recv(2**16):
            for message in frames.feed(data):
                if isinstance(message, Hello):
                    send(Welcome(VERSION, "a test", 1), ready)
                    threading.Thread(target=_beat, args=(send,), daemon=True).start()
                elif isinstance(message, Submit):
                    for step in script.answer(message):
                        send(step)


def _beat(send: Callable[[Beat], None]) -> None:
    with suppress(OSError):  # the connection is closed
        while True:
            send(Beat())
            time.sleep(1)
