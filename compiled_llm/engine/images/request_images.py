"""The images of one prompt, and how it is computed up to the last one's end: by steps, or HuggingFace's forward."""

# Where steps do not read images, pages of a row are filled by that forward, and the text after the images is
# computed by our own steps, as a text's rest after a prefix is. So nothing else knows of images: to the prefix tree
# they are tokens with keys, and to steps a row whose next position is not its length. Shapes: T tokens of the prompt, E
# of them up to the end of the last image, A axes of positions.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from compiled_llm.compat.images.vision_encoders import ImageModel
from compiled_llm.engine.device_loss import device_lost
from compiled_llm.engine.images.encoder_cache import EncoderCache
from compiled_llm.engine.images.prompt_encoder import PromptEncoder
from compiled_llm.engine.images.resumed import begun_cache, can_resume, encoded
from compiled_llm.engine.images.shown_prompt import ShownPrompt
from compiled_llm.engine.request_part import RequestPart
from compiled_llm.engine.steps.plan import RunsApart
from compiled_llm.engine.steps.request import Request, RequestError
from compiled_llm.engine.steps.taps import PlanTap
from compiled_llm.execution.batch import Extension
from compiled_llm.execution.decode.persistent_batch import PersistentBatch
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.reporting.slow_paths import Reason
from compiled_llm.kinds.kind import owners_of_keys
from compiled_llm.kinds.registry import read_states
from compiled_llm.kvcache.row import Row
from compiled_llm.model.facts import ModelFacts
from compiled_llm.requests.users_code import described

NAME = "images"
OF_TOKENS = ("input_ids", "token_type_ids", "mm_token_type_ids")
"""What processors return for each token, but for masks, which show all."""


