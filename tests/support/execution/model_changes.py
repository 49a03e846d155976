"""Ways to change a wrapped model of which a captured step knows nothing by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer


def new_parameter(model: PreTrainedModel) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().roll(1, dims=0))


def moved_data(model: PreTrainedModel) -> None:
    weight = model.model.layers[0].self_attn.k_proj.weight  # one of three that are multiplied as one
    weight.data = -weight.data


def swapped_module(model: PreTrainedModel) -> None:
    mlp = copy.deepcopy(model.model.layers[0].mlp)
    with torch.no_grad():
        mlp.down_proj.weight.neg_()
    model.model.layers[0].mlp = mlp


def in_place(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.roll(1, dims=0))


def other_attribute(model: PreTrainedModel) -> None:
    model.model.layers[0].self_attn.scaling *= 4


class Changing(BaseStreamer):
    """Changes the model once five tokens have arrived."""

    def __init__(self, change: Callable[[], None]) -> None:
        self.change, self.seen = change, 0

    def put(self, value: Tensor) -> None:
        self.seen += 1
        if self.seen == 6:  # the prompt comes first
            self.change()

    def end(self) -> None:
        pass
