"""A client takes what an engine takes, without torch; it says whom it cannot talk to, and never waits to send."""

from __future__ import annotations

import asyncio
import random
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compiled_llm.client import AsyncClient, Client, EngineDeadError, EngineProcessError
from compiled_llm.client.plain import plain_params, token_ids
from compiled_llm.client.transport import connection
from compiled_llm.protocol.frames import Frames, frame_of
from compiled_llm.protocol.messages import (
    VERSION,
    AskStats,
    Cancel,
    Ended,
    FromClient,
    Leaving,
    Piece,
    Preparing,
    Problem,
    Ready,
    Refused,
    StepUpdates,
    Submit,
    Summary,
    Update,
    Welcome,
)
from compiled_llm.requests.columns import encoded
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.requests.structured_outputs import StructuredOutputsParams
from support.characters import character_tokenizer
from support.server.engine_processes import PATIENCE, until

WELCOME, READY = Welcome(VERSION, "a test", 1), Ready("a model", 100, [2], 1000, 8)

LIGHT = """
import sys
from compiled_llm.client import Client
from compiled_llm import SamplingParams
with Client(sys.argv[1]) as client:
    handle = client.submit([1, 2, 3], SamplingParams(max_tokens=4, stop_token_ids=[7]))
    print(handle.refused, client.doing)
assert not {"torch", "transformers", "numpy", "tokenizers"} & set(sys.modules), set(sys.modules)
"""


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="uds-") as folder:
        yield Path(folder) / "socket"


@contextmanager
def answering(path: Path, *answers: Any, last_after: type | None = None) -> Iterator[list[Any]]:
    """Whoever connects is told this, whatever it says, the last of it once such a message has come; that is listed."""
    received: list[Any] = []

    def serve() -> None:
        connection, _ = listening.accept()
        listening.close()  # nobody is answered again
        frames: Frames[Any] = Frames(FromClient)
        with connection, suppress(OSError):  # who does not like what he hears leaves
            for number, answer in enumerate(answers, 1):
                while last_after and number == len(answers) and last_after not in map(type, received):
                    if not (data := connection.recv(2**16)):
                        return
                    received.extend(frames.feed(data))
                connection.sendall(answer if isinstance(answer, bytes) else frame_of(answer))
            if answers and not isinstance(answers[-1], (Problem, bytes)):
                while data := connection.recv(2**16):
                    received.extend(frames.feed(data))

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        yield received
        thread.join()


Kind = type[Client | AsyncClient]
KINDS = pytest.mark.parametrize("kind", [Client, AsyncClient])


async def begun(kind: Kind, path: Path) -> Client | AsyncClient:
    client = kind(path)
    if isinstance(client, AsyncClient):
        await client.__aenter__()
    return client


