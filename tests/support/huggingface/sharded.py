"""Run as a program: each rank has a part of each model, and prints what `wrap` says of it.

It imports once, and becomes each of the ranks, as torchrun would start them.
"""

from __future__ import annotations

import os
import socket
import sys

import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, PreTrainedModel

import compiled_llm

RANKS = 2
KINDS = ("whole", "fully_shard", "parallelize_module", "tp_plan")


def loaded(folder: str, kind: str) -> PreTrainedModel:
    if kind == "tp_plan":
        return AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
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


def said_of(model: PreTrainedModel) -> str:
    try:
        compiled_llm.wrap(model, mode="eager", kv_memory="2000 tokens")
    except compiled_llm.UnsupportedModelError as error:
        return f"refused: {error}"
    return "wrapped"


def main(folder: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(RANKS)}
    ranks = []
    for rank in map(str, range(RANKS)):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
            return be_rank(folder)
    codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    sys.exit(0 if codes == [0] * RANKS else f"ranks ended with {codes}")


def be_rank(folder: str) -> None:
    dist.init_process_group("gloo")
    for kind in KINDS:
        said = said_of(loaded(folder, kind))
        os.write(1, f"{kind}: {said}\n".encode())  # at once: ranks write into one pipe
        dist.barrier()
    assert dist.get_world_size() == RANKS
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
