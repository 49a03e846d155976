"""Random answers in the form of a response template, whose prompts have begun them, and what is told of the rest."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from support.server.response_templates import SPECS

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
