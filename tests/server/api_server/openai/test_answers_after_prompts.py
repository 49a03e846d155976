"""Whatever a prompt has begun, and however its answer comes: what is told of it is the model's text, in its order.

``pytest tests/server/api_server/openai/test_answers_after_prompts.py --fuzz-seconds 600 --fuzz-seed 10000 -s`` goes on
with other answers.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import pytest

from compiled_llm.server.openai.parsing.answer_parts import Parts
from compiled_llm.server.openai.parsing.response_template import ResponseTemplate
from support.server.response_templates import SPECS, TOOLS
from support.server.scripted import Script, tool_tokenizer

Label = Literal["reasoning", "content", "blank"]


class Told(NamedTuple):
    """What is told of an answer: its parts, and the calls' names and arguments."""

    reasoning: str
    content: str
    calls: list[tuple[str, str]]


class Form(NamedTuple):
    """How a template writes answers."""

    think: tuple[str, str]  # around thinking
    call: str  # of a function's name and its arguments
    passes_blanks: bool  # whether blanks before a call are no content
    marks: tuple[str, ...]  # that a string in the arguments may have in it


_QWEN = ("<think>", "</think>")
_ENDS = ("</tool_call>", "[END]", "</call>", "</calls>")
_MARKS = ("<think>", "</think>", "<tool_call>", *_ENDS, *(f'"}}}}{end}' for end in _ENDS))

FORMS = {
    "hermes": Form(_QWEN, '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>', True, _MARKS),
    "qwen3": Form(_QWEN, '<tool_call>{{"arguments": {1}, "": "</tool_call>", "name":"{0}"}}</tool_call>', True, _MARKS),
    "named": Form(_QWEN, "<call:{}> {}\n</call>", False, _MARKS),
    "members": Form(_QWEN, '[CALL]{{"tool": "{}", "with":\n{}}}[END]', False, _MARKS),
    "listed": Form(_QWEN, '<calls>[{{"name": "{}", "arguments": {}}}]</calls>', False, _MARKS),
    "qwen3_5": Form(_QWEN, "<tool_call>\n<function={}>\n{}</function>\n</tool_call>", True, _MARKS),
    "gemma4": Form(
        ("<|channel>thought\n", "<channel|>"),
        "<|tool_call>call:{}{}<tool_call|>",
        False,
        ("<tool_call|>", "<turn|>", '"', "<channel|>", "{", "a:", "<|"),
    ),
}
assert FORMS.keys() == SPECS.keys()

_BLANKS, _BEGUN = (" ", "\n", "\n\n"), ("<", "<t", "<tool", "</", "</tool_call", "[", "[CAL", "{")
_WORDS = ("a", "b ", *_BLANKS, *_BEGUN, "}", '"', "\\", "é", "漢", ": ")
_BEGINNINGS = ("", "think", "empty", "thought")


