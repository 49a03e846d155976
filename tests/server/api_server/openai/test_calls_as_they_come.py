"""Arguments of calls come as the model writes them, and however an answer is cut into pieces, it says the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings, strategies as st

from compiled_llm.compat.response_templates import known_response_template
from compiled_llm.server.openai.parsing.answer_parts import Parts
from compiled_llm.server.openai.parsing.call_text import JsonCall
from compiled_llm.server.openai.parsing.delimiters import Delimiters
from compiled_llm.server.openai.parsing.parsed_reader import ParsedReader
from compiled_llm.server.openai.parsing.response_template import ResponseTemplate
from compiled_llm.server.openai.tokenizer.vocabulary import Vocabulary
from support.server.response_templates import PROPERTIES, SPECS, TOOLS
from support.server.scripted import tool_tokenizer


class Told(NamedTuple):
    """What was told, taken together; calls are names and arguments, and whether they have ended."""

    reasoning: str
    content: str
    calls: list[tuple[str, str, bool]]


def read_in_pieces(reader: ParsedReader, pieces: Iterable[str], cut: bool = False) -> Told:
    whole = Parts()
    for parts in [*(reader.read(piece, finished=False) for piece in pieces), reader.read("", finished=True, cut=cut)]:
        whole.reasoning, whole.content = whole.reasoning + parts.reasoning, whole.content + parts.content
        for piece in parts.pieces:
            assert (piece.name is None) == any(piece.id == earlier.id for earlier in whole.pieces)
            whole.call(piece)
    assert len({piece.id for piece in whole.pieces}) == len(whole.pieces), "pieces of a call come one after another"
    return Told(
        whole.reasoning, whole.content, [(piece.name or "", piece.arguments, piece.finished) for piece in whole.pieces]
    )


OBJECTS = {
    "hermes": '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>',
    "qwen3": '<tool_call>{{"parameters": {1} , "name":"{0}", "x": [1, "]"]}}</tool_call>',
    "named": "<call:{}> {}\n</call>",
    "members": '[CALL]{{"tool": "{}", "with":\n{}}}[END]',
}
"""How calls are written whose arguments are JSON."""

cuts = st.lists(st.integers(0, 400), max_size=12)


def split(text: str, cuts: Sequence[int]) -> list[str]:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[begin:end] for begin, end in pairwise(places)]


class Anywhere(Delimiters):
    """Has HuggingFace's parser see all text."""

    def are_far_from(self, text: str) -> bool:
        return False


@cache
def template(style: str, passes_over: bool = True) -> ResponseTemplate:
    made = ResponseTemplate(tool_tokenizer(), SPECS[style])
    if not passes_over:
        made._delimiters = Anywhere(SPECS[style]["fields"])
    return made


def read(style: str, pieces: Sequence[str], cut: bool = False, passes_over: bool = True) -> Told:
    return read_in_pieces(template(style, passes_over).reader("", TOOLS), pieces, cut)


def search(examples: int, **strategies: Any) -> Callable[[Callable[..., None]], None]:
    """Run a test on so many random examples, at once."""
    return lambda test: settings(max_examples=examples, deadline=None, derandomize=True)(given(**strategies)(test))()


EXAMPLES = pytest.mark.parametrize("examples", [25, pytest.param(250, marks=pytest.mark.whole)])


xml_values = st.sampled_from(["3", "3.0", "three", "-1.5", "true", "null", '{"a": [1]}', "[2]", "{", 'say "hi"', ""])
xml_texts = st.text(st.sampled_from('ab\n "\\<>/é漢'), max_size=20).map(str.strip)
xml_arguments = st.dictionaries(st.sampled_from([*PROPERTIES, "other", 'a "b"']), xml_values | xml_texts, max_size=4)


