"""Run as a program: prepares a model with room for some rows, and writes what Inductor has compiled for it."""

from __future__ import annotations

import sys

import compiled_llm
from compiled_llm.compat.torch.inductor import compiled_anew
from support.tiny_models import tiny_qwen3


def main(epsilon: str, batch_size: str, max_num_seqs: str) -> None:
    """The model's norms have ``epsilon``; ``wrap`` makes room for some rows, an engine for others, as in a server."""
    plain = tiny_qwen3(num_hidden_layers=1, rms_norm_eps=float(epsilon))
    model = compiled_llm.wrap(plain, max_batch_size=int(batch_size), progress=False)
    with compiled_llm.Engine(model, max_num_seqs=int(max_num_seqs)) as engine:
        engine.warmup([1])
        print(compiled_anew())


if __name__ == "__main__":
    main(*sys.argv[1:])
