"""The prefill of rows with images: their tokens are read as features of an encoder, in three axes of positions."""

# Rows of text may be in the same launch. In models whose encoder gives features of several of its layers (Qwen3-VL),
# those of each are added to what one of the first layers returns.
# Shapes: T packed tokens, A axes of positions, F layers with features of their own, C hidden size.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from compiled_llm.compilation.graphs.outputs import StepOutputs
from compiled_llm.compilation.inputs import PrefillInputs
from compiled_llm.compilation.options import prefill_options
from compiled_llm.compilation.program import Program, ProgramInputs
from compiled_llm.compilation.sampling.sampling import SamplingTables
from compiled_llm.compilation.steps import asked_of, forward_of_packed, known_ids, sampled_after
from compiled_llm.kinds.spec import KVCacheSpec
from compiled_llm.model.facts import Forward


class ShownInputs(NamedTuple):
    """What the step reads besides the inputs of other prefills."""

    features: Tensor  # ``[T, C]`` in the model's dtype, of tokens of images; zeros of others
    shown: Tensor  # ``[T]`` bool, which tokens are those of images
    positions: Tensor  # ``[A, T]`` int64, rotary positions
    deep: Tensor | None  # ``[F, T, C]`` as ``features``; None without such layers
    forward: Forward | None  # takes ``deep``; None without it

    @property
    def program(self) -> Program:
        """Its own."""
        return PROGRAM

    @property
    def sizes(self) -> Sequence[tuple[Tensor, int]]:
        """Its tensors with T of something, and where that is."""
        deep = [] if self.deep is None else [(self.deep, 1)]
        return [(self.features, 0), (self.shown, 0), (self.positions, 1), *deep]

    def over(self, tensors: Sequence[Tensor]) -> ShownInputs:
        """Return the same with other tensors, in that order."""
        features, shown, positions, *deep = tensors
        return self._replace(features=features, shown=shown, positions=positions, deep=deep[0] if deep else None)


def shown_step(
    model: PreTrainedModel,
    forward: Forward,
    inputs: PrefillInputs,
    tables: SamplingTables,
    pages: list[Tensor],
    specs: tuple[KVCacheSpec, ...],
) -> StepOutputs:
    """Run packed tokens as ``prefill_step``, those of images by their features."""
    extra = cast(ShownInputs, inputs.extra)
    ids = known_ids(inputs.ids, tables)
    embedded = model.get_input_embeddings()(ids)
    embedded = torch.where(extra.shown[None, :, None], extra.features[None], embedded)
    read: dict[str, Any] = {"inputs_embeds": embedded, "position_ids": extra.positions[:, None], **asked_of(inputs)}
    if extra.deep is not None and extra.forward is not None:
        forward, read = extra.forward, {**read, "deep": extra.deep, "first": inputs.qo_indptr[:1].long()}
    out = forward_of_packed(model, forward, inputs, pages, specs, ids[0], logits_to_keep=inputs.keep, **read)
    return sampled_after(inputs, tables, out)


def deep_forward(
    model: PreTrainedModel, *, deep: Tensor, first: Tensor, logits_to_keep: Tensor, **inputs: object
) -> CausalLMOutputWithPast:
    """Run embeddings ``[1, T, C]`` as HuggingFace's forward, and add ``deep`` to what the first layers return.

    ``first`` is ``[1]`` int64, 0: the one sequence that all tokens are of.
    """
    # The layers' sum takes tokens by a mask, whose number the host would have to know; an index takes all of them.
    out = model.model.language_model(
        visual_pos_masks=first, deepstack_visual_embeds=[*deep.unsqueeze(1).unbind()], **inputs
    )
    logits = model.lm_head(out[0][:, logits_to_keep])
    return CausalLMOutputWithPast(logits=logits, hidden_states=out.get("hidden_states"))


def _runs_shown(inputs: ProgramInputs) -> bool:
    return isinstance(inputs, PrefillInputs) and isinstance(inputs.extra, ShownInputs)


PROGRAM = Program("prefill with images", _runs_shown, shown_step, prefill_options, on_demand=True)