@EXAMPLES
def test_tags_become_the_json_that_huggingface_reads(examples: int) -> None:
    names = st.sampled_from(["look", "time", "none"])

    @search(2 * examples, calls=st.lists(st.tuples(names, xml_arguments), max_size=3), cuts=cuts)
    def _(calls: list[tuple[str, dict[str, str]]], cuts: list[int]) -> None:
        tags = [
            (name, "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items()))
            for name, given in calls
        ]
        text = "\n".join(f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>" for name, given in tags)
        parser = tool_tokenizer().get_response_parser(SPECS["qwen3_5"], prefix="", tools=TOOLS)
        parser.feed(text)
        functions = [call["function"] for call in parser.finalize()[0].get("tool_calls", [])]
        expected = [(call["name"], json.dumps(call["arguments"], ensure_ascii=False), True) for call in functions]
        assert read("qwen3_5", split(text, cuts)) == Told("", "", expected)


FRAGMENTS = """
<think>|</think>|<tool_call>|</tool_call>|{"name": "look", "arguments": {"text": "a|"|}|}}|{|[|]|{"name": "time"}
|"arguments": |, |: |\\|null| |hello|<|</tool|<function=look>|</function>|<parameter=text>|<parameter=days>|</parameter>
|3|[CALL|[CALL]|[END]|<call:look>|</call>|{"tool": "look", "with": {|</s>|</think|~im_end~>
|<~tool_call>call:look{days:3}|<tool_call~>|<~"~>"""
fragments = st.sampled_from([*(fragment.replace("~", "|") for fragment in FRAGMENTS.split("|")), "\n"])


@EXAMPLES
@pytest.mark.parametrize("style", SPECS)
def test_any_text_says_the_same_in_pieces_and_wherever_it_is_cut(style: str, examples: int) -> None:
    def check(text: str, cuts: list[int]) -> None:
        whole, without_room = read(style, [text], passes_over=False), read(style, [text], cut=True)
        assert read(style, split(text, cuts)) == whole
        assert read(style, list(text)) == whole == read(style, [text])
        assert read(style, split(text, cuts), cut=True) == without_room
        assert whole.content.startswith(without_room.content)

    check('<tool_call>{"name": "look", "arguments": {"text": "a"</tool', [])
    search(examples, text=st.lists(fragments, max_size=20).map("".join), cuts=cuts)(check)


def told_after_each(style: str, text: str) -> list[str]:
    reader = template(style).reader("", TOOLS)
    told, all_told = "", []
    for character in text:
        told += "".join(piece.arguments for piece in reader.read(character, finished=False).pieces)
        all_told.append(told)
    return all_told


@pytest.mark.parametrize("style", OBJECTS)
def test_each_character_of_arguments_is_told_at_once(style: str) -> None:
    given = '{"text": "a b\\n {c}", "where": {"a": 1}}'
    text = OBJECTS[style].format("look", given)
    begin = text.index(given)
    told = told_after_each(style, text)
    late = text.index('"name"') if style == "qwen3" else 0  # arguments before the name wait for it
    for place in range(max(begin, late + 12), len(text)):
        assert told[place] == given[: place + 1 - begin]


def test_each_character_of_a_tag_is_told_at_once() -> None:
    text = '<tool_call>\n<function=look>\n<parameter=text>\nsay "hi"\nnow\n</parameter>\n'
    text += "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
    texts = [text[:end] for end in range(1, len(text) + 1)]
    told = dict(zip(texts, told_after_each("qwen3_5", text), strict=True))
    begin = text[: text.index("say")]
    assert told[begin] == '{"text": "'
    assert told[begin + 'say "h'] == '{"text": "say \\"h'
    assert told[begin + 'say "hi"\n'] == '{"text": "say \\"hi\\"'  # it may end here
    assert told[begin + 'say "hi"\nn'] == '{"text": "say \\"hi\\"\\nn'
    assert told[text[: text.index("<parameter=days")]] == '{"text": "say \\"hi\\"\\nnow"'
    assert told[text[: text.index("3") + 1]].endswith(', "days": ')  # a number is told whole
    assert told[text[: text.index("</function")]].endswith(', "days": 3')


HERMES, QWENS = "<tool_call>\n", "<tool_call><function=look>\n"
CUT = [
    ("hermes", HERMES + '{"name": "look", "arguments": {"text": "a', [("look", '{"text": "a', False)], ""),
    ("hermes", HERMES + '{"name": "look", "arguments": {}', [("look", "{}", False)], ""),
    ("hermes", HERMES + '{"name": "look", "argu', [], HERMES + '{"name": "look", "argu'),
    ("hermes", HERMES + '{"name": "look"}', [("look", "{}", False)], ""),
    ("hermes", HERMES + '{"name": "look", "arguments": {b}}</tool_call> c', [("look", "{b}", True)], "c"),
    ("hermes", HERMES + '{"name": "", "arguments": {', [], HERMES + '{"name": "", "arguments": {'),
    ("hermes", HERMES + '{"name": "look", "arguments": "{}"}</tool_call>', [("look", "{}", True)], ""),
    ("hermes", HERMES + "{no}</tool_call> c", [], HERMES + "{no}</tool_call> c"),
    ("named", "<call:look>[1]</call>", [("look", "[1]", True)], ""),
    ("named", "<call:look>no</call>", [], "<call:look>no</call>"),
    ("named", "<call:look>{}</call>\n<call:time>no</call> a", [("look", "{}", True)], "<call:time>no</call> a"),
    ("qwen3_5", QWENS, [("look", "", False)], ""),
    ("qwen3_5", QWENS + "<parameter=text>\na b </par", [("look", '{"text": "a b', False)], ""),
    ("qwen3_5", QWENS + "<parameter=days>\n3", [("look", '{"days": ', False)], ""),
    ("qwen3_5", QWENS + "</function></tool_call>", [("look", "{}", True)], ""),
    ("qwen3_5", QWENS + "<parameter=days>3</function></tool_call>", [("look", '{"days": 3}', True)], ""),
    ("gemma4", "<|tool_call>call:look{days:3}<tool_call|>", [("look", '{"days": 3}', True)], ""),
    ("gemma4", "<|tool_call>call:look{days:", [], "<|tool_call>call:look{days:"),
]


@pytest.mark.parametrize(("style", "text", "calls", "content"), CUT)
@pytest.mark.parametrize("size", [1, 5, 1000])
def test_what_is_cut_or_wrong(style: str, text: str, calls: Any, content: str, size: int) -> None:
    pieces = [text[begin : begin + size] for begin in range(0, len(text), size)]
    told = read(style, pieces)
    assert (told.calls, told.content) == (calls, content)


NO_ROOM = [
    *[(style, text, calls) for style, text, calls, content in CUT if not content],
    ("hermes", HERMES, []),
    ("hermes", HERMES + '{"na', []),
    ("hermes", HERMES + '{"name": "lo', []),
    ("hermes", HERMES + '{"name": "look"', [("look", "", False)]),
    ("hermes", HERMES + '{"name": "look", "arguments":', [("look", "", False)]),
    ("hermes", HERMES + '{"name": "", "arguments": {', []),
    ("qwen3", '<tool_call>{"parameters": {"a": 1}, "na', []),
    ("named", "<call:look>", [("look", "", False)]),
    ("named", "<call:look>[", [("look", "", False)]),
    ("members", '[CALL]{"tool": "look", "with"', [("look", "", False)]),
    ("qwen3_5", "<tool_call><function=lo", []),
    ("gemma4", "<|tool_call>call:look{days:", []),
]


@pytest.mark.parametrize(("style", "text", "calls"), NO_ROOM)
@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("before", ["", "<think>Hm.</think>Well: "])
def test_a_call_that_there_was_no_room_for_is_no_content(
    style: str, text: str, calls: Any, size: int, before: str
) -> None:
    before = before if style in ("hermes", "named", "members") else ""
    text = before + text
    told = read(style, [text[begin : begin + size] for begin in range(0, len(text), size)], cut=True)
    if "c" in told.content[-1:]:  # it stands after a call that has ended
        return
    assert (told.calls, told.content) == (calls, "Well:" if before else "")


@pytest.mark.parametrize("style", ["hermes", "members", "named"])
def test_a_string_with_a_line_break_in_it_is_none_and_hides_nothing(style: str) -> None:
    given = '{"text": "never closed}\n'
    text = OBJECTS[style].format("look", given) + " b"
    told = read(style, list(text))
    assert told == read(style, [text])
    assert told.content == "b"
    ((name, arguments, ended),) = told.calls
    assert (name, ended) == ("look", True)
    assert arguments.startswith(given)


IN_TAGS = "<tool_call><function=look>\n<parameter={}>\n{}\n</parameter>\n</function>\n</tool_call> b"


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("end", ["</parameter>", "</function></tool_call>", "</function>\\n</tool_call> "])
def test_what_stands_in_a_string_of_a_tags_json_ends_nothing(end: str, size: int) -> None:
    for key, value in (("where", f'{{"a": "{end}", "{end}": 1}}'), ("all", f'["\\"{end}", 2]')):
        text = IN_TAGS.format(key, value)
        told = read("qwen3_5", [text[begin : begin + size] for begin in range(0, len(text), size)])
        ((name, arguments, ended),) = told.calls
        assert (name, json.loads(arguments), ended, told.content) == ("look", {key: json.loads(value)}, True, "b")


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_tags_text_ends_with_its_tag_if_calls_are_held_to_a_form(size: int) -> None:
    value = "say </function>\n</tool_call> and <tool_call>"
    text = IN_TAGS.format("text", value)
    reader = template("qwen3_5").reader("", TOOLS, are_held=True)
    told = read_in_pieces(reader, [text[begin : begin + size] for begin in range(0, len(text), size)])
    ((_, arguments, ended),) = told.calls
    assert (json.loads(arguments), ended, told.content) == ({"text": value}, True, "b")
    forgotten = "<tool_call><function=look><parameter=text>a</function></tool_call> b"
    assert read("qwen3_5", [forgotten]) == Told("", "b", [("look", '{"text": "a"}', True)])


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("qwen3_5", IN_TAGS.format("where", '{"a": "\\ud83d"}')),
        ("gemma4", '<|tool_call>call:look{where:{"a":"\\ud83d"}}<tool_call|> b'),
        ("listed", '<calls>[{"name": "look", "arguments": {"where": {"a": "\\ud83d"}}}]</calls> b'),
    ],
)
def test_half_a_character_of_utf16_stays_an_escape(style: str, text: str) -> None:
    assert read(style, [text]) == Told("", "b", [("look", '{"where": {"a": "\\ud83d"}}', True)])