def test_without_a_tokenizer_neither_torch_nor_transformers_is_imported(path: Path) -> None:
    with answering(path, WELCOME, READY) as received:
        done = subprocess.run([sys.executable, "-c", LIGHT, str(path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "None ready\n"), done.stderr
    assert received[1:] == [Submit(1, [1, 2, 3], {"max_tokens": 4, "stop_token_ids": [7]})]


def test_several_prompts_are_told_from_one(path: Path) -> None:
    given: list[Any] = [
        *([1, 2], np.array([3, 4]), [np.array([5]), torch.tensor([6, 7])], torch.tensor([[8], [9]])),
        *({"prompt_token_ids": [10, 11]}, [{"prompt_token_ids": [12]}, {"prompt_token_ids": np.array([13])}]),
    ]
    with answering(path, WELCOME, READY) as received, ThreadPoolExecutor() as pool, Client(path) as client:
        for prompts, count in zip(given, (1, 2, 4, 6, 7, 9), strict=True):
            pool.submit(client.generate, prompts)
            until(lambda count=count: len(received) >= 1 + count)
    sent = [[1, 2], [3, 4], [5], [6, 7], [8], [9], [10, 11], [12], [13]]
    assert [message.prompt for message in received[1 : 1 + len(sent)]] == sent


def test_settings_are_sent_as_plain_data() -> None:
    assert plain_params(SamplingParams()) == {}
    given = SamplingParams(
        n=np.int64(2),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        stop=["a", "b"],
        logit_bias={np.int64(3): np.float64(-1)},  # type: ignore[dict-item]
        allowed_token_ids=np.arange(3),  # type: ignore[arg-type]
        max_tokens=None,
    )
    sent = plain_params(given)
    assert sent == {
        "n": 2,
        "temperature": 0.5,
        "stop": ("a", "b"),
        "logit_bias": {3: -1.0},
        "allowed_token_ids": (0, 1, 2),
        "max_tokens": None,
    }
    assert type(sent["n"]) is int
    assert SamplingParams(**sent) == given
    form = StructuredOutputsParams(choice=["yes", "no"], disable_any_whitespace=True)
    sent = plain_params(SamplingParams(structured_outputs=form))
    assert sent == {"structured_outputs": {"choice": ("yes", "no"), "disable_any_whitespace": True}}
    assert StructuredOutputsParams(**sent["structured_outputs"]) == form
    with pytest.raises(ValueError, match="logits_processors: only plain data can be sent to an engine process"):
        plain_params(SamplingParams(logits_processors=[lambda tokens, logits: logits]))


@pytest.mark.parametrize(
    "prompt", [[1, 2], (1, 2), np.array([1, 2]), torch.tensor([1, 2]), [np.int32(1), torch.tensor(2)], range(1, 3)]
)
def test_token_ids_are_taken_in_any_form(prompt: Any) -> None:
    ids = token_ids(prompt, None)
    assert ids == [1, 2]
    assert {type(token) for token in ids} == {int}


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("text", "text needs a tokenizer; give Client"),
        ([{"role": "user", "content": "x"}], "messages need a tokenizer"),
        ("\ud800", "half a character of UTF-16 is no text"),
        ([{"role": "user", "content": "\ud800"}], "half a character of UTF-16 is no text"),
        ([[1], [2]], "one prompt, not several"),
        (["a", "b"], "one prompt, not several"),
        (7, "give text, token ids or the messages of a chat"),
        (None, "give text, token ids or the messages of a chat"),
        ([1.5], "give text, token ids or the messages of a chat"),
        ({"prompt": "text"}, "text needs a tokenizer; give Client"),
        ({"prompt": "text", "multi_modal_data": {}}, "'multi_modal_data' is not served"),
    ],
)
def test_what_is_no_prompt_is_refused(prompt: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        token_ids(prompt, None)


def test_a_folder_is_a_tokenizer(path: Path, tmp_path: Path) -> None:
    character_tokenizer().save_pretrained(tmp_path)
    expected = character_tokenizer()("Hi!")["input_ids"]
    with answering(path, WELCOME, READY) as received, Client(path, tokenizer=tmp_path) as client:
        client.submit("Hi!")
    assert received[1].prompt == expected


def test_an_engine_process_without_a_tokenizer_says_so(path: Path) -> None:
    said = "the engine process has no tokenizer; give one, or use token ids"
    with answering(path, WELCOME, READY), Client(path, tokenizer=True) as client, pytest.raises(ValueError, match=said):
        client.submit("Hi!")


@pytest.mark.parametrize("wanted", [{"hidden_states": -1}, {"hidden_states": ["1"]}, {"emitted": "a"}, {"emitted": []}])
def test_what_is_no_list_of_layers_or_names_is_refused_before_anything_is_sent(path: Path, wanted: Any) -> None:
    """A frame that cannot be read would end all requests of the client."""
    with answering(path, WELCOME, READY) as received, Client(path) as client:
        with pytest.raises(ValueError, match=r"(hidden_states|emitted)=.*: give a list of (int|str), one at least"):
            client.submit([1], **wanted)
        client.submit([2], hidden_states=[-1], emitted=["a"])
    (sent,) = received[1:]
    assert (sent.prompt, sent.wanted) == ([2], {"hidden_states": [-1], "emitted": ["a"]})


def test_text_without_a_tokenizer_is_refused(path: Path) -> None:
    with answering(path, WELCOME, READY) as received, Client(path) as client:
        with pytest.raises(ValueError, match=r"text\(\) needs a tokenizer; give Client"):
            client.stream([1, 2])
        client.close()
    assert [type(message).__name__ for message in received] == ["Hello", "Submit", "Cancel"]


@pytest.mark.parametrize(
    ("answers", "error", "said"),
    [
        ([], EngineDeadError, "has gone: its process has ended"),
        ([b"HTTP/1.1 400 Bad Request\r\n\r\n"], EngineDeadError, "broke: a frame that says it has"),
        ([Welcome(9, "later", 1), Problem("x")], EngineProcessError, "speaks another protocol than this client"),
        ([Preparing("x"), Problem("x")], EngineProcessError, "speaks another protocol than this client"),
        ([Problem("too many clients")], EngineProcessError, "refuses the connection: too many clients"),
        ([WELCOME, Preparing("loading"), Problem("out of memory")], EngineDeadError, "connection: out of memory"),
    ],
)
@KINDS
def test_whom_it_cannot_talk_to_is_said(
    path: Path, answers: list[Any], error: type[Exception], said: str, kind: Kind
) -> None:
    with answering(path, *answers), pytest.raises(error, match=said):
        asyncio.run(begun(kind, path))


def test_nobody_waits_longer_than_asked(path: Path) -> None:
    async def main() -> None:
        client = AsyncClient(path)
        client.close()  # nothing to close yet
        with pytest.raises(EngineProcessError, match="not ready"):
            client.submit([1])
        await client.connect(wait=False)
        with pytest.raises(TimeoutError, match=r"the engine process is not ready after 0\.01 s: loading"):
            await client.wait_until_ready(0.01)
        client.close()

    with answering(path, WELCOME, Preparing("loading")):
        asyncio.run(main())
    path.unlink()
    with answering(path, WELCOME, READY), Client(path) as client:
        with pytest.raises(TimeoutError, match=r"the engine process has not answered for 0\.01 s"):
            client.stats(0.01)
        client.close()


@KINDS
def test_a_question_that_is_refused_waits_no_longer(path: Path, kind: Kind) -> None:
    async def ask() -> None:
        client = await begun(kind, path)
        with pytest.raises(EngineProcessError, match="not ready \\(asleep\\)"):
            await answer if isinstance(answer := client.stats(60), Awaitable) else answer
        assert client._session._questions == {}
        client.close()

    refused = Refused(1, "unavailable", "the engine process is not ready (asleep)")
    with answering(path, WELCOME, READY, refused, last_after=AskStats):
        asyncio.run(ask())


class Waits(selectors.DefaultSelector):
    """Notes for how long an event loop is about to sleep, in its rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float | None] = []

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.seconds.append(timeout)
        return super().select(timeout)


@pytest.mark.parametrize("busy_poll", [0.0, 0.2])
def test_an_event_loop_sleeps_after_messages_unless_it_is_to_poll(path: Path, busy_poll: float) -> None:
    waits = Waits()

    async def main() -> None:
        client = AsyncClient(path, busy_poll=busy_poll)
        await client.connect()
        answer = client.submit([1, 2], SamplingParams(max_tokens=1))
        begin = len(waits.seconds)
        assert (await answer).outputs[0].token_ids == [5]
        assert any(seconds != 0 for seconds in waits.seconds[begin:]) == (not busy_poll)
        begin = len(waits.seconds)
        await asyncio.sleep(2 * busy_poll + 0.1)
        assert any(seconds != 0 for seconds in waits.seconds[begin:]), "it sleeps once nothing comes"
        client.close()

    step = StepUpdates([Update(1, 0, [5], None, Ended("length", 1))], [Summary(1, 0, 0.1, 0.2, 0.3)])
    loop = asyncio.SelectorEventLoop(waits)
    with answering(path, WELCOME, READY, step, last_after=Submit), closing(loop):
        loop.run_until_complete(main())


@pytest.mark.parametrize("busy_poll", [-0.1, float("nan"), float("inf"), True])
def test_an_impossible_time_to_poll_is_refused(path: Path, busy_poll: float) -> None:
    with pytest.raises(ValueError, match=rf"busy_poll={busy_poll}: give seconds, such as 0\.01"):
        AsyncClient(path, busy_poll=busy_poll)


def test_where_nobody_listens_is_said(path: Path) -> None:
    with pytest.raises(EngineDeadError, match="there is no such socket; start an engine process with"):
        Client(path)
    path.write_text("")
    with pytest.raises(EngineDeadError, match="its engine process has gone"):
        Client(path)


def test_a_client_that_is_closed_says_so(path: Path) -> None:
    with answering(path, WELCOME, READY):
        client = Client(path)
        handle = client.submit([1, 2])
        client.close()
        client.close()
        for call in (lambda: client.submit([1]), client.stats, handle.result, client.wait_until_ready):
            with pytest.raises(EngineDeadError, match="the client is closed; make another one"):
                call()


def damaged(draw: random.Random) -> bytes:
    """What an engine process sends of two requests, with some bytes changed, or cut."""
    sent: list[Any] = [
        StepUpdates([Update(1, 0, [5, 6]), Update(2, 1, [7], {"logprobs": encoded([{7: (-0.5, 1)}])})]),
        Piece(1, 0, "logprobs", encoded((1, [{3: (-1.0, 1)}]))),
        StepUpdates([Update(1, 0, [8], None, Ended("stop", 8))], [Summary(1, 0, 0.1, 0.2, 0.3)]),
        Piece(1, 0, "hidden_states", encoded((-1, "float32", [1, 2], bytes(8)))),
        Refused(2, "full", "too many"),
        Preparing("loading"),
        Leaving("told to end"),
    ]
    whole = bytearray().join(map(frame_of, sent))
    for _ in range(draw.randint(0, 5)):
        whole[draw.randrange(len(whole))] = draw.getrandbits(8)
    return bytes(whole[: draw.randint(0, len(whole))])


def test_what_an_engine_process_sends_amiss_ends_requests_and_hangs_nobody(path: Path, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(60):
        with answering(path, WELCOME, READY, damaged(draw), last_after=Submit), Client(path) as client:
            with suppress(EngineProcessError):
                for handle in [client.submit([1, 2], SamplingParams(n=number, logprobs=0)) for number in (1, 2)]:
                    with suppress(EngineProcessError):
                        handle.result(60)
            until(lambda: client._session.lost is not None)
        path.unlink()


# ---- an engine process that reads nothing

REFUSED = "it is a test"


class Deaf:
    """An engine process that reads only once it is told to; then it refuses what it was asked."""

    def __init__(self, path: Path) -> None:
        self.heard: list[Any] = []
        self.listens = threading.Event()
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        peer, _ = self._listening.accept()
        frames: Frames[Any] = Frames(FromClient)
        list(frames.feed(peer.recv(2**16)))
        peer.sendall(frame_of(Welcome(VERSION, "a test", 1)) + frame_of(Ready("a model", 2**30, [2], 10**9, 8)))
        self.listens.wait(PATIENCE)
        with suppress(OSError):  # its client may have left
            while data := peer.recv(2**16):
                for message in frames.feed(data):
                    self.heard.append(message)
                    if isinstance(message, Submit):
                        peer.sendall(frame_of(Refused(message.request, "full", REFUSED)))


async def said(handles: list[Any]) -> set[str]:
    return {str(error) for error in await asyncio.gather(*handles, return_exceptions=True)}


def prompts(count: int) -> list[list[int]]:
    return [[2**20 + number] * (10 + 5000 * (number % 3)) for number in range(count)]


def test_an_event_loop_goes_on_while_an_engine_process_reads_nothing(path: Path) -> None:
    deaf, asked = Deaf(path), prompts(60)  # more than the socket takes

    async def run() -> None:
        async with AsyncClient(path) as client:
            handles = [client.submit(prompt) for prompt in asked]
            handles[1].cancel()
            await asyncio.sleep(0.01)
            assert not any(handle.done for handle in handles)
            deaf.listens.set()
            assert await said(handles) == {REFUSED}
            while not isinstance(deaf.heard[-1], Cancel):  # the last message, heard after the last refusal was sent
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), PATIENCE))
    submitted = [message for message in deaf.heard if isinstance(message, Submit)]
    assert [message.prompt for message in submitted] == asked
    (cancelled,) = [message for message in deaf.heard if isinstance(message, Cancel)]
    assert cancelled.request == submitted[1].request


def test_a_process_that_reads_nothing_for_long_is_asked_no_more(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = Deaf(path)

    async def run() -> None:
        async with AsyncClient(path) as client:
            handles = [client.submit(prompt) for prompt in prompts(60)]
            monkeypatch.setattr(connection, "_PATIENCE", 0)
            with pytest.raises(
                EngineProcessError, match="the engine process has read nothing for 0 s: its process is stopped"
            ):
                client.submit([3])
            handles[0].cancel()  # what is small is taken
            deaf.listens.set()
            assert await said([handles[-1]]) == {REFUSED}
            while client._session.line._send_queue._frames:  # the thread that has sent the last one has not said so yet
                await asyncio.sleep(0.01)
            assert await said([client.submit([3])]) == {REFUSED}, "the next one is taken"

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


def test_threads_that_send_at_once_send_whole_frames(path: Path) -> None:
    deaf, asked = Deaf(path), prompts(60)

    async def run() -> None:
        async with AsyncClient(path) as client:
            sending = [asyncio.to_thread(client.submit, prompt) for prompt in asked]
            threading.Timer(0.05, deaf.listens.set).start()
            assert await said(await asyncio.gather(*sending)) == {REFUSED}

    asyncio.run(asyncio.wait_for(run(), PATIENCE))
    assert sorted(message.prompt for message in deaf.heard) == sorted(asked)


def test_a_client_that_is_closed_drops_what_waits(path: Path) -> None:
    deaf = Deaf(path)

    async def run() -> None:
        client = AsyncClient(path)
        await client.connect()
        handles = [client.submit(prompt) for prompt in prompts(60)]
        client.close()
        assert await said([handles[-1]]) == {"the client is closed; make another one"}

    asyncio.run(asyncio.wait_for(run(), PATIENCE))
    until(lambda: "compiled_llm client sends" not in {thread.name for thread in threading.enumerate()})
    deaf.listens.set()
