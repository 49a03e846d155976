"""Thousands of calls from eight threads: nothing hangs, nothing leaks, and afterwards all is as it was."""

from __future__ import annotations

import ctypes
import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

import compiled_llm
from compiled_llm import Engine, RequestError, SamplingParams
from compiled_llm.requests.handle import RequestHandle
from support.engine.thread_search import ERRORS, Planted, Streamer
from support.huggingface.vision import make, with_images
from support.in_threads import start
from support.parity import assert_account_is_empty, greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

THREADS = 8
FAMILY = "Qwen3VL"
"""Of the model that sees images."""
VOCABULARY = 128
SELDOM = 0.01
"""How often a call stops the whole model: sleep, new weights, a pause."""


class Soak:
    """The calls, by name; each is given a source of chance, and raises if its answer is not what it should be."""

    def __init__(
        self, model: PreTrainedModel, weights: Path, seeing: PreTrainedModel | None = None, max_num_seqs: int = 4
    ) -> None:
        self.model: Any = model
        self.seeing: Any = seeing
        self.weights = weights
        self.engines = [
            Engine(model, max_num_seqs=max_num_seqs),
            Engine(model, max_num_seqs=max_num_seqs, prefix_cache=False),
        ]
        self.counts: Counter[str] = Counter()
        self._alone = threading.Lock()
        # The same threads throughout: on CUDA, torch keeps several MiB of host memory for each that has ever generated.
        self._pool = ThreadPoolExecutor(THREADS)
        self._often: list[Callable[[random.Random], None]] = [
            *(self.greedy, self.sampled, self.streamed, self.forward, self.embedded, self.cached),
            *([self.with_image] if seeing is not None else []),
            *(self.answers, self.penalised, self.logprobs, self.abandoned, self.failing),
        ]
        self._seldom = [self.sleep, self.update, self.pause, self.forget]

    # ---- calls

    def greedy(self, chance: random.Random) -> None:
        self._generated(chance, do_sample=False)

    def sampled(self, chance: random.Random) -> None:
        self._generated(chance, do_sample=True, temperature=0.8, top_p=0.9)

    def streamed(self, chance: random.Random) -> None:
        self._generated(chance, rows=1, do_sample=False, streamer=Streamer(lambda: self.forward(chance), at=2))

    def _generated(self, chance: random.Random, rows: int = 0, **options: Any) -> None:
        rows, length, new = rows or chance.randint(1, 3), chance.randint(1, 40), chance.randint(1, 12)
        ids = torch.tensor([prompt(chance, length) for _ in range(rows)], device=self.model.device)
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **options)
        assert out.shape == (rows, length + new)

    def with_image(self, chance: random.Random) -> None:
        """Three rows, two of which have images."""
        given = {name: value.to(self.seeing.device) for name, value in with_images(FAMILY, chance.randrange(9)).items()}
        out = self.seeing.generate(**given, max_new_tokens=chance.randint(1, 12), do_sample=False)
        assert len(out) == len(given["input_ids"])

    def embedded(self, chance: random.Random) -> None:
        ids = torch.tensor([prompt(chance, chance.randint(1, 40))], device=self.model.device)
        embeddings, new = self.model.get_input_embeddings()(ids).detach(), chance.randint(1, 12)
        assert self.model.generate(inputs_embeds=embeddings, max_new_tokens=new, do_sample=False).shape == (1, new)

    def cached(self, chance: random.Random) -> None:
        """Two turns over a cache of the caller's, or over the one that the first turn makes."""
        text_config, ids = self.model.config.get_text_config(), [prompt(chance, chance.randint(1, 20))]
        make = chance.choice([DynamicCache, partial(StaticCache, max_cache_len=64), None])
        cache, text = make and make(config=text_config), torch.tensor(ids, device=self.model.device)
        for _ in range(2):
            out = self.model.generate(
                text,
                attention_mask=torch.ones_like(text),
                past_key_values=cache,
                max_new_tokens=5,
                do_sample=False,
                return_dict_in_generate=True,
            )
            text, cache = torch.nn.functional.pad(out.sequences, (0, 2), value=7), out.past_key_values

    def forward(self, chance: random.Random) -> None:
        ids = torch.tensor([prompt(chance, chance.randint(1, 30))], device=self.model.device)
        with torch.no_grad():
            logits = self.model(ids).logits
        assert logits.shape == (*ids.shape, VOCABULARY)
        assert logits.isfinite().all()

    def answers(self, chance: random.Random) -> None:
        self._answered(chance, SamplingParams(seed=chance.randrange(9), n=chance.randint(1, 2), **self._length(chance)))

    def penalised(self, chance: random.Random) -> None:
        self._answered(chance, SamplingParams(presence_penalty=1.0, repetition_penalty=1.2, **self._length(chance)))

    def logprobs(self, chance: random.Random) -> None:
        params = SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=1, **self._length(chance))
        for output in self._answered(chance, params):
            assert all(len(answer.logprobs or ()) == len(answer.token_ids) for answer in output.outputs)

    def abandoned(self, chance: random.Random) -> None:
        """Requests that are cancelled while they run, or that time out."""
        engine = chance.choice(self.engines)
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        handle = self._submitted(engine, prompt(chance, 20), params, timeout=chance.choice([None, 0.02]))
        if handle is None:
            return
        time.sleep(chance.random() * 0.02)
        handle.cancel()
        assert handle.result(300).outputs[0].finish_reason in ("cancelled", "timeout", "length")

    def failing(self, chance: random.Random) -> None:
        """A request that its own processor ends, in the midst of others."""
        params = SamplingParams(
            logits_processors=[Planted(chance.choice(ERRORS), chance.randint(1, 4))], max_tokens=8, ignore_eos=True
        )
        handle = self._submitted(chance.choice(self.engines), prompt(chance, 9), params)
        if handle is None:
            return
        try:
            reason = handle.result(300).outputs[0].finish_reason
        except (RequestError, RuntimeError):
            return
        assert reason in ("error", "cancelled"), reason  # an update or a sleep of other threads may come before

    # ---- what stops the whole model, one at a time

    def sleep(self, chance: random.Random) -> None:
        engine = chance.choice(self.engines)
        try:
            engine.sleep(requests=chance.choice(["park", "end"]))
        except RuntimeError as error:  # another thread still has the cache of a forward
            if "caches hold" not in str(error):
                raise
            return
        time.sleep(0.01)
        engine.wake()

    def update(self, chance: random.Random) -> None:
        chance.choice(self.engines).update_weights(self.weights, requests=chance.choice(["wait", "keep", "end"]))

    def pause(self, chance: random.Random) -> None:
        with chance.choice(self.engines).paused():
            time.sleep(0.01)

    def forget(self, chance: random.Random) -> None:
        chance.choice(self.engines).reset_prefix_cache()

    # ---- all of them

    def sleep_through_calls(self, seed: int) -> None:
        """Have all threads at once call the model while it is asleep, as HuggingFace runs it.

        Each thread then has what torch keeps for it, and the kernels that only HuggingFace's own forward launches are
        loaded.
        """
        make_handles(3 * THREADS, self.model.device)
        self.engines[0].sleep()
        at_once = threading.Barrier(THREADS)

        def call(number: int) -> None:
            at_once.wait(60)
            for method in (self.greedy, self.sampled, self.streamed, self.forward):
                for attempt in range(4):
                    method(random.Random(seed + THREADS * attempt + number))

        list(self._pool.map(call, range(THREADS)))
        self.engines[0].wake()

    def run(self, calls: int, seed: int) -> None:
        """Make so many calls from `THREADS` threads; the first that fails is raised once all have ended."""
        futures = [self._pool.submit(self._call, seed * 1_000_003 + number) for number in range(calls)]
        wait(futures)
        for future in futures:
            future.result()

    def _call(self, seed: int) -> None:
        chance = random.Random(seed)
        if chance.random() < SELDOM:
            call = chance.choice(self._seldom)
            with self._alone:
                call(chance)
        else:
            call = chance.choice(self._often)
            call(chance)
        self.counts[call.__name__] += 1

    def close(self) -> None:
        self._pool.shutdown()
        for engine in self.engines:
            engine.close()

    # ---- help

    def _length(self, chance: random.Random) -> dict[str, Any]:
        return {"max_tokens": chance.randint(1, 12), "ignore_eos": True}

    def _answered(self, chance: random.Random, params: SamplingParams) -> list[Any]:
        prompts = [prompt(chance, chance.randint(1, 40)) for _ in range(chance.randint(1, 2))]
        outputs: list[Any] = []
        with unless_asleep():
            outputs = chance.choice(self.engines).generate(prompts, params)
        for output in outputs:
            for answer in output.outputs:
                assert answer.finish_reason in ("length", "cancelled"), (answer.finish_reason, answer.error)
                assert answer.finish_reason == "cancelled" or len(answer.token_ids) == params.max_tokens
        return outputs

    def _submitted(
        self, engine: Engine, ids: list[int], params: SamplingParams, **waiting: Any
    ) -> RequestHandle | None:
        with unless_asleep():
            return engine.submit(ids, params, **waiting)
        return None


