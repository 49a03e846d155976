"""Thinking and calls of tools are split from an answer, whole and as it comes, for the openai package's client."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from support.server.engine_processes import PATIENCE
from support.server.running_servers import RunningServer
from support.server.scripted import CALL, WEATHER, Script, tool_tokenizer

TIME = {"type": "function", "function": {"name": "time"}}
MESSAGES: list[Any] = [{"role": "user", "content": "How is the weather in Rome?"}]
OTHER = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


def whole(client: Any, **options: Any) -> Any:
    return client.chat.completions.create(model="tiny", **{"messages": MESSAGES, **options})


def streamed(client: Any, **options: Any) -> Any:
    """What the client's own accumulator makes of a stream."""
    with client.chat.completions.stream(model="tiny", **{"messages": MESSAGES, **options}) as stream:
        thoughts = ""
        for event in stream:
            if event.type == "chunk" and event.chunk.choices:
                thoughts += getattr(event.chunk.choices[0].delta, "reasoning_content", None) or ""
        completion = stream.get_final_completion()
        completion.choices[0].message.reasoning_content = thoughts or None  # type: ignore[attr-defined]
        return completion


ANSWERS = [
    ("Hello.\n", "Hello.", None, []),
    ("<think>\nHm, hm.\n</think>\n\nHello. <3", "Hello. <3", "Hm, hm.", []),
    ("Well:\n" + CALL, "Well:", None, [("weather", {"city": "Rome"})]),
    (f"<think>Hm.</think>{CALL}\n{OTHER}\n", None, "Hm.", [("weather", {"city": "Rome"}), ("time", {})]),
    ("Well: <tool_call>{Rome}</tool_call> there.", "Well: <tool_call>{Rome}</tool_call> there.", None, []),
    (f"{CALL}\nThen <tool_call>\n" + '{"name": "we', 'Then <tool_call>\n{"name": "we', None, [("weather", None)]),
    ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', None, []),
    ("<think>never", "", "never", []),
    ("<think>Hm.</think><tool_call>{</tool_call>", "<tool_call>{</tool_call>", "Hm.", []),
    ("a  b \n c < d  <e <think> Hm,  <x> hm. </think>  f\n", "a  b \n c < d  <e   f", "Hm,  <x> hm.", []),
]


@pytest.mark.parametrize(("text", "content", "thoughts", "calls"), ANSWERS)
@pytest.mark.parametrize("at_once", [1, 7, 1000])
@pytest.mark.parametrize("ask", [whole, streamed])
def test_parts_are_told_by_their_names(
    talker: Any, script: Script, ask: Any, at_once: int, text: str, content: str, thoughts: Any, calls: Any
) -> None:
    script.text, script.at_once = text, at_once
    choice = ask(talker, tools=[WEATHER, TIME]).choices[0]
    assert (choice.message.content or "") == (content or "")
    assert choice.message.reasoning_content == thoughts
    found = choice.message.tool_calls or []
    assert [call.function.name for call in found] == [name for name, _ in calls]
    for call, (_, arguments) in zip(found, calls, strict=True):
        assert call.type == "function"
        assert arguments is None or json.loads(call.function.arguments) == arguments
    assert len({call.id for call in found}) == len(found)
    assert choice.finish_reason == ("tool_calls" if calls else "stop")


def test_a_cut_answer_says_so(talker: Any, script: Script) -> None:
    script.reason = "length"
    for script.text, arguments in ((CALL, '{"city": "Rome"}'), (CALL.partition("ome")[0], '{"city": "R')):
        accumulated = ChatCompletionStreamState()  # without tools: it refuses to read what was cut
        for chunk in whole(talker, tools=[WEATHER], stream=True):
            accumulated.handle_chunk(chunk)
        for completion in (whole(talker, tools=[WEATHER]), accumulated.current_completion_snapshot):
            (choice,) = completion.choices
            assert choice.finish_reason == "length"
            assert [call.function.arguments for call in choice.message.tool_calls or ()] == [arguments]