LONG = 2**14


@pytest.mark.parametrize("text", [" ", "\n", '<tool_call>\n{"', "<tool_call>\n{"])
def test_what_may_become_something_is_not_read_again_for_each_piece(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blanks may begin a call, and a name in a call may end: both are looked at again, but not for each token."""
    looked: list[int] = []
    reader = Vocabulary(tool_tokenizer()).response_template
    assert reader is not None
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    reading = reader.reader("<|im_start|>assistant\n", [tool])
    feed, begin = reading._parser.feed, JsonCall._begin_member
    monkeypatch.setattr(
        reading._parser, "feed", lambda piece: (looked.append(len(reading._untold.text)), feed(piece))[1]
    )
    monkeypatch.setattr(JsonCall, "_begin_member", lambda call: (looked.append(len(call._rest)), begin(call))[1])
    reading.read(text, finished=False)
    for _ in range(LONG // 4):
        reading.read(4 * (text[-1] if text.isspace() else "a" if text[-1] == '"' else " "), finished=False)
    assert sum(looked) < 100 * LONG
    said = reading.read("", finished=True)
    assert not said.calls


# ---- delimiters


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_5", "gemma4"])
def test_most_text_is_far_from_known_delimiters(model_type: str) -> None:
    delimiters = Delimiters((known_response_template(model_type) or {})["fields"])
    for text in (" quick brown", "漢字", "a > b, {c}", "\n\n1. one"):
        assert delimiters.are_far_from(text)
    for text in ("a <", "<", "x <think> y"):
        assert not delimiters.are_far_from(text)


@pytest.mark.parametrize("pattern", [r"(?<=a)b", r"\bcall", r".all", r"[^a]b", "^a"])
def test_patterns_that_may_begin_anywhere_are_far_from_nothing(pattern: str) -> None:
    assert not Delimiters({"content": {}, "tool_calls": {"open_pattern": pattern}}).are_far_from("hello")


def test_blanks_before_a_delimiter_wait_for_it() -> None:
    delimiters = Delimiters({"tool_calls": {"open_pattern": r"\s*<call>", "close": ["end", "stop"]}})
    assert delimiters.are_far_from(" a b")
    assert not delimiters.are_far_from("a ")
    assert not delimiters.are_far_from("the")
    assert not Delimiters({"tool_calls": {"open": " a"}}).are_far_from("b c")
