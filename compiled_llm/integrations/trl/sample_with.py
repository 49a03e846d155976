"""Rollouts of TRL's trainers by an engine of the model that is trained: one copy of the weights, nothing to send."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, overload

from compiled_llm.compat.training.trl import check_trainer, sample_by
from compiled_llm.engine.engine import Engine
from compiled_llm.requests.outputs import Logprob
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.requests.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from compiled_llm.compat.training.trl import Trainer


T = TypeVar("T")


def sample_with(engine: Engine, trainer: Trainer, *, sleep: bool = False) -> None:
    """Let a trainer of TRL's sample its rollouts by an engine of the model that it trains.

    Sampling settings are the trainer's arguments, ``generation_kwargs`` and ``vllm_structured_outputs_regex`` among
    them. Rollouts have their log-probabilities, by which TRL corrects; tools and environments go on as they are, and a
    later turn finds the pages of the earlier ones. Prompts may have images if the engine has the trainer's processor.
    There is one copy of the weights: a training step is seen at once.

    Args:
        engine: of the model that is given to the trainer, or that lies beneath its adapter.
        trainer: TRL's ``GRPOTrainer``, ``RLOOTrainer`` or ``DistillationTrainer``, in one process; with
            ``use_vllm=False``.
        sleep: give the pages to the training step, and take them back for the next rollout.

    Raises:
        TypeError: the engine is none of this process, as a client is.
        ValueError: the trainer samples otherwise, trains another model or in several processes, or corrects by
            log-probabilities of what tokens are drawn from, which this engine does not give.
    """
    if not isinstance(engine, Engine):
        raise TypeError(
            f"engine={engine!r}: must be an Engine of the model that is trained; for one in another process, give the "
            "trainer a rollout_func"
        )
    check_trainer(trainer)
    trained = trainer.accelerator.unwrap_model(trainer.model)
    if getattr(trained, "get_base_model", lambda: trained)() is not engine.model:
        raise ValueError(
            f"engine: answers by another {type(engine.model).__name__} than the one that is trained; give the trainer "
            "the wrapped model, and the engine the same one"
        )
    sampler = Sampler(engine, trainer, sleep)
    sampler.check_log_probabilities()
    sample_by(trainer, sampler, sampler.end_rollout if sleep else None)


class Sampler:
    """What TRL calls in place of its connection to vLLM."""

    def __init__(self, engine: Engine, trainer: Trainer, sleep: bool) -> None:
        self._engine, self._trainer, self._sleep = engine, trainer, sleep

    @property
    def llm(self) -> SimpleNamespace:
        """What TRL reads of vLLM: the most tokens of a request, beyond which it takes back what a tool has said."""
        config = SimpleNamespace(max_model_len=self._engine.describe().max_tokens)
        return SimpleNamespace(llm_engine=SimpleNamespace(model_config=config))

    def sync_weights(self) -> None:
        """Forget what was computed with the weights before the last optimizer's step; called once a step."""
        self._engine.reset_prefix_cache()

    def generate(
        self,
        prompts: Sequence[list[int]],
        images: Sequence[Any] | None,
        num_generations: int,
        profiler: AbstractContextManager[object] | None = None,
    ) -> tuple[list[list[int]], list[list[int]], list[AloneEach[float]], list[AloneEach[int]]]:
        """Return prompts, answers, and of each answer's tokens the log-probability and the token, in lists of one.

        Args:
            prompts: token ids, each prompt as often as it is to be answered.
            images: the images of each prompt, whose tokens it has already; None if it has none.
            num_generations: how often each prompt is there.
            profiler: entered around the rollout.

        Raises:
            ValueError: a prompt has images and the engine no processor, or settings that no request can have.
            RuntimeError: an answer has failed.
        """
        asked = self._with_images(prompts, images)
        if self._sleep:
            self._engine.wake()
        with profiler or nullcontext():
            outputs = self._engine.generate(asked, self._params())
        answers = [output.outputs[0] for output in outputs]
        for output in outputs:
            if output.finish_reason == "error":
                raise RuntimeError(f"a rollout has failed: {output.error}") from output.error
        return (
            [*prompts],
            [answer.token_ids for answer in answers],
            [AloneEach(_sampled(answer.logprobs)) for answer in answers],
            [AloneEach(answer.token_ids) for answer in answers],
        )

    def check_log_probabilities(self) -> None:
        """Raise ValueError if the trainer corrects by log-probabilities other than the engine's."""
        # TRL divides its own logits by the temperature, and compares.
        corrects = getattr(self._trainer, "vllm_importance_sampling_correction", False)
        plain = SamplingParams(max_tokens=1)
        params = self._params()
        changed = [name for name in _CHANGE if getattr(params, name) != getattr(plain, name)]
        if corrects and changed and self._engine.logprobs_mode != "processed_logprobs":
            raise ValueError(
                f"{', '.join(f'{name}={getattr(params, name)}' for name in changed)}: the trainer corrects by "
                "log-probabilities of what tokens are drawn from; make it Engine(model, "
                "logprobs_mode='processed_logprobs')"
            )

    def end_rollout(self) -> None:
        """Give the pages to the training step."""
        if not self._engine.asleep:
            self._engine.sleep()

    def _with_images(self, prompts: Sequence[list[int]], images: Sequence[Any] | None) -> list[Any]:
        if images is None or not any(images):
            return [*prompts]
        if self._engine.processor is None:
            raise ValueError(
                "images: a prompt has images, and the engine no processor; make it Engine(model, processor=...) with "
                "the trainer's processing_class"
            )
        return [
            {"prompt_token_ids": prompt, "multi_modal_data": {"image": shown}} if shown else prompt
            for prompt, shown in zip(prompts, images, strict=True)
        ]

    def _params(self) -> SamplingParams:
        trainer = self._trainer
        given: dict[str, Any] = {
            "temperature": trainer.temperature,
            "top_p": trainer.top_p,
            "top_k": trainer.top_k or 0,
            "min_p": trainer.min_p or 0.0,
            "repetition_penalty": trainer.repetition_penalty,
            "max_tokens": trainer.max_completion_length,
            "stop_token_ids": [*trainer.eos_token_ids],
            **(trainer.args.generation_kwargs or {}),
        }
        if (image := getattr(self._engine.processor, "image_token_id", None)) is not None:
            # As TRL's own generation: drawn, the token would stand for an image that the training step has not.
            given["logit_bias"] = {image: -100.0, **(given.get("logit_bias") or {})}
        if (pattern := getattr(trainer.args, "vllm_structured_outputs_regex", None)) is not None:
            given["structured_outputs"] = StructuredOutputsParams(regex=pattern)
        return SamplingParams(logprobs=0, **given)


class AloneEach(Sequence[list[T]]):
    """Entries, each in a list of its own, as TRL reads them: made when read.

    The garbage collector looks through lists that stay, those of 256 answers of 512 tokens for half a second.
    """

    def __init__(self, entries: Sequence[T]) -> None:
        self._entries = entries

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> list[T]: ...
    @overload
    def __getitem__(self, index: slice) -> AloneEach[T]: ...
    def __getitem__(self, index: int | slice) -> list[T] | AloneEach[T]:
        """Return one entry in a list; of a slice, those in it."""
        found = self._entries[index]
        return AloneEach(found) if isinstance(index, slice) else [found]  # type: ignore[list-item,arg-type]


def _sampled(logprobs: Sequence[dict[int, Logprob]] | None) -> list[float]:
    """Return the log-probabilities of the tokens of an answer; none of one that ended before its first token."""
    found: Any = logprobs  # an engine's knows them as numbers
    return [] if found is None else list(found.sampled())


_CHANGE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