def make_handles(threads: int, device: torch.device) -> None:
    """Have torch make handles of cuBLAS for so many threads at once, more than any later call has.

    A handle takes some 90 MiB of host memory. Torch makes one for a thread's first product if all that it has are in
    use, and keeps it for the next thread: how many there are follows from how many threads happened to meet.
    """
    at_once = threading.Barrier(threads)

    def multiply(_: int) -> None:
        matrix = torch.ones(16, 16, device=device)
        (matrix @ matrix).sum().item()
        at_once.wait(60)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(multiply, range(threads)))


@contextmanager
def unless_asleep() -> Iterator[None]:
    """An engine takes no requests while its model sleeps, and says so."""
    try:
        yield
    except RuntimeError as error:
        if "asleep" not in str(error):
            raise


def prompt(chance: random.Random, length: int) -> list[int]:
    """Token ids that begin like those of other prompts, as texts of one system prompt do."""
    shared = list(range(3, 3 + min(length, chance.choice([0, 8, 16]))))
    return shared + [chance.randrange(3, VOCABULARY) for _ in range(length - len(shared))]


FEW, MANY = 60, 6000
PATIENCE = 500.0
GROWTH = 32 * 2**20
"""Bytes that host memory may grow by in the last two thirds of many calls: what the allocator keeps in fragments."""