def test_arguments_come_as_they_are_written(talker: Any, script: Script) -> None:
    begin, end = f"Well: {CALL}".split("ome")
    script.text, script.at_once, script.allowed = f"{begin}ome{end}\n{OTHER}", 1, threading.Semaphore()
    script.allowed.release(len(script.tokens(begin)) - 1)
    deltas, told = [], ""
    for chunk in whole(talker, tools=[WEATHER, TIME], stream=True, timeout=PATIENCE):
        for call in chunk.choices[0].delta.tool_calls or ():
            deltas.append(call)
            told += call.function.arguments
        if told == '{"city": "R':
            told = ""
            script.allowed.release(len(script.text))
    assert told == 'ome"}{}'
    first, *pieces = [call for call in deltas if call.index == 0]
    assert (first.type, first.function.name, first.function.arguments) == ("function", "weather", "")
    assert first.id is not None
    assert {(piece.id, piece.type, piece.function.name) for piece in pieces} == {(None, None, None)}
    other, arguments = [call for call in deltas if call.index == 1]
    assert (other.function.name, arguments.function.arguments) == ("time", "{}")
    assert other.id != first.id


def test_a_call_that_there_was_no_room_for_is_no_content(talker: Any, script: Script) -> None:
    script.reason = "length"
    for text, named in (
        ('<tool_call>\n{"na', False),
        ('<tool_call>\n{"name": "weather", "ar', True),
        ("<tool_c", False),
    ):
        script.text = f"Well: {text}"
        choice = whole(talker, tools=[WEATHER]).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("Well:", "length")
        calls = choice.message.tool_calls or []
        assert [(call.function.name, call.function.arguments) for call in calls] == [("weather", "")] * named
        choices = [chunk.choices[0] for chunk in whole(talker, tools=[WEATHER], stream=True)]
        assert "".join(part.delta.content or "" for part in choices) == "Well:"
        assert sum(len(part.delta.tool_calls or ()) for part in choices) == named
        assert choices[-1].finish_reason == "length"
        assert whole(talker).choices[0].message.content == script.text  # without tools it is text
    script.reason = "stop"
    assert whole(talker, tools=[WEATHER]).choices[0].message.content == script.text


HALF = "\\ud83d"
HALVES = [
    (f'{{"name": "weather", "arguments": {{"city": "{HALF}"}}}}', "weather", f'{{"city": "{HALF}"}}'),
    (f'{{"name": "weather{HALF}", "arguments": {{}}}}', "weather\ufffd", "{}"),
    (f'{{"name": "weather", "arguments": "{{\\"city\\": \\"{HALF}\\"}}"}}', "weather", f'{{"city": "{HALF}"}}'),
]


@pytest.mark.parametrize(("call", "name", "arguments"), HALVES)
@pytest.mark.parametrize("at_once", [1, 1000])
def test_half_a_character_of_utf16_loses_no_answer(
    talker: Any, script: Script, call: str, name: str, arguments: str, at_once: int
) -> None:
    script.text, script.at_once = f"<tool_call>{call}</tool_call>", at_once
    (found,) = whole(talker, tools=[WEATHER]).choices[0].message.tool_calls
    assert (found.function.name, found.function.arguments) == (name, arguments)
    state = ChatCompletionStreamState()
    for chunk in whole(talker, tools=[WEATHER], stream=True):
        state.handle_chunk(chunk)
    choice = state.current_completion_snapshot.choices[0]
    (streamed_call,) = choice.message.tool_calls or ()
    assert (streamed_call.function.name, streamed_call.function.arguments) == (name, arguments)
    assert choice.finish_reason == "tool_calls"
    flat = [{"type": "function", **WEATHER["function"]}]  # type: ignore[dict-item]
    item = talker.responses.create(model="tiny", input="hi", tools=flat).output[0]
    assert (item.name, item.arguments) == (name, arguments)
    events = list(talker.responses.create(model="tiny", input="hi", tools=flat, stream=True))
    assert events[-1].response.output[0].arguments == arguments
    message = {"role": "assistant", "tool_calls": [found.model_dump()]}
    whole(talker, messages=[*MESSAGES, message], tools=[WEATHER])  # it goes back


def test_without_tools_nothing_is_a_call(talker: Any, script: Script) -> None:
    script.text = f"<think>Hm.</think>{CALL}"
    for options in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice = whole(talker, **options).choices[0]
        assert choice.message.content == CALL
        assert choice.message.tool_calls is None
        assert choice.finish_reason == "stop"
        assert "<tool_call>" not in script.prompt
        assert "of a city" not in script.prompt