@dataclass
class RandomAnswer:
    """A message of the assistant, and the place where the prompt ends and the answer begins."""

    style: str  # of its form
    text: str = ""  # of the message
    split: int = 0  # characters that the prompt has of it
    _labels: list[tuple[int, Label]] = field(default_factory=list)
    _calls: list[tuple[int, str, str]] = field(default_factory=list)

    @classmethod
    def drawn(cls, style: str, draw: random.Random) -> RandomAnswer:
        answer = cls(style)
        answer._think(draw)
        for _ in range(draw.randrange(3)):
            answer._say(draw)
            if draw.random() < 0.6:
                answer._call(draw)
        answer.split = draw.choice([0, answer._of_template, draw.randint(0, len(answer.text))])
        return answer

    @property
    def prompt(self) -> str:
        return "<|im_start|>user\nhi <|turn>user\n" + _ANCHORS[self.style] + self.text[: self.split]

    @property
    def answer(self) -> str:
        return self.text[self.split :]

    def pieces(self, draw: random.Random) -> list[str]:
        """Return the answer in random pieces."""
        count = draw.choice([0, 2, 8, len(self.answer)])
        cuts = sorted(draw.randint(0, len(self.answer)) for _ in range(count))
        return [self.answer[begin:end] for begin, end in pairwise([0, *cuts, len(self.answer)])]

    def told(self) -> Told:
        """Return what is told of the answer: the model's text, and calls that the prompt has not ended."""
        calls = [(name, arguments) for end, name, arguments in self._calls if end > self.split]
        return Told(self._part("reasoning"), self._part("content"), calls)

    def _part(self, label: Label) -> str:
        places = [place for place, found in self._labels if found == label]
        before = "".join(self.text[place] for place in places if place < self.split)
        after = "".join(self.text[place] for place in places if place >= self.split).rstrip()
        return after if before.strip() else after.lstrip()

    def _think(self, draw: random.Random) -> None:
        begin, end = FORMS[self.style].think
        kind = draw.choice(_BEGINNINGS)
        self._of_template = 0
        if kind:
            self._add(begin)
            self._add("\n", "reasoning")
            self._of_template = len(self.text)
            if kind != "empty":
                self._words(draw, "reasoning")
            self._add("\n", "reasoning")
            self._add(end)
            self._add("\n\n", "content")
            if kind == "empty":
                self._of_template = len(self.text)

    def _say(self, draw: random.Random) -> None:
        self._words(draw, "content")

    def _words(self, draw: random.Random, label: Label) -> None:
        text = "".join(draw.choices(_WORDS, k=draw.randrange(8)))
        while "<tool_call" in text or "[CALL" in text:
            text = text.replace("<tool_call", "").replace("[CALL", "")
        self._add(text, label)

    def _call(self, draw: random.Random) -> None:
        form, name = FORMS[self.style], draw.choice(["look", "time"])
        if self.text.endswith(_BEGUN):
            self._add("a", "content")  # no delimiter begins in the text before a call
        if form.passes_blanks:
            self._pass_blanks()
        written, told = _arguments(self.style, name, draw)
        self._add(form.call.format(name, written))
        self._calls.append((len(self.text), name, told))
        if self.style == "named":  # whose end takes blanks with it
            self._add("a", "content")

    def _pass_blanks(self) -> None:
        end = len(self.text.rstrip())
        self._labels = [(place, label) for place, label in self._labels if place < end or label != "content"]

    def _add(self, text: str, label: Label | None = None) -> None:
        if label is not None:
            self._labels += [(len(self.text) + number, label) for number in range(len(text))]
        self.text += text


_ANCHORS = {style: "<|turn>model\n" if style == "gemma4" else "<|im_start|>assistant\n" for style in FORMS}


def _arguments(style: str, function: str, draw: random.Random) -> tuple[str, str]:
    """Return arguments as they are written, and as they are told."""
    names = draw.sample(["text", "where", "all", "days"], k=draw.randrange(4)) if function == "look" else []
    found = {name: _value(name, FORMS[style].marks, draw) for name in names}
    plain = json.dumps(found, ensure_ascii=draw.random() < 0.5, indent=draw.choice([None, 1]))
    if style == "listed":
        return plain, json.dumps(found, ensure_ascii=False)
    if style == "gemma4":
        return _of_gemma(found), json.dumps(found, ensure_ascii=False)
    if style == "qwen3_5":
        if "text" in found:  # it is written without quotes
            found["text"] = draw.choice(["", "a\n b", 'say "<b>"', "\\", "</", "{"])
        values = {name: value if name == "text" else json.dumps(value) for name, value in found.items()}
        tags = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
        return tags, json.dumps(found, ensure_ascii=False)
    return plain, plain


def _value(name: str, marks: tuple[str, ...], draw: random.Random) -> Any:
    text = "".join(draw.choices([*marks, "a", " ", "\n", '"', "\\", "é", "<", "]", "}"], k=draw.randrange(6)))
    return {"text": text, "where": {"a": text, "b": 1}, "all": [text, 1, None], "days": draw.randrange(9)}[name]


