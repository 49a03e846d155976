"""Run as a program: prepares a model with room for some rows, and writes what Inductor has compiled for it.

Inductor keeps graphs by their keys, whatever builds their kernels; here nothing does. The program imports once, and
becomes each of the processes in turn.
"""

from __future__ import annotations

import os
import sys

import pytest

import compiled_llm
from compiled_llm.compat.torch.inductor import compiled_anew
from support.compilation.unbuilt_kernels import leave_kernels_unbuilt
from support.tiny_models import tiny_llama


def prepare(epsilon: float, batch_size: int, max_num_seqs: int) -> None:
    """The model's norms have ``epsilon``; ``wrap`` makes room for some rows, an engine for others, as in a server."""
    plain = tiny_llama(num_hidden_layers=1, rms_norm_eps=epsilon)
    model = compiled_llm.wrap(plain, max_batch_size=batch_size, progress=False)
    with compiled_llm.Engine(model, max_num_seqs=max_num_seqs) as engine:
        engine.warmup([1])
        print(compiled_anew(), flush=True)


def main(epsilon: str, *sizes: str) -> None:
    """One process after the other for each pair of a batch size and a number of requests; each writes a line."""
    leave_kernels_unbuilt(pytest.MonkeyPatch())
    for batch_size, max_num_seqs in zip(sizes[::2], sizes[1::2], strict=True):
        child = os.fork()
        if child == 0:
            prepare(float(epsilon), int(batch_size), int(max_num_seqs))
            return
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code != 0:
            sys.exit(f"the process with room for {batch_size} and {max_num_seqs} rows ended with {code}")


if __name__ == "__main__":
    main(*sys.argv[1:])
