"""Clients of every kind read text, stop, leave and are late, all at once, while the engine is paused and closed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from compiled_llm.engine.engine import Engine
from compiled_llm.requests.outputs import RequestOutput
from compiled_llm.requests.sampling_params import SamplingParams
from support.engine.text_tokenizers import byte_level, decode, up_to_stop
from support.engine.tiny_engines import PATIENCE, tiny, wrapped
from support.in_threads import start
from support.parity import assert_account_is_empty

PROMPT = list(range(3, 23))


class Client:
    """One that asks six times, for answers that it knows."""

    def __init__(self, engine: Engine, known: list[list[int]], draw: random.Random) -> None:
        self.engine, self.known, self.draw = engine, known, draw
        self.kinds: list[Callable[[], None]] = [self.wait, self.read, self.read_tokens, self.leave, self.read_together]

    def ask(self) -> None:
        for _ in range(6):
            self.seed = self.draw.randrange(len(self.known))
            text = decode(self.known[self.seed])
            start = self.draw.randrange(len(text) - 4)
            stop = text[start : start + self.draw.randint(1, 3)]
            self.stop = "\0" if "\ufffd" in stop else stop
            self.params = SamplingParams(seed=self.seed, max_tokens=60, ignore_eos=True, stop=self.stop)
            try:
                self.draw.choice(self.kinds)()
            except RuntimeError as error:
                if "closed" not in str(error):
                    raise

    def check(self, output: RequestOutput, text: str | None = None) -> None:
        assert text is None or text == output.text
        if output.finish_reason in ("stop", "length"):
            assert (output.token_ids, output.text) == up_to_stop(self.known[self.seed], self.stop)

    def wait(self) -> None:
        self.check(self.engine.generate(PROMPT, self.params)[0])

    def read(self) -> None:
        handle = self.engine.submit(PROMPT, self.params, timeout=self.draw.choice([None, 0.01]))
        text = "".join(handle.text())
        self.check(handle.result(PATIENCE), text)

    def read_tokens(self) -> None:
        handle = self.engine.submit(PROMPT, self.params)
        tokens = list(handle)
        output = handle.result(PATIENCE)
        assert tokens == output.token_ids
        self.check(output)

    def leave(self) -> None:
        handle = self.engine.submit(PROMPT, self.params)
        pieces = iter(handle.text())
        first = next(pieces, "")
        handle.cancel()
        self.check(handle.result(PATIENCE), first + "".join(pieces))

    def read_together(self) -> None:
        async def read() -> None:
            handle = self.engine.submit(PROMPT, self.params)
            text = "".join([piece async for piece in handle.text()])
            self.check(await handle, text)

        async def read_all() -> None:
            await asyncio.gather(*(read() for _ in range(3)))

        asyncio.run(read_all())


@pytest.mark.usefixtures("one_thread", "reading")
@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.whole)])
def test_clients_of_every_kind_get_their_text(seed: int, rounds: int) -> None:
    model, draw = wrapped(2500, tiny(eos_token_id=1, vocab_size=380)), random.Random(seed)
    with Engine(model, tokenizer=byte_level()) as engine:
        params = [SamplingParams(seed=number, max_tokens=60, ignore_eos=True) for number in range(20)]
        known = [output.token_ids for output in engine.generate([PROMPT] * 20, params)]
    for _ in range(rounds):
        engine = Engine(model, tokenizer=byte_level(), max_rows=draw.choice([2, 8, 64]))
        asking = [start(Client(engine, known, random.Random(draw.random())).ask) for _ in range(6)]
        with engine.paused(weights_stay=True):
            pass
        if draw.random() < 0.3:
            engine.close()
        for client in asking:
            client.result(PATIENCE)
        engine.close()
        assert_account_is_empty(model)
