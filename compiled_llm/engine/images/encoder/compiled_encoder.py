"""The encoder of a model by a program of ours, in place of HuggingFace's: images of new sizes compile nothing."""

# Shapes: N images, T tokens, M patches that become one, P = T * M patches, F layers with features of their own, C
# hidden size.

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from compiled_llm.compat.images.vision_encoders import SEGMENTS, ImageModel, VisionEncoder, output_of, patch_width
from compiled_llm.engine.images.encoder import attention as attention
from compiled_llm.engine.images.encoder.encoder_graphs import EncoderGraphs
from compiled_llm.engine.images.encoder.encoder_step import PROGRAM, EncoderInputs
from compiled_llm.engine.images.encoder.grid_inputs import GridInputs
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.reporting.slow_paths import Reason
from compiled_llm.model.traced.shallow_copies import shallow_copy, with_children

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_outputs import BaseModelOutputWithPooling

_PACKAGES = "transformers", "torch"
_EXAMPLE = (2, 10), (1, 1)
"""Rows and columns of tokens of the images that it is compiled with: no two of its sizes are the same."""


class CompiledEncoder:
    """The encoder of one model; all of it runs in the model's executor."""

    def __init__(self, model_runner: ModelRunner) -> None:
        self._model_runner = model_runner
        self._manager = model_runner.graph_manager
        self._attention = model_runner.state.facts.attention

    def inside(self, inner: ImageModel) -> ImageModel:
        """Return a copy of the module inside a model, whose encoder this is; it takes grids on the CPU."""
        encoder = inner.visual
        standing_in = shallow_copy(encoder, forward=partial(self._forward, encoder))
        copied: ImageModel = with_children(inner, {"visual": standing_in})
        return copied

    def prepare(self, encoder: VisionEncoder) -> None:
        """Compile the program, and on CUDA capture it for a few sizes."""
        self._make_ready(encoder)
        self._graphs.prepare(encoder, self._width(encoder), self._launch)

    def _forward(
        self, encoder: VisionEncoder, hidden_states: Tensor, grid_thw: Tensor, **options: object
    ) -> BaseModelOutputWithPooling:
        """Encode pixels ``[P, ...]`` of images with grids ``[N, 3]``; returns what HuggingFace's forward does."""
        self._make_ready(encoder)
        grids = GridInputs.of(encoder, grid_thw)
        pixels = hidden_states.view(grids.tokens, -1)
        features = self._graphs.run(encoder, pixels, grids)
        if features is None:
            features = self._encoded(encoder, pixels, grids)
        return output_of(encoder, features.unbind())

    @property
    def _graphs(self) -> EncoderGraphs:
        return EncoderGraphs.of(self._model_runner)

    def _make_ready(self, encoder: VisionEncoder) -> None:
        """Compile the program, if it is not compiled yet."""
        manager = self._manager
        self._model_runner.steps.check_model_if_due()
        if PROGRAM.name in manager.prefills or manager.programs.interpreted:
            return
        merged = encoder.spatial_merge_size
        example = [[1, rows * merged, columns * merged] for rows, columns in _EXAMPLE]
        grids = GridInputs.of(encoder, torch.tensor(example, device="cpu"))
        pixels = torch.zeros(grids.tokens, self._width(encoder), dtype=encoder.dtype, device=self._model_runner.device)
        with manager.preparing(PROGRAM.name, 1, PROGRAM.name):
            self._encoded(encoder, pixels, grids)
        manager.prefills.add(PROGRAM.name)

    @staticmethod
    def _width(encoder: VisionEncoder) -> int:
        """Return how many pixels a token has."""
        width: int = patch_width(encoder.config) * encoder.spatial_merge_size**2
        return width

    def _encoded(self, encoder: VisionEncoder, pixels: Tensor, grids: GridInputs) -> Tensor:
        """Return features ``[1 + F, T, C]`` of pixels ``[T, ...]``, by a launch of as many tokens."""
        tokens = max(2, grids.tokens)  # a symbolic size is at least 2
        if missing := tokens - grids.tokens:
            pixels = torch.cat([pixels, pixels.new_zeros(missing, pixels.shape[1])])
        arrays = grids.padded(encoder, tokens)
        moved = iter(self._model_runner.state.staging.to_device([own.reshape(-1) for own in arrays if own is not None]))
        others: list[Any] = [None if own is None else next(moved).view(own.shape) for own in arrays]
        return self._launch(EncoderInputs(pixels, *others))[:, : grids.tokens]

    def _launch(self, inputs: EncoderInputs) -> Tensor:
        """Launch the program."""
        with self._attention.named(SEGMENTS):
            features: Tensor = self._manager.programs.prepared(self._manager.arguments(inputs))()
            return features


def own_encoder(model: PreTrainedModel, model_runner: ModelRunner) -> CompiledEncoder | None:
    """Return the encoder of a model, one of those whose steps read images; None if HuggingFace runs it."""
    return None if encoder_obstacle(model.model.visual) else CompiledEncoder(model_runner)


def slower_encoder(model_runner: ModelRunner) -> Reason | None:
    """Return why images are not encoded as fast as they could be, or None."""
    model = model_runner.state.facts.model
    if (found := encoder_obstacle(model.model.visual)) is not None:
        return Reason("encoder", found)
    return Reason("encoder_graphs") if EncoderGraphs.of(model_runner).left_out else None


def encoder_obstacle(encoder: nn.Module) -> str | None:
    """Return why HuggingFace runs an encoder itself, or None."""
    modules = _modules_in(encoder)
    if (hooked := next(filter(_is_hooked, modules), None)) is not None:
        return f"hooks are on its modules ({_name_in(encoder, hooked)})"
    others = {kind for kind in {*map(type, modules)} if kind.__module__.partition(".")[0] not in _PACKAGES}
    if others:
        other = next(module for module in modules if type(module) in others)
        return f"it has modules of another package ({_name_in(encoder, other)} is a {type(other).__name__})"
    return None


def _modules_in(encoder: nn.Module) -> list[nn.Module]:
    """Return a module and all inside it."""
    # It is asked for with each prompt that has images, and ``modules`` takes several times as long.
    found: list[nn.Module] = [encoder]
    for module in found:
        found += (inside for inside in module._modules.values() if inside is not None)
    return found


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _name_in(encoder: nn.Module, inside: nn.Module) -> str:
    return next(f"visual.{name}" for name, module in encoder.named_modules() if module is inside)
