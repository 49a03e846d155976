"""`compiled-llm chat`: in a pipe, and in a terminal."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from compiled_llm.client import Client
from compiled_llm.commands.chat.chat import Chat
from compiled_llm.commands.chat.conversation import Conversation
from compiled_llm.commands.chat.model import ChatModel, RemoteChatModel
from compiled_llm.engine.engine import Engine
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.server.engine_process.facts import ready_of
from support.characters import character_tokenizer
from support.commands import talking_model
from support.commands.command_line import greedy, invoke
from support.commands.terminal import CTRL_C, CTRL_D, UP, Terminal, terminal
from support.server.engine_processes import Loop, engine_in_thread, until
from support.server.scripted import speaking_server, tool_tokenizer


def chatted(*arguments: str, lines: str = "") -> Any:
    return invoke("chat", *arguments, stdin=lines)


def huggingfaces(folder: Path, text: str, tokens: int) -> str:
    return greedy(folder, text, tokens)[1]


def test_in_a_pipe_each_line_is_a_question_and_the_chat_goes_on(model_folder: Path) -> None:
    arguments = (str(model_folder), "--mode", "eager", "--max-new-tokens", "20", "--system", "Be brief")
    done = chatted(*arguments, lines="Hi there\n/stats\nAgain\n")
    first = huggingfaces(model_folder, "<system: Be brief><user: Hi there>", 20)
    second = huggingfaces(model_folder, f"<system: Be brief><user: Hi there><assistant: {first}><user: Again>", 20)
    assert done.stdout == f"{first}\n{second}\n"
    assert done.exit_code == 0
    assert "its prompt      34 tokens, 0 of them cached" in done.stderr


def test_over_a_socket_it_is_the_same_and_earlier_turns_are_cached(model_folder: Path, socket: Path) -> None:
    lines = 'Hi there\n"""\nsome\nlines"""\n/stats\n/retry\n/clear\nHi there\n'
    done = chatted("--server", str(socket), "--max-tokens", "20", "--quiet", lines=lines)
    first = huggingfaces(model_folder, "<user: Hi there>", 20)
    second = huggingfaces(model_folder, f"<user: Hi there><assistant: {first}><user: some\nlines>", 20)
    assert done.stdout == f"{first}\n{second}\n{second}\n{first}\n"
    cached = next(line for line in done.stderr.splitlines() if line.startswith("its prompt"))
    assert int(cached.split()[4]) >= 16
    assert "pages" in done.stderr


def test_what_cannot_be_answered_is_said_and_the_chat_goes_on(model_folder: Path, socket: Path) -> None:
    lines = "/retry\nforbidden\n/nothing\n/nothing is a text\n" + "x" * 3000 + "\n/system Be brief\n/help\n/exit\nno\n"
    done = chatted("--server", str(socket), "--max-tokens", "5", lines=lines)
    assert done.stdout == huggingfaces(model_folder, "<user: /nothing is a text>", 5) + "\n"
    *errors, too_long = (line for line in done.stderr.splitlines() if line.startswith("error"))
    assert errors == [
        "error: /retry: there is no question to answer again",
        "error: the model's chat template refuses this: no such message",
        "error: there is no /nothing; /help says what there is",
    ]
    assert too_long.endswith(" tokens, and with the answer there can be 1024; /clear begins a new one")
    assert "system message: Be brief" in done.stderr
    assert "/stats        show speed" in done.stderr
    assert done.exit_code == 1


def test_an_engine_process_that_is_started_again_is_found(model_folder: Path, engine: Engine, path: Path) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.0)
    with engine_in_thread(engine, path, tokenizer=model_folder):
        client = Client(path, tokenizer=True, wait=False)
        model = RemoteChatModel(client, quiet=True)
        first = client.submit([5, 6], params).result(60)
    until(lambda: client._session.broken)  # the client has heard of it
    loop = Loop(path)
    threading.Timer(0.2, loop.open, (engine, model_folder)).start()
    assert model.refresh() is False, "it waits until it is ready"
    assert client.submit([5, 6], params).result(60).token_ids == first.token_ids
    client.close()
    loop.close()


class Questions:
    """A terminal that asks the questions of a test, and keeps what is said."""

    interactive, quiet = False, True

    def __init__(self, *questions: Any) -> None:
        self._questions = list(questions)
        self.heard: list[str] = []
        self.answers: list[str] = []
        self.tell = self.say = self.complain = self.heard.append
        self.write = self.answers.append

    def question(self) -> str | None:
        """The next one; what is none is called before."""
        while self._questions and callable(self._questions[0]):
            self._questions.pop(0)()
        return self._questions.pop(0) if self._questions else None


def test_another_model_that_comes_back_is_asked_in_its_own_words(
    model_folder: Path, engine: Engine, path: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.chat_template = tokenizer.chat_template.replace("<", "[")
    AutoModelForCausalLM.from_pretrained(model_folder).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    first, second = Loop(path), None
    first.open(engine, model_folder)
    client = Client(path, tokenizer=True, wait=False)
    model = RemoteChatModel(client, quiet=True)

    def replaced() -> None:
        nonlocal second
        first.close()
        until(lambda: client._session.broken)  # the client has heard of it
        second = Loop(path)
        second.open(engine, tmp_path, "other")

    terminal: Any = Questions("Hi", replaced, "Again")
    Chat(Conversation(model, None), {"max_tokens": 8, "temperature": 0.0}, terminal).run()
    client.close()
    assert second is not None
    second.close()
    said = huggingfaces(model_folder, "<user: Hi>", 8)
    again = huggingfaces(tmp_path, f"[user: Hi>[assistant: {said}>[user: Again>", 8)
    assert "the server has another model now: other" in terminal.heard
    assert "".join(terminal.answers) == f"{said}\n{again}\n"


def test_a_socket_without_an_engine_process_is_named(tmp_path: Path) -> None:
    done = chatted("--server", str(tmp_path / "none"), "--quiet")
    assert done.exit_code == 1
    assert "there is no such socket; start an engine process with `compiled-llm serve MODEL --uds PATH`" in done.stderr


def test_a_chat_by_http_says_what_its_options_say_and_no_more() -> None:
    own = {"temperature": 0.6, "top_p": 0.9}
    with speaking_server(tool_tokenizer(), own) as (script, server):
        script.text = "Yes."
        for options, expected in (
            ((), own),
            (("--top-p", "0.5"), {**own, "top_p": 0.5}),
            (("--temperature", "1"), {**own, "temperature": None}),  # the API server leaves out what is usual
            (("--greedy",), {**own, "temperature": 0.0}),
            (("--temperature", "0"), {**own, "temperature": 0.0}),
        ):
            done = chatted("--server", server.url, "--quiet", *options, lines="Hi\n")
            assert (done.stdout, done.exit_code) == ("Yes.\n", 0), done.stderr
            assert {name: script.asked[-1].params.get(name) for name in own} == expected, options


@pytest.mark.whole
def test_over_a_socket_a_chat_is_sampled_as_the_engine_processs_model_is(
    model_folder: Path, engine: Engine, path: Path
) -> None:
    loop = Loop(path)
    ready = ready_of(engine._model, engine, "tiny", engine._tokenizer, str(model_folder))
    loop.server.open(engine, msgspec.structs.replace(ready, sampling={"temperature": 5.0, "top_k": 20}))
    arguments = ("--server", str(path), "--max-tokens", "20", "--quiet")
    assert len({chatted(*arguments, lines="Hi there\n").stdout for _ in range(3)}) > 1
    greedily = chatted(*arguments, "--greedy", lines="Hi there\n").stdout
    assert greedily == huggingfaces(model_folder, "<user: Hi there>", 20) + "\n"
    client = invoke("client", "Hi there", "--raw", "--server", str(path), "--max-tokens", "20", "--quiet")
    assert client.stdout != huggingfaces(model_folder, "Hi there", 20) + "\n"
    loop.close()


def test_a_chat_with_a_model_is_sampled_as_its_generation_config_has_it(model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    GenerationConfig(do_sample=True, temperature=5.0).save_pretrained(folder)
    arguments = (str(folder), "--mode", "eager", "--max-new-tokens", "20", "--quiet")
    drawn = {chatted(*arguments, lines="Hi there\n").stdout for _ in range(3)}
    assert len(drawn) > 1
    greedily = chatted(*arguments, "--greedy", lines="Hi there\n").stdout
    assert greedily == huggingfaces(model_folder, "<user: Hi there>", 20) + "\n"


def model_with(tokenizer: Any) -> ChatModel:
    engine: Any = None
    return ChatModel(engine, "a stand-in", tokenizer, 100, {})


def test_a_tokenizer_that_writes_no_chats_is_refused() -> None:
    with pytest.raises(ValueError, match="chat: this model's tokenizer has no chat template"):
        Conversation(model_with(character_tokenizer()), None)


def test_a_template_that_takes_no_system_message_says_so_at_once() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system') if messages[0]['role'] == 'system' else 'Hi' }}"
    with pytest.raises(ValueError, match="chat: the model's chat template refuses this: no system"):
        Conversation(model_with(tokenizer), "Be brief")
    conversation = Conversation(model_with(tokenizer), None)
    conversation.add("a question without an answer", "")
    assert conversation.messages == []


# ---- in a terminal, with a stand-in for the model


@pytest.fixture
def chat() -> Iterator[Terminal]:
    with terminal([sys.executable, talking_model.__file__, "100000"]) as chat:
        chat.until("> ")
        yield chat


def test_ctrl_c_ends_the_answer_and_not_the_chat(chat: Terminal) -> None:
    for _ in range(2):
        chat.type("count\n")
        chat.until("1 2 3 4 ")
        chat.type(CTRL_C)
        chat.until("stopped; Ctrl-C again, or Ctrl-D, ends the chat")
        chat.until("> ")
    chat.type("/stats\n")
    chat.until("(cancelled)")
    chat.until("its prompt")
    chat.until("3 tokens, ")  # what had come of the first answer is a part of the chat
    chat.until("> ")
    time.sleep(0.2)  # a dumb terminal shows the prompt a moment before keys are read
    chat.type(CTRL_D)
    assert chat.ended() == 0
    assert "Traceback" not in chat.shown
    assert "KeyboardInterrupt" not in chat.shown


def interrupt(chat: Terminal) -> None:
    """Ctrl-C at the prompt, a moment after what was typed is shown: before, the terminal itself may have shown it."""
    chat.type("half")
    chat.until("half")
    time.sleep(0.2)
    chat.type(CTRL_C)


def test_the_second_ctrl_c_at_the_prompt_ends_the_chat(chat: Terminal) -> None:
    for again in (True, False):
        interrupt(chat)
        chat.until("Ctrl-C again, or Ctrl-D, ends the chat")
        chat.until("> ")
        if again:
            chat.type("/help\n")  # between two it counts again
            chat.until("at the prompt, the second one ends the chat")
            chat.until("> ")
    interrupt(chat)
    assert chat.ended() == 0
    assert "Traceback" not in chat.shown


def test_an_answer_that_is_cut_says_so() -> None:
    with terminal([sys.executable, talking_model.__file__, "3"]) as chat:
        chat.until("> ")
        chat.type('"""\none\n')
        chat.type('two"""\n')
        chat.until("1 2 3 ")
        chat.until("cut after 3 tokens")
        chat.until("> ")
        chat.type("/exit\n")
        assert chat.ended() == 0