class Memory(NamedTuple):
    """Bytes that are taken while the model is asleep; the last three, parts of the host's, tell where it grows."""

    host: int
    device: int
    malloced: int
    private: int  # pages of no file, malloc's among them, as the driver's
    pinned: int


class _MallInfo(ctypes.Structure):
    """What ``mallinfo2`` returns, as glibc's `malloc.h` has it."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "used", "free", "keepcost")
    )


def memory(engine: Engine) -> Memory:
    """Return what is taken while the model is asleep.

    Awake, it has CUDA graphs, each with memory of the host's, and how many is up to the calls that happened to come.
    """
    gc.collect()
    engine.sleep(graphs=True)
    libc, on_gpu = ctypes.CDLL(None), torch.cuda.is_available()
    libc.malloc_trim(0)
    libc.mallinfo2.restype = _MallInfo
    info = libc.mallinfo2()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    host, private = (int(status[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon"))
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) if on_gpu else 0
    if on_gpu:
        torch._C._cuda_clearCublasWorkspaces()  # one for each handle and stream that ever met
    device = torch.cuda.memory_allocated() if on_gpu else 0
    engine.wake()
    return Memory(host, device, info.used + info.hblkhd, private, pinned)


@pytest.fixture
def without_cudnn_attention() -> Iterator[None]:
    """While a model sleeps, HuggingFace's own attention runs. Of cuDNN's, torch keeps a plan for each shape for good.

    Each takes some hundred KiB of host memory, for each thread anew; shapes are drawn here, so there is no end of them.
    """
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    yield
    torch.backends.cuda.enable_cudnn_sdp(enabled)


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.usefixtures("without_cudnn_attention")
@pytest.mark.parametrize(
    ("calls", "mode"),
    [
        (FEW, "eager"),
        *(
            pytest.param(MANY, mode, marks=[pytest.mark.whole, pytest.mark.timeout(1800)])
            for mode in ("eager", "compile")
        ),
        pytest.param(MANY, "cuda-graphs", marks=[pytest.mark.gpu, pytest.mark.timeout(600)], id="6000 on a GPU"),
    ],
)
def test_memory_stays_flat_and_every_page_comes_back(calls: int, mode: Any, tmp_path: Path, seed: int) -> None:
    on_gpu = mode == "cuda-graphs"
    plain = tiny_qwen3(eos_token_id=None, head_dim=64 if on_gpu else 16)
    plain.save_pretrained(tmp_path)
    both = plain, make(FAMILY, head_dim=64 if on_gpu else 16)
    if on_gpu:
        both = both[0].to("cuda", torch.bfloat16), both[1].to("cuda", torch.bfloat16)
    options = {"kv_memory": "4096 tokens", "page_size": 16, "max_batch_size": 8, "progress": False}
    model, seeing = (compiled_llm.wrap(each, mode=mode, **options) for each in both)
    prompt = {name: tensor.to(model.device) for name, tensor in mixed_prompts([27], 128, seed).items()}
    expected, threads = greedy(model, prompt, 12), threading.active_count()
    soak = Soak(model, tmp_path, seeing)
    soak.sleep_through_calls(seed)
    start(lambda: soak.run(calls // 3, seed)).result(PATIENCE)
    before, captures = memory(soak.engines[0]), model.compiled.cuda_graphs.captures
    start(lambda: soak.run(calls - calls // 3, seed + 1)).result(PATIENCE)
    after = memory(soak.engines[0])
    grown = Memory(*(now - then for now, then in zip(after, before, strict=True)))
    captures = model.compiled.cuda_graphs.captures - captures  # the driver keeps host memory for each, perhaps for good
    print(f"seed {seed}: {dict(soak.counts)}; grown by {grown}, {captures} CUDA graphs captured meanwhile")
    assert greedy(model, prompt, 12).equal(expected)
    soak.engines[0].reset_prefix_cache()
    assert_account_is_empty(model)
    assert_account_is_empty(seeing)
    soak.close()
    assert threading.active_count() <= threads + 1  # of those that wait for the next use, one is kept
    if calls == MANY:
        assert grown.host < GROWTH
    assert grown.device <= 2**20
