"""Run as a program under torchrun: each rank has a part of a model, and prints what `wrap` says of it."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, PreTrainedModel

import compiled_llm

RANKS = 2


def loaded(folder: str, kind: str) -> PreTrainedModel:
    if kind == "tp_plan":
        return AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(folder)
    if kind == "whole":
        return model
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    if kind == "fully_shard":
        return fully_shard(model, mesh=mesh)
    plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer.mlp, mesh, plan)
    return model


def main(folder: str, kind: str) -> None:
    model = loaded(folder, kind)
    try:
        compiled_llm.wrap(model, mode="eager", kv_memory="2000 tokens")
    except compiled_llm.UnsupportedModelError as error:
        said = f"refused: {error}"
    else:
        said = "wrapped"
    os.write(1, f"{said}\n".encode())  # at once: ranks write into one pipe
    dist.barrier()
    assert torch.distributed.get_world_size() == RANKS
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