class RequestImages(RequestPart, RunsApart):
    """A prompt with images: its inputs, which are kept until its answers have ended.

    Attributes:
        ids: ``[T]`` int64, as the processor made them.
        keys: ``[T]`` int64, ids with keys in place of the images' tokens (``token_keys``).
        in_steps: whether steps compute the tokens before ``end``, in chunks beside other rows.
        slow: why they do not, or the images are encoded more slowly, if they were asked to; else None.
    """

    timed = False  # how long its launch takes tells nothing of others

    def __init__(
        self,
        facts: ModelFacts,
        ids: NDArray[np.int64],
        inputs: Mapping[str, Tensor],
        positions: Tensor,
        keys: NDArray[np.int64],
        runs: Sequence[NDArray[np.int64]],
        encoder: PromptEncoder,
        in_steps: bool,
        slow: Reason | None,
    ) -> None:
        """``inputs`` are what the processor returned; ``positions`` are ``[1, T]`` or ``[A, 1, T]``."""
        # ``runs`` are the places of tokens of images, those next to each other together.
        self._runs = runs
        self.ids = ids
        self.keys = keys
        self.in_steps = in_steps
        self.slow = slow
        self._shown = ShownPrompt(facts, positions, runs, encoder) if in_steps else None
        self._facts = facts
        self._encoder = encoder
        self._inputs = {name: inputs[name][:, : self.end] for name in OF_TOKENS if name in inputs}
        self._can_resume = encoder.patches is not None and can_resume(facts)
        self._positions = positions[..., : self.end]
        # Of text, all axes have one position: that of the last axis is a token's.
        self._of_tokens: NDArray[np.int64] = positions.reshape(-1, positions.shape[-1])[-1].cpu().numpy()

    def enter(self, request: Request) -> None:
        """Let a request have them; all answers to a prompt share it."""
        request.parts[NAME] = self

    # ---- as a part of its requests

    @property
    def end(self) -> int:
        """E, where the last image ends: it runs to there, where it runs apart."""
        return int(self._runs[-1][-1]) + 1

    @property
    def prompt_ids(self) -> NDArray[np.int64]:
        """Its ids, which the prefix cache does not tell apart."""
        return self.ids

    def runs_apart(self, start: int) -> RequestImages | None:
        """Return itself where HuggingFace's forward computes the prompt, up to the last image's end."""
        return None if self.in_steps or start >= self.end else self

    def position_after(self, length: int) -> int:
        """Return the position of the token after the first ``length`` of the prompt and its answer."""
        beyond = length - len(self._of_tokens)
        return int(self._of_tokens[length]) if beyond < 0 else int(self._of_tokens[-1]) + 1 + beyond

    # ---- in the model's executor

    def extension(self, row: Row, ids: NDArray[np.int64], is_last: bool, model_runner: ModelRunner) -> Extension:
        """Return a chunk of a row as steps take it: ``ids``, without keys, their positions, and what they show."""
        start, end = row.exact_length, row.exact_length + len(ids)
        own = self.ids[start:end]
        beyond = int(self._of_tokens[-1]) + 1 + np.arange(max(start, len(self.ids)), end) - len(self.ids)
        positions = np.concatenate([self._of_tokens[start:end], beyond])
        extension = Extension(row, np.concatenate([own, ids[len(own) :]]), positions, is_last)
        return extension if self._shown is None else self._shown.showing(extension, model_runner)

    def run(
        self,
        model_runner: ModelRunner,
        persistent: PersistentBatch,
        extensions: Sequence[Extension],
        taps: Sequence[PlanTap],
    ) -> Tensor:
        """Fill a row up to the end of the images; returns ``[0]`` int64, no token is sampled after them.

        Raises:
            RequestError: HuggingFace's forward has failed; nothing else has.
        """
        (extension,) = extensions
        row = cast(Row, extension.row)
        persistent.invalidate_rows([row])
        try:
            self._fill(model_runner, row)
        except Exception as error:
            if device_lost(error) is not None:
                raise
            raise RequestError(f"prompt: HuggingFace's forward of its images has failed: {described(error)}") from error
        return torch.zeros(0, dtype=torch.int64, device=model_runner.device)

    def _fill(self, model_runner: ModelRunner, row: Row) -> None:
        stored = np.zeros((1, self.end), dtype=bool)
        stored[:, row.exact_length :] = True
        cache, layers = self._computed(model_runner, row), self._facts.layers
        owners = zip(owners_of_keys(layers), layers, strict=True)
        theirs: list[Any] = [cache.layers[own] if layer.kind.attends else None for own, layer in owners]
        both = [None if their is None else (their.keys, their.values) for their in theirs]
        known = [self.ids[row.exact_length : self.end]]
        model_runner.fill([row], stored, both, read_states(cache, layers), ids=known)
        row.exact_position = self.position_after(row.exact_length)

    def _computed(self, model_runner: ModelRunner, row: Row) -> DynamicCache:
        """Return a cache of HuggingFace's, with keys and values ``[1, K, E, D]``, by its own forward."""
        # Layers with windows keep all columns, since rows that begin with a part of these pages may see them; without
        # a config, a cache has no layers for states.
        device, start = model_runner.device, row.exact_length if self._can_resume else 0
        own = cast(type[ImageModel], self._facts.model_class)
        model = self._encoder.encoding(self._facts.model, EncoderCache.of(model_runner))
        of_tokens = {name: tensor[:, start:].to(device, non_blocking=True) for name, tensor in self._inputs.items()}
        given: dict[str, Any] = {**of_tokens, **self._encoder.inputs(device)}
        with torch.no_grad(), self._facts.attention.original():
            if start:
                cache = begun_cache(model_runner.state, row)
                given = {**of_tokens, **encoded(model, given, self._encoder.patches or [], self._runs, start)}
            else:
                cache = DynamicCache(config=model.config) if self._facts.states else DynamicCache()
            ids = given.pop("input_ids")
            prepared = own.prepare_inputs_for_generation(
                model,
                ids,
                **{self._facts.generate_argument: cache},
                attention_mask=ids.new_ones(1, self.end),
                position_ids=self._positions[..., start:].to(device, non_blocking=True),
                use_cache=True,
                is_first_iteration=True,
                logits_to_keep=1,
                **given,
            )
            own.forward(model, **prepared)
        return cache