def test_one_call_alone_if_that_is_asked_for(talker: Any, script: Script) -> None:
    script.text = f"{CALL}\n{OTHER}\n{OTHER}"
    for ask in (whole, streamed):
        message = ask(talker, tools=[WEATHER, TIME], parallel_tool_calls=False).choices[0].message
        assert [call.function.name for call in message.tool_calls] == ["weather"]


def test_thinking_is_counted(talker: Any, script: Script) -> None:
    script.text = "<think>one two three</think>four"
    counted = len(tool_tokenizer()("one two three")["input_ids"])
    usage = whole(talker).usage
    assert usage.completion_tokens_details.reasoning_tokens == counted
    assert usage.completion_tokens > counted
    chunks = list(whole(talker, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == counted
    script.text = "four"
    assert whole(talker).usage.completion_tokens_details.reasoning_tokens == 0


def test_thinking_is_left_out_if_nobody_wants_it(talker: Any, script: Script) -> None:
    script.text = "<think>one two three</think>four"
    for ask in (whole, streamed):
        message = ask(talker, extra_body={"include_reasoning": False}).choices[0].message
        assert (getattr(message, "reasoning_content", None), message.content) == (None, "four")
    usage = whole(talker, extra_body={"include_reasoning": False}).usage
    assert usage.completion_tokens_details.reasoning_tokens > 0


def test_thinking_that_the_prompt_has_begun(talker: Any, script: Script) -> None:
    script.text = "Hm.\n</think>\n\nHello."
    for ask in (whole, streamed):
        message = ask(talker, extra_body={"chat_template_kwargs": {"think": True}}).choices[0].message
        assert (message.reasoning_content, message.content) == ("Hm.", "Hello.")


def test_every_answer_has_its_parts(talker: Any, script: Script) -> None:
    script.text = f"<think>Hm.</think>Well:\n{CALL}"
    for choice in whole(talker, n=3, tools=[WEATHER]).choices:
        assert (choice.message.content, choice.message.reasoning_content) == ("Well:", "Hm.")
    calls = [0] * 3
    for chunk in whole(talker, n=3, tools=[WEATHER], stream=True):
        for choice in chunk.choices:
            calls[choice.index] += sum(call.id is not None for call in choice.delta.tool_calls or ())
    assert calls == [1] * 3


def test_a_chat_goes_on_after_a_call(talker: Any, script: Script, speaker: RunningServer) -> None:
    script.text = f"<think>Hm.</think>{CALL}"
    message = whole(talker, tools=[WEATHER]).choices[0].message
    script.text = "Fine."
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": [{"type": "text", "text": "sun"}]}
    given = [*MESSAGES, message.model_dump(exclude_none=True), result]
    assert whole(talker, messages=given, tools=[WEATHER]).choices[0].message.content == "Fine."
    assert f"<think>Hm.</think>\n\n{CALL}</s>" in script.prompt
    assert f"sun of weather by {message.tool_calls[0].id}" in script.prompt
    assert '"name": "weather", "description": "of a city"' in script.prompt
    given[1]["reasoning"] = given[1].pop("reasoning_content")
    whole(talker, messages=given, tools=[WEATHER])
    assert "<think>Hm.</think>" in script.prompt
    tokens = speaker.http.post("/tokenize", json={"messages": given, "tools": [WEATHER]}).json()["tokens"]
    assert tokens == script.asked[-1].prompt


def test_long_thinking_is_counted_beside_the_event_loop(
    talker: Any, script: Script, speaker: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = speaker.api_server.link.model.vocabulary
    threads: list[threading.Thread] = []
    count = vocabulary.of_text

    def counting(text: str, add_special_tokens: bool = True) -> list[int]:
        threads.append(threading.current_thread())
        return count(text, add_special_tokens)

    monkeypatch.setattr(vocabulary, "of_text", counting)
    script.at_once, script.text = 1000, f"<think>{'one two ' * 3000}</think>four"
    for options in ({}, {"stream": True, "stream_options": {"include_usage": True}}):  # which once ended too early
        found = whole(talker, **options)
        usage = list(found)[-1].usage if options else found.usage
        assert usage.completion_tokens_details.reasoning_tokens > 3000
    assert len(threads) == 2
    assert speaker._thread not in threads
