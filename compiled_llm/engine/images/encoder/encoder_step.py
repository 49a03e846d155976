"""The program of an encoder: HuggingFace's own forward, given what it would compute of grids."""

# Shapes: T tokens, M patches that become one, S images, W windows, n learned positions that a patch lies between, F
# layers with features of their own, C hidden size.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compiled_llm.compat.images.vision_encoders import VisionEncoder, window_patches
from compiled_llm.compilation.options import prefill_options
from compiled_llm.compilation.program import Program, ProgramInputs
from compiled_llm.compilation.sampling.sampling import SamplingTables
from compiled_llm.kinds.spec import KVCacheSpec
from compiled_llm.model.facts import Forward


class EncoderInputs(NamedTuple):
    """The inputs of a launch of images."""

    pixels: Tensor  # ``[T, M * pixels of a patch]`` in the model's dtype
    places: Tensor  # ``[T, M, 2]`` int64, the row and the column of each patch
    starts: Tensor  # ``[S + 1]`` int32, where the patches of each image begin
    near: Tensor | None  # ``[T, M, n]`` int64, learned positions that a patch lies between; None without
    weights: Tensor | None  # ``[T, M, n]`` float32, how near each is
    order: Tensor | None  # ``[T]`` int64, the tokens window by window; None without windows
    window_starts: Tensor | None  # ``[W + 1]`` int32, where the patches of each window begin

    @property
    def program(self) -> Program:
        """That of all encoders."""
        return PROGRAM

    @property
    def wants(self) -> tuple[str, ...]:
        """Nothing besides features."""
        return ()


def encoder_step(
    model: PreTrainedModel,
    forward: Forward,
    inputs: EncoderInputs,
    tables: SamplingTables,
    pages: list[Tensor],
    specs: tuple[KVCacheSpec, ...],
) -> Tensor:
    """Run images through the model's encoder: ``[1 + F, T, C]``, features of its last layer, then of F others."""
    encoder: VisionEncoder = model.model.visual
    tokens, patches = inputs.places.shape[:2]
    read: dict[str, Tensor | int | None] = {
        "position_ids": inputs.places.flatten(0, 1),
        "cu_seqlens": inputs.starts,
        "max_seqlen": 0,  # not known
    }
    if inputs.near is not None and inputs.weights is not None:
        read |= {"interp_indices": inputs.near.flatten(0, 1), "interp_weights": inputs.weights.flatten(0, 1)}
    if inputs.order is not None:
        order = inputs.order.view(tokens)  # so that both sizes are one
        windows = {"cu_window_seqlens": inputs.window_starts, "max_window_seqlen": window_patches(encoder)}
        read |= {"window_index": order, **windows}
    width = encoder.patch_embed.proj.weight[0].numel()  # a number, so that a patch is seen to be as large as the kernel
    out = encoder(inputs.pixels.view(tokens * patches, width), grid_thw=None, **read)
    others: Sequence[Tensor] = out.get("deepstack_features") or ()
    return torch.stack([out.pooler_output, *others])


def _encodes(inputs: ProgramInputs) -> bool:
    return isinstance(inputs, EncoderInputs)


PROGRAM = Program("encoder of images", _encodes, encoder_step, prefill_options, on_demand=True)
