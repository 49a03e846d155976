"""An answer read by HuggingFace's parser, as it comes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from compiled_llm.server.openai.parsing.answer_parts import CALLS, CONTENT, REASONING, CallPiece, Parts
from compiled_llm.server.openai.parsing.call_ids import openai_id
from compiled_llm.server.openai.parsing.call_text import CallText
from compiled_llm.server.openai.parsing.delimiters import Delimiters
from compiled_llm.server.openai.parsing.half_characters import escaped, replaced, written
from compiled_llm.server.openai.parsing.string_seals import StringSeals
from compiled_llm.server.openai.parsing.untold_text import UntoldText

_PIECES = re.compile(r"(?=[<\[{\n])|(?<=[>\]}\n\"])")

_LOOKS, _SHORT = 8, 1024
"""How often a text that has become no part is looked at while it doubles, and how long it is to be for that."""

BeginCall = Callable[[str, dict[str, str]], CallText]
"""Returns a reader of one call, by the text that begins it and the template's captures in that."""


class ParsedReader:
    """A reader of an answer by HuggingFace's parser; text that it cannot read is content."""

    def __init__(
        self,
        parser: Any,
        fields: Mapping[str, Any],
        delimiters: Delimiters,
        several_calls: bool = True,
        begin_call: BeginCall | None = None,
        prompt: str = "",
        finds_calls: bool = True,
        new_id: Callable[[], str] = openai_id,
    ) -> None:
        self._parser: Any = parser
        self._begin_call = begin_call
        self._finds_calls = finds_calls
        self._new_id = new_id  # of calls
        self._call: _PartialCall | None = None
        self._max_calls = None if several_calls else 1
        self._calls = 0
        self._untold, self._unseen = UntoldText(), 0  # characters that came since the parser was fed
        self._seals = StringSeals(fields.get(CALLS, {}) if begin_call is None else {})
        self._to_seal: int | None = None  # where strings of a call are looked for next; None outside of one
        self._delimiters = delimiters
        self._implicit = CONTENT if _is_implicit(fields.get(CONTENT)) else None
        self._part: str | None = self._implicit
        self._cuts_call = False  # whether the end has cut a call
        self._texts = {name: _Trimmed(_strips(fields.get(name, {}))) for name in (CONTENT, *REASONING)}
        self._begun = self._begin(prompt)

    def _begin(self, prompt: str) -> list[CallPiece]:
        """Read what the prompt has begun, and return a call that has not ended, to be told of."""
        parts = Parts()
        self._feed_all(prompt, parts)
        self._feed_waiting(parts)
        self._untold.end_prompt()
        call = self._call
        if call is not None and self._delimiters.find(CALLS, "close", self._untold.text):
            call.is_told = False  # it has ended, and the parser waits for all of its end
        return [piece for piece in parts.pieces if call is not None and call.is_told and piece.id == call.id]

    def read(self, text: str, finished: bool, cut: bool = False) -> Parts:
        """Return the new parts in the next piece of text; if it ``cut`` an open call, that is no content."""
        parts, self._begun = Parts(pieces=self._begun), []
        self._feed_all(text, parts)
        if finished:
            self._feed_waiting(parts)
            self._parse(self._untold.feed(), parts)  # a string that never ends hides nothing
            (self._cut if cut else self._finish)(parts)
        return parts

    def _feed_all(self, text: str, parts: Parts) -> None:
        is_far = self._delimiters.are_far_from
        if is_far(text):
            self._feed(text, True, parts)
            return
        for piece in _PIECES.split(text):
            self._feed(piece, is_far(piece), parts)

    def _feed(self, piece: str, is_far: bool, parts: Parts) -> None:
        untold, part = self._untold, self._part
        if part is not None and not untold.text and self._passes_over(is_far):
            self._tell_text(part, piece, "" if untold.in_prompt else piece, parts)
            return
        untold.text += piece
        self._unseen += len(piece)
        if self._unseen * _LOOKS >= len(untold.text) - self._unseen - _SHORT:
            self._feed_waiting(parts)

    def _passes_over(self, is_far: bool) -> bool:
        """Whether a piece is kept from the parser, which would find nothing in it and is slow, or must find nothing."""
        if self._call is None:
            return is_far and self._part in self._texts
        return is_far or self._call.text.is_in_string

    def _feed_waiting(self, parts: Parts) -> None:
        """Feed the text that waits; the parser looks again at all that it does not understand yet."""
        self._unseen, untold = 0, self._untold
        while untold.num_fed < len(untold.text):
            piece = untold.feed() if self._to_seal is None else self._feed_sealed(self._to_seal)
            if not piece:
                return
            self._parse(piece, parts)

    def _feed_sealed(self, begin: int) -> str:
        """Return the text of a call that the parser sees next; ``begin`` says from where on strings are looked for."""
        piece, ends = self._seals.sealed(self._untold.text[begin:])
        self._to_seal = None if ends else begin + len(piece)
        return self._untold.feed_as(piece[self._untold.num_fed - begin :])

    def _parse(self, piece: str, parts: Parts) -> None:
        if self._parser is not None:
            self._take_all(lambda: self._parser.feed(piece), parts)
        else:
            self._tell_rest(parts)

    def _cut(self, parts: Parts) -> None:
        """Finish without the part that there was no room for."""
        found = self._delimiters.begun_opening(CALLS, self._untold.text) if self._part == self._implicit else None
        if found is None or not self._finds_calls:
            self._cuts_call = self._part == CALLS
            self._finish(parts)
            return
        self._tell_content(self._untold.take(found.start()), parts)
        if self._begin_call is not None and not found.partial:
            call = self._partial_call(self._untold.take(), self._begin_call(found.group(), found.groupdict()))
            call.text.cut()
            self._tell(call, "", parts)

    def _finish(self, parts: Parts) -> None:
        if self._parser is not None:
            self._take_all(lambda: self._parser.finalize()[1], parts)

    def _take_all(self, events: Any, parts: Parts) -> None:
        try:
            for event in events():
                self._take(event, parts)
        except Exception:  # templates fail in many ways on a text that the model should not have written
            self._parser, self._part, self._to_seal = None, CONTENT, None
            self._tell_rest(parts)

    def _tell_rest(self, parts: Parts) -> None:
        self._tell_content(self._seals.opened(self._untold.take()), parts)

    def _tell_content(self, text: str, parts: Parts) -> None:
        if not self._cuts_call:
            parts.content += self._texts[CONTENT].add(text)

    def _take(self, event: Mapping[str, Any], parts: Parts) -> None:
        match event["type"]:
            case "region_open":
                self._open(event["field"])
            case "region_chunk":
                self._take_text(event["field"], event["text"], parts)
            case "region_close":
                self._close(event["field"], event["value"], parts)

    def _open(self, name: str) -> None:
        self._part = name
        if name == self._implicit:
            return
        found = self._delimiters.find(name, "open", self._untold.text)
        assert found is not None, "the parser has found it"
        if name == CALLS and self._begin_call is None:
            self._to_seal = found.end()
            return  # it stays untold until it is read, since it may be none
        self._untold.take(found.start())
        opening = self._untold.take(len(found.group()))
        if name == CALLS and self._begin_call is not None:
            self._call = self._partial_call(opening, self._begin_call(found.group(), found.groupdict()))

    def _partial_call(self, opening: str, text: CallText) -> _PartialCall:
        return _PartialCall(self._new_id(), opening, text)

    def _take_text(self, name: str, text: str, parts: Parts) -> None:
        if name not in self._texts and self._call is None:
            return  # of a call that is read once it is whole
        self._tell_text(name, text, self._untold.take_text(text), parts)

    def _tell_text(self, name: str, text: str, own: str, parts: Parts) -> None:
        """Tell of a part's text, of which the end is the answer's own, and the rest the prompt's."""
        if self._call is not None:
            self._tell(self._call, self._call.read(text, own), parts)
        else:
            if len(own) < len(text):
                self._texts[name].follow(text[: len(text) - len(own)])
            self._add(name, own, parts)

    def _close(self, name: str, value: Any, parts: Parts) -> None:
        self._part, self._to_seal = self._implicit, None
        if name == self._implicit:
            return  # it ends where another part begins
        found = self._delimiters.find(name, "close", self._untold.text)
        closing = self._untold.take(None if found is None else found.end())
        if name != CALLS:
            return
        if self._call is None:
            self._tell_whole(value, parts)
        else:
            self._end_call(self._call, found is not None, closing, parts)

    def _end_call(self, call: _PartialCall, closed: bool, closing: str, parts: Parts) -> None:
        new = call.text.end(closed)
        if self._cuts_call and not closed:
            call.text.cut()
        self._tell(call, new, parts, finished=closed)
        if call.text.name is None:
            self._tell_content(call.raw + closing, parts)
        self._call = None

    def _add(self, name: str, text: str, parts: Parts) -> None:
        text = self._texts[name].add(text)
        if name == CONTENT:
            parts.content += text
        else:
            parts.reasoning += text

    def _tell(self, call: _PartialCall, new: str, parts: Parts, finished: bool = False) -> None:
        """Tell of a call, as soon as it is certain that it is one."""
        begins = call.number is None and call.text.name is not None
        if begins:
            self._calls, call.number = self._calls + 1, self._calls
        is_told = call.is_told and call.number is not None and self._is_told(call.number)
        if is_told and (begins or new or finished):
            parts.call(CallPiece(call.id, call.text.name if begins else None, new, finished))

    def _tell_whole(self, value: Any, parts: Parts) -> None:
        for call in [_call(entry, self._new_id()) for entry in (value if isinstance(value, list) else [value])]:
            if self._is_told(self._calls):
                parts.call(call._replace(arguments=self._seals.opened(call.arguments)))
            self._calls += 1

    def _is_told(self, number: int) -> bool:
        return self._max_calls is None or number < self._max_calls


