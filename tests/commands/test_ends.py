"""How a command's process ends: with its exit code, quickly and quietly, whatever was imported and whoever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands.terminal import terminal
from support.server.engine_processes import COMMAND

PLANTED = """
import atexit, sys, threading, time
import compiled_llm.commands.app as commands
from compiled_llm.__main__ import main

class Library:
    def __del__(self):
        print("taken apart", file=sys.__stderr__, flush=True)

def beside():
    time.sleep(0.2)
    print("thread", end=" ")

def command():
    sys.modules["planted_library"] = Library()
    atexit.register(lambda: print("registered", end=""))
    threading.Thread(target=beside).start()
    {0}

commands.app = command
main()
"""


def ended(does: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command, environment = [sys.executable, "-c", PLANTED.format(does)], {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_nothing_is_taken_apart_and_what_was_registered_and_written_is_not_lost() -> None:
    """Libraries that look for what they have leaked would print that."""
    done = ended("print('written', end=' ')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "written thread registered", "")


@pytest.mark.drawn(most=3)
@pytest.mark.parametrize(
    ("does", "code"),
    [
        ("sys.exit(3)", 3),
        ("sys.exit()", 0),
        ("sys.exit('so it is')", 1),
        ("return", 0),
        ("raise KeyboardInterrupt", 130),
        ("raise ZeroDivisionError", 1),
    ],
)
def test_the_exit_code_is_that_of_the_command(does: str, code: int) -> None:
    done = ended(does)
    assert done.returncode == code, done.stderr
    assert done.stdout == "thread registered"
    assert ("Traceback" in done.stderr) is ("ZeroDivision" in does)
    assert ("so it is" in done.stderr) is ("so it is" in does)


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", r"Z\xfcrich \U0001f916"), ("utf-8", "Zürich 🤖")])
def test_a_text_that_stdout_has_no_characters_for_is_spelled_out(encoding: str, shown: str) -> None:
    """In another encoding a model's answer would end in an error."""
    written = r"Z\xfcrich \U0001f916"
    done = ended(f'print("{written}", end=" ")', PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{shown} thread registered", "")


def test_in_a_terminal_of_ascii_too() -> None:
    does = r'print("Z\xfcrich \U0001f916", end=" ")'
    command = [sys.executable, "-c", PLANTED.format(does)]
    ascii_alone = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": ""}
    with terminal(command, **ascii_alone) as shown:
        assert shown.ended() == 0
        assert shown.shown == r"Z\xfcrich \U0001f916 thread registered"


TORCH_THAT_DROPS_CTRL_C = """
import sys, time
print("importing", flush=True)
for _ in range(200):
    try:
        time.sleep(0.1)
    except KeyboardInterrupt:
        pass
raise ModuleNotFoundError("Could not import module 'PreTrainedModel'")
"""


OTHERS = [pytest.param(name, marks=pytest.mark.whole) for name in ("explain", "chat", "compile")]


@pytest.mark.parametrize("command", ["generate", "doctor", *OTHERS])
def test_ctrl_c_while_torch_is_imported_ends_the_command_at_once(command: str, tmp_path: Path) -> None:
    """Inside an import a KeyboardInterrupt is dropped, or becomes another error."""
    (tmp_path / "torch.py").write_text(TORCH_THAT_DROPS_CTRL_C)
    given = {"compile": ["demo", "--output", str(tmp_path / "new")], "explain": ["demo"], "generate": ["Hi"]}
    start = "import sys; sys.path.insert(0, sys.argv.pop(1)); from compiled_llm.__main__ import main; main()"
    program = [sys.executable, "-c", start, str(tmp_path), command, *given.get(command, [])]
    with subprocess.Popen(
        program, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        where = process.stderr if command == "doctor" else process.stdout
        lines = iter(where.readline, "")
        assert any(line == "importing\n" for line in lines)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "PreTrainedModel" not in errors


MADE_UP = """
from compiled_llm.__main__ import main
from compiled_llm.commands.generate.run import GenerateRequest
GenerateRequest.run = lambda *given: [print("Hello", flush=True) for _ in range(10**6)]
main()
"""
GENERATE = (COMMAND, "generate", "Hello world", "--max-new-tokens", "1000", "--mode", "eager", "--model")
CHAT = (COMMAND, "chat", "--max-new-tokens", "100", "--mode", "eager")


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize(
    ("command", "closed"),
    [
        (GENERATE, False),
        ((sys.executable, "-c", MADE_UP, "generate", "Hi", "--model"), True),
        *(pytest.param(CHAT, closed, marks=pytest.mark.whole) for closed in (False, True)),
    ],
    ids=["generate, Ctrl-C", "generate, closed", "chat, Ctrl-C", "chat, closed"],
)
def test_ctrl_c_and_a_closed_pipe_end_a_command_quietly(
    model_folder: Path, command: tuple[str, ...], closed: bool
) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*command, str(model_folder)], text=True, **pipes) as process:  # type: ignore[call-overload]
        process.stdin.write("Hi\n" * 200)
        process.stdin.flush()
        assert process.stdout.read(1)
        if closed:
            process.stdout.close()
            errors = process.stderr.read()
        else:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        assert process.wait(60) == (1 if closed else 130), errors
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors
