"""CUDA graphs of the encoder of a model, for a few sizes: images run in the next larger one."""

# They are captured in warm-up, and read their inputs where these were then: each image is copied there. An image
# that no graph holds, or that comes before warm-up, is launched kernel by kernel.
# Shapes: T tokens of a graph, F layers with features of their own, C hidden size.

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from compiled_llm.compat.images.vision_encoders import SEGMENTS, VisionEncoder
from compiled_llm.compilation.graphs.capture import CapturedGraph, GraphCapture
from compiled_llm.compilation.graphs.validity import Checks
from compiled_llm.engine.images.encoder.encoder_step import EncoderInputs
from compiled_llm.engine.images.encoder.grid_inputs import GridInputs
from compiled_llm.execution.model_runner import ModelRunner

TOKENS = 64, 128, 256, 512, 1024, 2048, 4096
"""Sizes of graphs: an image of 1,024 x 1,024 pixels has 1,024 tokens in Qwen3-VL, and 1,369 in Qwen2-VL."""
_IMAGES = 8
_NAME = "encoder_graphs"

Launch = Callable[[EncoderInputs], Tensor]


class _Graph(NamedTuple):
    captured: CapturedGraph[Tensor]  # writes ``[1 + F, T, C]``
    guards: Checks
    inputs: EncoderInputs


class EncoderGraphs:
    """The graphs of one model's encoder.

    Attributes:
        replays: how many launches were replayed.
    """

    def __init__(self, model_runner: ModelRunner) -> None:
        """Capture nothing yet."""
        self.replays = 0
        self._model_runner = model_runner
        self._manager = model_runner.graph_manager
        self._graphs: dict[int, _Graph] = {}
        self._buffers: list[Tensor] = []
        self._addresses: list[int] = []

    @classmethod
    def of(cls, model_runner: ModelRunner) -> EncoderGraphs:
        """Return those of a model."""
        if (graphs := model_runner.parts.get(_NAME)) is None:
            graphs = model_runner.parts[_NAME] = cls(model_runner)
        return graphs

    @property
    def nbytes(self) -> int:
        """The bytes that graphs and their inputs take, without what captures of one pool share."""
        return sum(own.nbytes for own in self._buffers) + sum(own.captured.cost.nbytes for own in self._graphs.values())

    @property
    def left_out(self) -> bool:
        """Whether steps are captured, and options bound their graphs, which count none of these."""
        return self._manager.cuda_graphs.ours and any(self._manager.table.budget)

    # ---- capture

    def prepare(self, encoder: VisionEncoder, width: int, launch: Launch) -> None:
        """Capture all sizes, if steps are captured and may take any memory; ``width`` is how many pixels a token has.

        ``launch`` runs the program, which is compiled.
        """
        if self._valid(encoder) or not self._manager.cuda_graphs.ours or self.left_out or self._manager.eager:
            return
        self._forget()
        capture = GraphCapture(self._model_runner.device)
        self._addresses = _addresses(encoder)
        for tokens in sorted(TOKENS, reverse=True):
            self._graphs[tokens] = self._captured(self._inputs_of(encoder, width, tokens), launch, capture)

    def _captured(self, inputs: EncoderInputs, launch: Launch, capture: GraphCapture) -> _Graph:
        launch(inputs)  # what libraries allocate in a first launch cannot be captured
        programs, arguments = self._manager.programs, self._manager.arguments(inputs)
        with self._model_runner.state.facts.attention.named(SEGMENTS):
            guards = programs.guards(arguments, programs.prepared(arguments))
            guards.find()
        return _Graph(capture.capture(lambda: launch(inputs)), guards, inputs)

    def _inputs_of(self, encoder: VisionEncoder, width: int, tokens: int) -> EncoderInputs:
        """Return the beginnings of buffers that all sizes read, made with the first one, the largest."""
        side = encoder.spatial_merge_size
        empty = GridInputs.of(encoder, torch.tensor([[1, side, side]], device="cpu")).padded(encoder, tokens, _IMAGES)
        if not self._buffers:
            with torch.inference_mode(False):
                device, dtype = self._model_runner.device, encoder.dtype
                pixels = torch.zeros(tokens, width, dtype=dtype, device=device)
                self._buffers = [pixels, *(torch.from_numpy(own).to(device) for own in empty if own is not None)]
        first, *rest = self._buffers
        others = iter(rest)
        beginnings: list[Any] = [None if own is None else next(others)[: len(own)] for own in empty]
        inputs = EncoderInputs(first[:tokens], *beginnings)
        self._fill(inputs, empty)
        return inputs

    def _fill(self, inputs: EncoderInputs, grids: GridInputs) -> None:
        """Copy all but pixels to where a graph reads them."""
        both = zip(grids, inputs[1:], strict=True)
        pairs = [
            (np.reshape(own, -1), tensor.view(-1)) for own, tensor in both if own is not None and tensor is not None
        ]
        self._model_runner.state.staging.upload(pairs)

    # ---- replay

    def run(self, encoder: VisionEncoder, pixels: Tensor, grids: GridInputs) -> Tensor | None:
        """Return features ``[1 + F, tokens, C]`` of pixels ``[tokens, ...]``; None if no graph holds them."""
        tokens = next((own for own in sorted(self._graphs) if own >= grids.tokens), None)
        if tokens is None or len(grids.starts) > _IMAGES + 1:
            return None
        if not self._valid(encoder):
            self._forget()
            return None
        graph = self._graphs[tokens]
        graph.inputs.pixels[: grids.tokens].copy_(pixels)
        self._fill(graph.inputs, grids.padded(encoder, tokens, _IMAGES))
        graph.captured.launch()
        self.replays += 1
        features = graph.captured.outputs
        assert features is not None, "it is not released"
        return features[:, : grids.tokens].clone()  # the next replay overwrites it

    def _valid(self, encoder: nn.Module) -> bool:
        """Whether the encoder is what was captured, with its weights where they were."""
        if not self._graphs or self._addresses != _addresses(encoder):
            return False
        graph = next(iter(self._graphs.values()))
        with self._model_runner.state.facts.attention.named(SEGMENTS):
            return graph.guards.valid()

    def _forget(self) -> None:
        for graph in self._graphs.values():
            graph.captured.release()
        self._graphs, self._buffers = {}, []


def _addresses(encoder: nn.Module) -> list[int]:
    return [tensor.data_ptr() for tensor in (*encoder.parameters(), *encoder.buffers())]
