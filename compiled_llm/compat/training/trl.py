"""The private parts of TRL's trainers by which another engine than vLLM samples for them.

``tests/trainers/test_sample_with.py`` names what breaks: a trainer that no longer asks ``vllm_generation``, or asks it
for more.

| what | versions | ends when |
| --- | --- | --- |
| ``use_vllm``, ``vllm_generation``, ``vllm_mode`` and ``_last_loaded_step`` of GRPO's, RLOO's and the distillation \
trainer, and ``_generate``, at whose end a rollout ends | 1.16 | TRL has a class that backends derive from |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

MADE_FOR = "1.16"


class Accelerator(Protocol):
    """accelerate's ``Accelerator``, as far as ours asks it."""

    num_processes: int

    def unwrap_model(self, model: nn.Module) -> nn.Module: ...


class Trainer(Protocol):
    """A trainer of TRL's that samples: what of it is read, and what is replaced."""

    args: Any
    accelerator: Accelerator
    model: PreTrainedModel
    temperature: float
    top_p: float
    top_k: int | None
    min_p: float | None
    repetition_penalty: float
    max_completion_length: int
    eos_token_ids: Sequence[int]
    _generate: Callable[..., object]
    use_vllm: bool
    vllm_mode: str
    vllm_generation: object
    _last_loaded_step: int


_ASKED = ("use_vllm", "vllm_mode", "_generate", "max_completion_length", "temperature", "eos_token_ids")


def check_trainer(trainer: Trainer) -> None:
    """Raise ValueError unless a trainer samples through ``vllm_generation``, and nobody else does so for it."""
    if missing := [name for name in _ASKED if not hasattr(trainer, name)]:
        raise ValueError(
            f"trainer={type(trainer).__name__}: has no {', '.join(missing)}, by which GRPOTrainer, RLOOTrainer and "
            f"DistillationTrainer of TRL {MADE_FOR} sample; installed is {_version()}: pip install 'trl=={MADE_FOR}.*'"
        )
    if trainer.args.use_vllm:
        raise ValueError("use_vllm=True: vLLM samples for this trainer; leave it out of the trainer's arguments")
    if (processes := trainer.accelerator.num_processes) > 1:
        raise ValueError(
            f"trainer: trains in {processes} processes, and an engine samples in its own alone; start one process"
        )


def sample_by(trainer: Trainer, sampler: object, rollout_ended: Callable[[], None] | None = None) -> None:
    """Let a trainer sample by an object with ``sync_weights()`` and ``generate(...)`` in place of vLLM's.

    ``rollout_ended`` is called after each rollout, whatever its end, before the trainer computes losses.
    """
    own = trainer._generate
    if isinstance(own, _Rollout):  # of an earlier call for the same trainer
        own = own.own
    trainer._generate = _Rollout(own, trainer, rollout_ended or (lambda: None))
    trainer.use_vllm, trainer.vllm_mode = True, "colocate"
    trainer.vllm_generation = sampler
    trainer._last_loaded_step = -1  # of no step: weights are looked at before the first rollout


class _Rollout:
    """A trainer's ``_generate``, without checkpointing, and what is called at its end."""

    # For all turns together: to checkpoint again hooks the embeddings anew, and the prefix cache forgets all that
    # was computed with other hooks.

    def __init__(self, own: Callable[..., object], trainer: Trainer, ended: Callable[[], None]) -> None:
        self.own, self._trainer, self._ended = own, trainer, ended

    def __call__(self, *args: object, **kwargs: object) -> object:
        try:
            with without_checkpointing(self._trainer.model):
                return self.own(*args, **kwargs)
        finally:
            self._ended()


def without_checkpointing(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Return TRL's own context in which a model's layers are not checkpointed, so that they use a cache."""
    from trl.models.utils import disable_gradient_checkpointing

    context: AbstractContextManager[None] = disable_gradient_checkpointing(model)
    return context


def _version() -> str:
    try:
        return version("trl")
    except PackageNotFoundError:
        return "none"