class _PartialCall:
    """A call that is being read, and all of its text that is the answer's: if it is no call, that is content."""

    def __init__(self, call_id: str, opening: str, text: CallText) -> None:
        self.id = call_id
        self.text = text
        self.raw = opening
        self.number: int | None = None  # in the answer; None before it is certain
        self.is_told = True

    def read(self, text: str, own: str) -> str:
        if self.text.name is None:
            self.raw += own
        return self.text.read(text)


class _Trimmed:
    """A text as it comes, without whitespace at its ends."""

    def __init__(self, strips: bool) -> None:
        self._strips = strips
        self._begun = False
        self._space = ""

    def add(self, text: str) -> str:
        """Return the part that is certain by now."""
        if not self._strips:
            return text
        text = self._space + text if self._begun else text.lstrip()
        kept = text.rstrip()
        self._begun = self._begun or bool(kept)
        self._space = text[len(kept) :]
        return kept

    def follow(self, prompt: str) -> None:
        """Note that it goes on after a text that is not told."""
        self._begun = self._begun or bool(prompt.strip())


def _is_implicit(spec: Mapping[str, Any] | None) -> bool:
    """Whether a part is all text that stands in no other."""
    return spec is not None and not ("open" in spec or "open_pattern" in spec)


def _strips(spec: Mapping[str, Any]) -> bool:
    return bool(spec.get("content_args", {}).get("strip", True))


def _call(value: Mapping[str, Any], call_id: str) -> CallPiece:
    """Return a call as the parser gives it; ValueError if it has no name."""
    function = value["function"]
    name, arguments = function["name"], function.get("arguments", function.get("parameters", {}))
    if not isinstance(name, str) or not name:
        raise ValueError("a call without a name")
    text = escaped(arguments) if isinstance(arguments, str) else written(arguments)
    return CallPiece(call_id, replaced(name), text, finished=True)
