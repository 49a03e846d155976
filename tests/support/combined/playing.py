"""A case is played: requests come beside others, in turns, and each answer is judged."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch.nn import Parameter

import compiled_llm
from compiled_llm.engine.engine import Engine
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.outputs import Completion, RequestOutput
from support.combined.asked import Asked
from support.combined.feature import Feature
from support.combined.features import COMPILED, FEW, bias
from support.combined.judge import Judge
from support.combined.subjects import FAMILY, LARGER, SPECIAL, TINY, Sizes, Three, three_of
from support.engine.text_tokenizers import byte_level
from support.execution.page_checks import check_pages
from support.images import SampleImage, prompt_of
from support.parity import assert_account_is_empty

PATIENCE = 600.0
ROWS = 4
TURNS = 2
WITHIN = 1e-3
WITHIN_OF_FP8 = 0.05
"""How far log-probabilities are from others for sums in another order."""


class RefusedError(Exception):
    """A combination is refused, by a sentence that names one of its features."""


@dataclass
class Subject:
    """A wrapped model that several cases are played on, its twins, and the same model wrapped without features."""

    name: str
    three: Three
    base: Any
    judge: Judge
    sizes: Sizes
    gpu: bool

    @classmethod
    def of(cls, name: str, features: Sequence[Feature], seed: int, gpu: bool) -> Subject:
        """Make one of these features; RefusedError if they are refused."""
        weights, sizes, draw = "".join(feature.weights for feature in features), LARGER if gpu else TINY, Random(seed)
        three = three_of(name, weights, seed, gpu)
        base = None if gpu else three_of(name, weights, seed, gpu).own
        kept = {key: value for own in features for key, value in own.wrap.items() if key in own.answers}
        usual = {
            "page_size": sizes.page_size,
            "max_batch_size": ROWS,
            "progress": False,
            "kv_memory": f"{sizes.pages[1]} tokens",
            "prefill_tokens": sizes.chunks[1],
        }
        compiled = "cuda-graphs" if gpu else "compile"
        standing = {
            ("kv_memory", FEW): f"{sizes.pages[0]} tokens",
            ("prefill_tokens", FEW): sizes.chunks[0],
            ("mode", COMPILED): compiled,
        }
        own = {key: standing.get((key, value), value) for each in features for key, value in each.wrap.items()}
        mode = compiled if gpu and draw.random() < 0.8 else "eager"
        with refusals(features):
            compiled_llm.wrap(three.own, **{**usual, "mode": mode, **own})
            check_pages(three.own)
        if base is not None:
            compiled_llm.wrap(base, **usual, mode="eager", **kept)
        return cls(name, three, base, Judge(three.exact, three.bare, "kv_dtype" in own), sizes, gpu)

    @property
    def copies(self) -> list[Any]:
        return [model for model in (*self.three, self.base) if model is not None]


@contextmanager
def refusals(features: Sequence[Feature]) -> Iterator[None]:
    """Take an error whose words begin with an option of these for a refusal of them together."""
    try:
        yield
    except ValueError as error:
        said = str(error).removeprefix("wrap: ")
        if any(own.option and said.startswith(own.option) for own in features):
            raise RefusedError(said) from error
        raise


class Playing:
    """One engine with some features, its requests, and what became of them.

    Attributes:
        faults: what is wrong, in words.
        answers: how many were judged; ``refused``, how many requests were refused.
        happened: what its steps have done, in words.
    """

    def __init__(self, subject: Subject, features: Sequence[Feature], seed: int) -> None:
        """Make the engine; RefusedError if the features are refused."""
        self._subject, self._features, self._draw = subject, features, Random(seed)
        self._options = {key: value for own in features for key, value in own.engine.items()}
        self._texts: list[list[int]] = []
        self.faults: list[str] = []
        self.answers = self.refused = 0
        self.happened: Sequence[str] = ()
        with refusals(features):
            self.engine = self._engine(subject.three.own, max_num_seqs=ROWS, **self._options)

    def _engine(self, model: Any, **options: Any) -> Engine:
        return Engine(model, tokenizer=byte_level(), **options)

    def play(self) -> None:
        """Answer requests in turns, and judge them; afterwards the model is as before."""
        before = [{name: own.detach().clone() for name, own in _norms(model)} for model in self._subject.copies]
        try:
            with self.engine:
                if self._subject.gpu:
                    self.engine.warmup()
                for _ in range(TURNS):
                    self._turn()
                    for feature in self._features:
                        if feature.between is not None:
                            feature.between(self)
                self.happened = happened(self.engine)
            assert_account_is_empty(self._subject.three.own)
        finally:
            for model, norms in zip(self._subject.copies, before, strict=True):
                for name, own in _norms(model):
                    own.data.copy_(norms[name])

    # ---- what features do

    def sleep(self) -> None:
        """Let the engine sleep and wake, with requests that wait meanwhile."""
        self.engine.sleep(weights=self._draw.random() < 0.5)
        self.engine.wake()

    def write_weights(self) -> None:
        """Write into the first layer's norms, so that all keys and values become others."""
        seed = self._draw.randrange(2**31)
        with self.engine.paused():
            for model in self._subject.copies:
                for number, (_, own) in enumerate(_norms(model)):
                    factors = torch.rand(own.shape, generator=torch.Generator().manual_seed(seed + number))
                    own.data.mul_((0.7 + 0.6 * factors).to(own))

    # ---- a turn

    def _turn(self) -> None:
        both = [*self._prepared(self._requests())]
        if not both:
            return
        (_, first), *waiting = both
        leaving = [(own.cancelled, handle) for own, handle in waiting if own.cancelled is not None]

        def go_on() -> None:
            """Send and cancel what is due; called in the engine's thread, so that it comes between the same steps."""
            count = len(first.requests[0].tokens)
            while waiting and (waiting[0][0].begins <= count or first.done):
                self.engine.begin(waiting.pop(0)[1])
            while leaving and leaving[0][0] <= count:
                leaving.pop(0)[1].cancel()

        first.when_changed(go_on)
        self.engine.begin(first)
        self._act_amid(first)
        answered = [(own, handle.result(PATIENCE)) for own, handle in both]
        self._judge(answered)
        self._texts = [own.ids + list(output.token_ids) for own, output in answered if own.inputs is None]

    def _prepared(self, requests: Sequence[Asked]) -> Iterator[tuple[Asked, RequestHandle]]:
        """Yield requests with their handles, without those that are refused."""
        for asked in requests:
            try:
                with refusals(self._features):
                    handle = asked.prepared(self.engine)
            except RefusedError:
                self.refused += 1
            else:
                yield asked, handle

    def _act_amid(self, first: RequestHandle) -> None:
        for feature in self._features:
            if feature.amid is not None:
                count = self._draw.randrange(1, self._subject.sizes.first // 2)
                while not first.done and len(first.requests[0].tokens) < count:
                    time.sleep(0.0005)
                feature.amid(self)

    def _requests(self) -> list[Asked]:
        draw, sizes = self._draw, self._subject.sizes
        found = [self._prompt(sizes.first)]
        for _ in range(draw.randint(3, 6)):
            own = self._prompt(draw.randint(*sizes.others))
            own.begins = draw.randint(1, sizes.first)
            if draw.random() < 0.15:
                own.cancelled = own.begins + draw.randint(0, 6)
            found.append(own)
        for own in found:
            if self._subject.name == "images":
                bias(own, dict.fromkeys(SPECIAL, -100.0))
            for feature in self._features:
                if feature.asks is not None and draw.random() < 0.7:
                    feature.asks(own, draw)
        return [found[0], *sorted(found[1:], key=lambda own: own.begins)]

    def _prompt(self, tokens: int) -> Asked:
        """Return a request for a text that repeats itself or goes on from an earlier one, or an image."""
        draw, length = self._draw, self._draw.randint(*self._subject.sizes.prompts)
        if self._subject.name == "images" and draw.random() < 0.7:
            words = draw.choices(range(3, 100), k=length)
            at = draw.randint(1, 6)
            inputs = prompt_of(
                FAMILY, *words[:at], SampleImage(draw.randrange(3), wide=draw.random() < 0.5), *words[at:]
            )
            return Asked(inputs["input_ids"][0].tolist(), tokens, inputs=inputs)
        if self._texts and draw.random() < 0.5:
            text = draw.choice(self._texts)[: self._subject.sizes.prompts[1]]
            return Asked([*text[: draw.randint(len(text) // 2, len(text))], *draw.choices(range(3, 100), k=3)], tokens)
        if draw.random() < 0.5:
            return Asked((draw.choices(range(3, 100), k=draw.randint(2, 5)) * length)[:length], tokens)
        return Asked(draw.choices(range(3, 100), k=length), tokens)

    def _judge(self, answered: Sequence[tuple[Asked, RequestOutput]]) -> None:
        processed = "logprobs_mode" in self._options
        found = [(own, fault) for own, out in answered for fault in self._subject.judge.faults(own, out, processed)]
        if self._subject.base is not None and not found:
            found = self._differences([each for each in answered if each[1].finish_reason != "cancelled"])
        self.answers += len(answered)
        self.faults += [f"{fault}\n{own}" for own, fault in found]

    def _differences(self, answered: Sequence[tuple[Asked, RequestOutput]]) -> list[tuple[Asked, str]]:
        """Return how answers differ from those of an engine without features."""
        kept = {key: self._options[key] for own in self._features for key in own.answers if key in self._options}
        with self._engine(self._subject.base, max_num_seqs=ROWS, prefix_cache=False, mixed=False, **kept) as engine:
            handles = [own.prepared(engine) for own, _ in answered]
            engine.begin(*handles)
            both = [(each, handle.result(PATIENCE)) for each, handle in zip(answered, handles, strict=True)]
        return [
            (own, difference)
            for (own, output), expected in both
            for ours, theirs in zip(output.outputs, expected.outputs, strict=True)
            for difference in _differences(ours, theirs, self._subject.judge.rounds)
        ]


def _differences(ours: Completion, theirs: Completion, rounds: bool) -> Iterator[str]:
    # A sum in another order may be stored as the next number of fp8; such tokens are judged by float32 alone.
    if list(ours.token_ids) != list(theirs.token_ids):
        if not rounds:
            yield f"{list(ours.token_ids)} without features are {list(theirs.token_ids)}"
    elif (off := _apart(ours, theirs)) > (WITHIN_OF_FP8 if rounds else WITHIN):
        yield f"log-probabilities are off by {off} from those without features"


def _apart(ours: Completion, theirs: Completion) -> float:
    """Return how far log-probabilities are from others; infinite if they are of other tokens."""
    if len(ours.logprobs or ()) != len(theirs.logprobs or ()):
        return math.inf
    off = 0.0
    for own, other in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
        if own.keys() != other.keys():
            return math.inf
        off = max(
            off, *(abs(own[token].logprob - other[token].logprob) for token in own if math.isfinite(own[token].logprob))
        )
    return off


def happened(engine: Engine) -> list[str]:
    """Return what has happened in an engine, of that which features are about."""
    stats, model = engine.stats(), engine.model.compiled.stats()
    times = {
        "mixed steps": stats.mixed_steps,
        "preemptions": stats.preemptions,
        "prefix hits": stats.cached_tokens,
        "drafts right": stats.drafts and stats.drafts.accepted_tokens,
        "drafts wrong": stats.drafts and stats.drafts.draft_tokens - stats.drafts.accepted_tokens,
        "cascade steps": model.cascade_steps,
    }
    return [name for name, count in times.items() if count]


def _norms(model: Any) -> list[tuple[str, Parameter]]:
    """Return the norms of a model's first layer, which all of its keys and values depend on."""
    return [
        (name, own)
        for name, own in model.named_parameters()
        if "layers.0." in name and "norm" in name and own.dim() == 1 and "visual" not in name
    ]