def _of_gemma(value: Any) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return "{" + ",".join(f"{key}:{_of_gemma(entry)}" for key, entry in value.items()) + "}"
        case list():
            return "[" + ",".join(map(_of_gemma, value)) + "]"
        case _:
            return json.dumps(value)


CASES = 60


@cache
def template(style: str) -> ResponseTemplate:
    return ResponseTemplate(tool_tokenizer(), SPECS[style])


def read(answer: RandomAnswer, pieces: list[str]) -> Told:
    reader, whole = template(answer.style).reader(answer.prompt, TOOLS), Parts()
    for number, piece in enumerate(pieces, start=1):
        parts = reader.read(piece, finished=number == len(pieces))
        whole.reasoning, whole.content = whole.reasoning + parts.reasoning, whole.content + parts.content
        whole.pieces += parts.pieces
    return Told(whole.reasoning, whole.content, [(call.name or "", call.arguments) for call in whole.calls])


def seeds(request: pytest.FixtureRequest) -> Iterator[int]:
    option = request.config.getoption
    first = 1000 * option("--seed") if option("--fuzz-seed") is None else option("--fuzz-seed")
    count, over = option("--fuzz-cases") or CASES, time.monotonic() + option("--fuzz-seconds")
    number = 0
    while number < count or time.monotonic() < over:
        yield first + number
        number += 1
    print(f"{number} answers from --fuzz-seed={first} on")


@pytest.mark.timeout(0)
@pytest.mark.parametrize("style", FORMS)
def test_whole_answers_and_their_pieces_are_the_models_text(style: str, request: pytest.FixtureRequest) -> None:
    for seed in seeds(request):
        draw = random.Random(f"{seed} {style}")
        answer = RandomAnswer.drawn(style, draw)
        for pieces in ([answer.answer], answer.pieces(draw), list(answer.answer) or [""]):
            assert read(answer, pieces) == answer.told(), (f"--fuzz-seed={seed}", answer.prompt, pieces)


JSON = '{"a": [1, 2], "b": "<x>"}'
SURE = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Sure, <it is \n\n"}]


@pytest.mark.parametrize("text", [JSON, f" {JSON}", "<x> [1]  a {\n b"])
@pytest.mark.parametrize("at_once", [1, 7, 1000])
def test_without_thinking_the_text_comes_in_its_order(talker: Any, script: Script, text: str, at_once: int) -> None:
    script.text, script.at_once = text, at_once
    chat: dict[str, Any] = {"model": "tiny", "messages": SURE[:1], "extra_body": {"reasoning_effort": "none"}}
    item: dict[str, Any] = {"model": "tiny", "input": "hi", "reasoning": {"effort": "none"}}
    assert talker.chat.completions.create(**chat).choices[0].message.content == text.strip()
    chunks = talker.chat.completions.create(stream=True, **chat)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text.strip()
    assert script.prompt.endswith("<think>\n\n</think>\n\n")
    assert talker.responses.create(**item).output_text == text.strip()
    events = talker.responses.create(stream=True, **item)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == text.strip()
    assert script.prompt.endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("text", [JSON, f" {JSON}", "<x> [1]  a {\n b"])
@pytest.mark.parametrize("at_once", [1, 1000])
def test_a_message_that_goes_on_is_not_told_again(talker: Any, script: Script, text: str, at_once: int) -> None:
    script.text, script.at_once = text, at_once
    for echo, said in ((False, text), (True, SURE[-1]["content"] + text)):
        options: Any = {"extra_body": {"continue_final_message": True, "echo": echo}}
        chat: dict[str, Any] = {"model": "tiny", "messages": SURE, **options}
        assert talker.chat.completions.create(**chat).choices[0].message.content == said
        chunks = talker.chat.completions.create(stream=True, **chat)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said
        assert script.prompt.endswith(SURE[-1]["content"])
