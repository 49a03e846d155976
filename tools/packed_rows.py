"""Each number of rows: products with packed weights, as their rule chooses, beside those in bfloat16.

    python tools/packed_rows.py                                   # 1 to 64 rows, all formats
    python tools/packed_rows.py --formats int4,nf4 --rows 33-64
    python tools/packed_rows.py --device cpu --dtype float32 --products 256x128 --rows 1-2     # anywhere

The times are those of the products of a layer of Qwen3-8B one after the other, of the best run, weights out of cache;
with bfloat16 by `skinny_linear`. It ends with 1 if one is slower than bfloat16.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from fitting.measuring import by_the_clock, captured, copies_of
from fitting.packed_weights import FORMATS, PRODUCTS, copies_of_weight, packed_weight
from torch import Tensor

from compiled_llm_ops import skinny_linear
from compiled_llm_ops.packed.linear import multiply_packed

Multiply = Callable[[Tensor, int], Tensor]


def main() -> None:
    options = _options()
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    products = [tuple(map(int, product.split("x"))) for product in options.products.split(",")]
    first, last = map(int, options.rows.split("-"))
    found: dict[str, dict[int, float]] = {}
    for name in ("bfloat16", *options.formats.split(",")):
        found[name] = dict.fromkeys(range(first, last + 1), 0.0)
        for n, k in products:
            multiply = _multiply(name, n, k, device, dtype)
            for m in found[name]:
                found[name][m] += _microseconds(multiply, torch.randn(m, k, device=device, dtype=dtype) / k**0.5)
        _print(name, found)
        if options.json:
            Path(options.json).write_text(json.dumps(found, indent=1))
    sys.exit(any(own[m] > found["bfloat16"][m] for own in found.values() for m in own))


def _multiply(name: str, n: int, k: int, device: torch.device, dtype: torch.dtype) -> Multiply:
    """Return what multiplies rows with one of several weights alike, told its number."""
    if name == "bfloat16":
        plain = copies_of(torch.randn(n, k, device=device, dtype=dtype) / k**0.5)
        return lambda rows, number: skinny_linear(rows, plain[number % len(plain)], overlap=True)
    weights = copies_of_weight(packed_weight(name, n, k, device))
    return lambda rows, number: multiply_packed(rows, weights[number % len(weights)], overlap=True)


def _microseconds(multiply: Multiply, rows: Tensor) -> float:
    if rows.device.type == "cuda":
        return captured(lambda number: multiply(rows, number))
    return by_the_clock(lambda: multiply(rows, 0), lambda: None, seconds=0.01)


def _print(name: str, found: dict[str, dict[int, float]]) -> None:
    own, plain = found[name], found["bfloat16"]
    worst = max(own, key=lambda m: own[m] / plain[m])
    print(f"{name}: at worst {own[worst] / plain[worst]:.2f} of bfloat16's time, at {worst} rows; by rows, us:")
    print("  " + "; ".join(f"{m}: {took:.1f} ({took / plain[m]:.2f})" for m, took in own.items()), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--rows", default="1-64")
    parser.add_argument("--products", default=",".join(f"{n}x{k}" for n, k in PRODUCTS.values()), help="N x K of each")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", help="a file for all figures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
