"""Make of a bench's JSON a published run: its figures as rounded in a table, without the times of each run.

    python tools/bench/publish.py latency.json results/02fa1c3-latency-qwen3-0.6b.json --remark "Tests ran beside."

The figures of a contender get its ratio to ``--over``, the one that others are compared with.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

RATIOS = {"latency": ("ratio/decode", "decode_tokens_per_s"), "offline": ("ratio/tokens_per_s", "tokens_per_s")}
"""By kind of results, what a ratio is called, and of which figure it is."""

SAME = ("batch", "prompt", "new", "sampled", "workload")
"""Results that are alike in these are compared."""

MIB = 2**20


def rounded(value: Any, name: str = "") -> Any:
    """Round to what a table shows, lists and dicts within as well; numbers that nobody has measured stay away."""
    if isinstance(value, dict):
        return {key: rounded(each, key) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [rounded(each, name) for each in value]
    if not isinstance(value, float):
        return value
    if name == "busy" or name.startswith("of_"):
        return round(value, 3 if name == "busy" else 2)
    size = abs(value)
    if size >= 1e6:
        return float(f"{value:.4g}")
    return round(value) if size >= 1000 else round(value, 1) if size >= 100 else float(f"{value:.3g}")


def published(kind: str, results: list[dict[str, Any]], over: str) -> list[dict[str, Any]]:
    """Return the results of one kind without times of single runs, and with ratios."""
    compared = {_asked(result): result for result in results if result.get("contender") == over}
    found = []
    for result in results:
        kept = {key: value for key, value in result.items() if key == "figures" or not isinstance(value, list)}
        base = compared.get(_asked(result))
        if kind in RATIOS and base is not None:
            name, figure = RATIOS[kind]
            ratio = result["figures"][figure]["median"] / base["figures"][figure]["median"]
            kept["figures"] = {**result["figures"], "ratio": {"over": over, name.split("/")[1]: round(ratio, 2)}}
        found.append(rounded(kept))
    return found


def _asked(result: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(result.get(name) for name in SAME)


def main(
    report: Path,
    published_as: Path,
    over: Annotated[str, typer.Option(help="The contender of ratios; by default the first.")] = "",
    remark: Annotated[str, typer.Option(help="What a reader has to know besides.")] = "",
    commit: Annotated[str, typer.Option(help="What was measured, where the machine's git said otherwise.")] = "",
) -> None:
    """Write a published run of a bench's JSON."""
    found = json.loads(report.read_text())
    results = found["results"]
    first = over or next(iter(results.values()))[0].get("contender")
    memory = {
        contender: {part: rounded(nbytes / MIB) for part, nbytes in parts.items()}
        for contender, parts in found["memory"].items()
    }
    bandwidth = found["machine"].pop("read_bandwidth", None)
    run = {
        "published": True,
        "schema": found["schema"],
        "command": re.sub(r" --json \S+", "", found["command"]),
        **({"remark": remark} if remark else {}),
        "machine": found["machine"] | ({"commit": commit} if commit else {}),
        "model": found["model"],
        **({} if bandwidth is None else {"read_bandwidth": rounded(bandwidth)}),
        **{kind: published(kind, each, first) for kind, each in results.items()},
        **({"memory_mib": memory} if memory else {}),
    }
    published_as.write_text(json.dumps(run, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