def test_commands_are_completed_and_earlier_questions_come_back() -> None:
    command = [sys.executable, talking_model.__file__, "3"]
    with terminal(command, TERM="xterm", PROMPT_TOOLKIT_NO_CPR="1") as chat:
        chat.until(">")
        chat.type("count\n")
        chat.until("cut after 3 tokens")
        chat.type("/st")
        chat.until("show speed, cached tokens and pages")  # the menu
        chat.type("\t\n")
        chat.until("its prompt")
        chat.type(UP + UP + "\n")  # before the command
        chat.until("cut after 3 tokens")
        chat.until(">")
        chat.type(CTRL_D)
        assert chat.ended() == 0


# ---- while it compiles


PATIENCE = 500.0


def compiles_a_kernel(group: int) -> bool:
    """Whether a C++ compiler of this process group works on a kernel, not on a trial of vector instructions."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            name, fields = (folder / "stat").read_text().rsplit(")", 1)
            is_compiler = name.endswith("(cc1plus") and int(fields.split()[2]) == group
            if is_compiler and b".main.cpp" in (folder / "cmdline").read_bytes():
                return True
    return False


@pytest.mark.whole
@pytest.mark.parametrize("compilers", ["1", "2"])  # in the thread that compiles, or in Inductor's pool
def test_ctrl_c_ends_no_compile_in_the_background(model_folder: Path, tmp_path: Path, compilers: str) -> None:
    begin = (
        "import logging, sys, torch; from compiled_llm.commands.app import app; "
        f"logging.basicConfig(level=logging.INFO); torch.get_num_threads = lambda: {compilers} + 1; app()"
    )
    command = [sys.executable, "-c", begin, "chat", str(model_folder), "--max-new-tokens", "20"]
    with terminal(command, TORCHINDUCTOR_CACHE_DIR=str(tmp_path)) as chat:
        chat.until("compiling in the background")
        chat.until("> ")
        deadline = time.monotonic() + PATIENCE
        while not compiles_a_kernel(chat.process.pid):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(chat.process.pid, signal.SIGINT)  # as a terminal does
        chat.until("Ctrl-C again, or Ctrl-D, ends the chat")
        chat.until("compiled in the background", PATIENCE)
        assert "has failed" not in chat.shown
        chat.type("Hi\n")
        chat.until("cut after 20 tokens")
        chat.until("> ")
        time.sleep(0.2)
        chat.type(CTRL_D)
        assert chat.ended() == 0
