"""The model ``compiled_llm`` of lm-eval: HuggingFace's, wrapped after loading, whose requests an engine answers."""

# An engine computes the beginning once that choices of one question, and questions with the same examples, share, and
# logits exist for the tokens alone that are scored: ``HFLM`` makes ``[B, T, V]`` of them.

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, TypeVar

from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm
from transformers import PreTrainedModel

from compiled_llm.config import WrapConfig
from compiled_llm.engine.engine import Engine
from compiled_llm.huggingface.wrap import wrap
from compiled_llm.model.sizes import max_positions_of
from compiled_llm.requests.default_sampling import default_sampling
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.outputs import RequestOutput
from compiled_llm.requests.sampling_params import SAMPLED_BY, SamplingParams

logger = logging.getLogger("compiled_llm")

OF_ENGINE = frozenset(inspect.signature(Engine.__init__).parameters) - {"self", "model", "tokenizer", "processor"}
"""The arguments of ``Engine`` that it takes; the tokenizer is lm-eval's."""

OF_WRAP = frozenset(field.name for field in fields(WrapConfig)) - {"backend", "max_batch_size"}
"""Those of ``wrap`` but for names that lm-eval uses otherwise: who needs these gives it a model that is wrapped."""

_Asked = tuple[
    Any, list[int], list[int]
]  # what lm-eval keeps an answer by, the context's tokens, and those that are scored
T = TypeVar("T")


