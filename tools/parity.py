"""How far the logits of a full-size random model are from float32, beside how far HuggingFace's are.

    python tools/parity.py qwen3-8b

It is the parity test of `tests/execution/test_model_gpu.py` on one of the bench's models:
8 rows of mixed lengths, then one row.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent / "bench"))
from models import build
from shapes import SHAPES

STEPS = 220
BATCHES = ([1, 15, 16, 17, 33, 64, 100, 250], [100])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("--seed", type=int, default=0, help="of weights and tokens")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from support.execution import twins as tests

    cuda = torch.cuda.is_available()
    tests.DEVICE = "cuda" if cuda else "cpu"
    device = torch.device(tests.DEVICE)
    twins = tests.twins_of(build(options.model, torch.bfloat16, device, options.seed))
    print("| prompt | batch | RMS error, ours | HuggingFace's | ratio | flips | steps judged |", flush=True)
    print("|---|---|---|---|---|---|---|")
    for lengths in BATCHES:
        for row in tests.parity(twins, lengths, STEPS, options.seed):
            print(
                f"| {row.prompt} | {len(lengths)} | {row.ours:.4e} | {row.huggingface:.4e} | "
                f"{row.ours / row.huggingface:.3f} | {row.flips} | {row.judged} of {row.steps} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