class CompiledLM(HFLM):
    """``HFLM`` with the same arguments, and those of ``wrap`` and ``Engine`` by their names.

    A model that is already wrapped is taken as it is. What the engine cannot do is done as ``HFLM`` does it, by the
    wrapped model: settings of ``generate`` that ``SamplingParams`` lacks, and scores of a text that is one token longer
    than the model has positions.

    Raises:
        ValueError: an argument of ``wrap`` for a model that is already wrapped, or what ``wrap`` and ``Engine`` refuse.
    """

    def __init__(self, pretrained: str | PreTrainedModel, **given: Any) -> None:
        """Load, wrap, and make the engine; nothing runs yet."""
        of_wrap = {name: given.pop(name) for name in OF_WRAP & set(given)}
        of_engine = {name: given.pop(name) for name in OF_ENGINE & set(given)}
        super().__init__(pretrained, **given)
        base = getattr(self._model, "get_base_model", lambda: self._model)()  # beneath an adapter of PEFT's
        if getattr(base, "compiled", None) is None:
            wrap(base, **of_wrap)
        elif of_wrap:
            raise ValueError(
                f"{', '.join(sorted(of_wrap))}: the model is already wrapped; give them to compiled_llm.wrap instead"
            )
        self.engine = Engine(base, tokenizer=self.tokenizer, **of_engine)
        self._positions = of_engine.get("max_model_len") or max_positions_of(base)

    def _detect_batch_size(self, requests: Sequence[Any] | None = None, pos: int = 0) -> int:
        """Return how many requests are given at once, for ``batch_size="auto"``: the engine has its own batches."""
        return _AT_ONCE

    # ---- scores

    def _loglikelihood_tokens(
        self, requests: Sequence[_Asked], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        texts = [_ScoredText.of(context, scored, self.max_length) for _, context, scored in requests]
        too_long = [number for number, text in enumerate(texts) if len(text.tokens) > self._positions]
        answers: dict[int, tuple[float, bool]] = {}
        if too_long:  # its last token follows from the logits of the model's last position
            theirs = [requests[number] for number in too_long]
            found = super()._loglikelihood_tokens(theirs, disable_tqdm=disable_tqdm, override_bs=1)
            answers.update(zip(too_long, found, strict=True))
        rest = [number for number in range(len(texts)) if number not in answers]
        outputs = self._answered([(texts[number].tokens, texts[number].params) for number in rest])
        for number, output in zip(rest, self._shown(outputs, len(rest), "loglikelihood", disable_tqdm), strict=True):
            answers[number] = texts[number].score(output)
            if (key := requests[number][0]) is not None:
                self.cache_hook.add_partial("loglikelihood", key, answers[number])
        return [answers[number] for number in range(len(texts))]

    # ---- texts

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the answer to each request, as ``HFLM`` does."""
        asked = [self._question(*request.args) for request in requests]
        theirs = [number for number, question in enumerate(asked) if question is None]
        ours = [(number, question) for number, question in enumerate(asked) if question is not None]
        answers: dict[int, str] = {}
        if theirs:
            found = super().generate_until([requests[number] for number in theirs], disable_tqdm=disable_tqdm)
            answers.update(zip(theirs, found, strict=True))
        outputs = self._answered([(question.tokens, question.params) for _, question in ours])
        shown = self._shown(outputs, len(ours), "generate_until", disable_tqdm)
        for (number, question), output in zip(ours, shown, strict=True):
            answers[number] = self._text(output.outputs[0].token_ids, question.until)
            self.cache_hook.add_partial("generate_until", requests[number].args, answers[number])
        return [answers[number] for number in range(len(asked))]

    def _question(self, context: str, settings: Mapping[str, Any]) -> _AskedText | None:
        """Return what the engine is asked; None if it lacks a setting of ``generate``'s."""
        given: dict[str, Any] = dict(normalize_gen_kwargs(dict(settings), self.max_gen_toks))
        until = handle_stop_sequences([*given.pop("until")], eos=self.tok_decode([self.eot_token_id], False))
        length, draws = given.pop("max_gen_toks"), given.pop("do_sample")
        if self.max_length <= length:
            raise ValueError(
                f"max_gen_toks={length}: leaves no room for a prompt in the {self.max_length} tokens of max_length; "
                "ask for fewer"
            )
        numbers = {
            name: value for name, value in given.items() if value is not None and (draws or name not in _DRAWING)
        }
        if lacking := set(numbers) - set(SAMPLED_BY):
            _say_once(tuple(sorted(lacking)))
            return None
        config = copy.copy(self.model.generation_config)
        config.do_sample = draws
        params = {**default_sampling(config), **numbers, "max_tokens": length, "stop": [*filter(None, until)] or None}
        ids, _ = self.tok_batch_encode(
            [context], left_truncate_len=self.max_length - length, truncation=self.truncation
        )
        return _AskedText(ids[0].tolist(), SamplingParams(**params), until)

    def _text(self, tokens: Sequence[int], until: list[str]) -> str:
        """Return what counts of an answer: what comes after thinking, up to what ends it."""
        end = self.think_end_token
        kept = [*tokens]
        if isinstance(end, int) and end in kept:
            kept = kept[len(kept) - kept[::-1].index(end) :]
        text = self.tok_decode(kept)
        if isinstance(end, int):
            text = text.lstrip()
        return str(postprocess_generated_text(text, until, end if isinstance(end, str) else None))

    # ---- both

    def _answered(self, asked: Sequence[tuple[list[int], SamplingParams]]) -> Iterator[RequestOutput]:
        """Yield the outputs in the order in which they were asked for; all of them run at once, as far as they fit."""
        # In the order of their tokens: what several begin with is computed by the first, and still there for the next.
        order = sorted(range(len(asked)), key=lambda number: asked[number][0])
        handles: dict[int, RequestHandle] = {}
        try:
            for start in range(0, len(order), _BEGUN):  # those that begin at once also run at once
                some = {number: self.engine.prepare(*asked[number]) for number in order[start : start + _BEGUN]}
                handles.update(some)
                self.engine.begin(*some.values())
            for number in range(len(asked)):
                yield handles.pop(number).result()
        finally:
            for handle in handles.values():  # of Ctrl-C, or of a request that has failed
                handle.cancel()

    def _shown(self, outputs: Iterable[T], total: int, what: str, hidden: bool) -> Iterator[T]:
        yield from tqdm(outputs, total=total, disable=hidden or self.rank != 0, desc=f"Running {what} requests")


_BEGUN = 256
"""As many requests as an engine runs, if nothing is said, begin together."""
_AT_ONCE = 64  # as many as lm-eval itself tries at most
_DRAWING = frozenset(name for name, field in SAMPLED_BY.items() if field.number.draws)


class _ScoredText(NamedTuple):
    """A text whose end is scored."""

    tokens: list[int]
    first: int  # the first token that is scored

    @classmethod
    def of(cls, context: list[int], scored: list[int], most: int) -> _ScoredText:
        """Drop tokens of the context from the left, as lm-eval does: ``most`` can be seen by the last one."""
        tokens = (context + scored)[-(most + 1) :]
        return cls(tokens, len(tokens) - len(scored))

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=self.first)

    def score(self, output: RequestOutput) -> tuple[float, bool]:
        """Return the log-probability of the end, and whether each of its tokens is the most likely one."""
        assert output.prompt_logprobs is not None
        found = [
            entries[token]
            for token, entries in zip(self.tokens[self.first :], output.prompt_logprobs[self.first :], strict=True)
            if entries is not None
        ]
        return sum(each.logprob for each in found), all(each.rank == 1 for each in found)


class _AskedText(NamedTuple):
    """A prompt that is answered."""

    tokens: list[int]
    params: SamplingParams
    until: list[str]


_said: set[tuple[str, ...]] = set()


def _say_once(lacking: tuple[str, ...]) -> None:
    if lacking not in _said:
        _said.add(lacking)
        logger.warning(
            "compiled_llm: an engine has no %s, so requests with it are answered by generate(), one batch after the "
            "other",
            " and no ".join(lacking),
        )
