"""Experts alone: our ops, and HuggingFace's implementations, on the same layers and choices, cold as in a model.

python tools/bench/experts.py --check --json experts.json
python tools/bench/experts.py --rows 1,64 --contenders fused_experts,batched_mm
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import torch
import typer
from attention_ops.measuring import LostDeviceError, Measured, measured
from cold_launches import LARGER_THAN_CACHES, LAUNCHES
from common import Bench, Commit, DeviceName, Json, bench, integers
from torch import Tensor
from transformers import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeExperts

from compiled_llm.commands.bench.report import Result
from compiled_llm.commands.bench.tables import TABLES, Columns, Table, groups, number, percent
from compiled_llm.compat.experts import own_forward
from compiled_llm.compat.huggingface import set_experts_implementation
from compiled_llm.model.layers.experts import experts_forward

SIZES: dict[str, dict[str, int]] = {
    "35B-A3B": {},
    "tiny": {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4},
}
"""What differs from `Qwen3_5MoeTextConfig()`; `tiny` runs anywhere, and says nothing about speed."""
OURS, HUGGINGFACES = "fused_experts", ("batched_mm", "grouped_mm", "eager")
CONTENDERS = (OURS, *HUGGINGFACES)
TOLERANCE = 0.02
Compute = Callable[[int], Tensor]


class Layers:
    """Layers of experts that no cache holds together, and choices that are others in each launch."""

    def __init__(self, config: Any, rows: int, device: torch.device, dtype: torch.dtype) -> None:
        self.rows, self.experts, self.chosen = rows, config.num_experts, config.num_experts_per_tok
        generator = torch.Generator(device).manual_seed(rows)
        first = self._layer(config, device, dtype, generator)
        self.of_an_expert = sum(own.nbytes for own in first.parameters()) // self.experts
        more = min(LAUNCHES, LARGER_THAN_CACHES // (self.of_an_expert * self.experts)) if device.type == "cuda" else 0
        self.layers = [first, *(self._layer(config, device, dtype, generator) for _ in range(max(1, more)))]
        self.states = torch.randn(rows, config.hidden_size, device=device, dtype=dtype, generator=generator)
        self.choices = [self._choices(generator) for _ in range(LAUNCHES)]

    @staticmethod
    def _layer(config: Any, device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Any:
        with device:
            layer = Qwen3_5MoeExperts(config).to(dtype)
        for weight in layer.parameters():
            weight.requires_grad_(False).normal_(std=weight.shape[-1] ** -0.5, generator=generator)
        return layer

    def _choices(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        shape = self.rows, self.experts
        scores = torch.randn(shape, device=self.states.device, generator=generator)
        weights, ids = scores.softmax(-1).topk(self.chosen)
        return ids, (weights / weights.sum(-1, keepdim=True)).to(self.states.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the experts that a launch chooses, on average."""
        counts = [len(ids.unique()) for ids, _ in self.choices]
        return self.of_an_expert * sum(counts) // len(counts)

    @property
    def flops(self) -> int:
        weights = self.of_an_expert // self.states.element_size()
        return 2 * self.rows * self.chosen * weights

    def computed_by(self, contender: str) -> Compute:
        """Return a launch by its number: with the next layer, and other choices."""

        def compute(number: int) -> Tensor:
            layer, (ids, weights) = self.layers[number % len(self.layers)], self.choices[number % len(self.choices)]
            if contender == OURS:
                return experts_forward(layer, self.states, ids, weights)
            set_experts_implementation(layer.config, contender)
            return own_forward(layer)(layer, self.states, ids, weights)

        return compute


def main(
    size: Annotated[str, typer.Option(help=f"Whose experts: {', '.join(SIZES)}.")] = "35B-A3B",
    rows: Annotated[str, typer.Option(help="Rows of a launch, comma-separated.")] = "1,8,64,4096",
    contenders: Annotated[str, typer.Option(help=f"Some of {', '.join(CONTENDERS)}.")] = ",".join(CONTENDERS),
    check: Annotated[bool, typer.Option("--check", help="First compare each result with the loop in float32.")] = False,
    device: DeviceName = "auto",
    json: Json = None,
    commit: Commit = None,
) -> None:
    """Measure a layer's experts alone; what cannot run is a row that says why."""
    if size not in SIZES:
        raise SystemExit(f"--size {size}: there are {', '.join(SIZES)}")
    chosen = [name.strip() for name in contenders.split(",") if name.strip()]
    if not chosen or {*chosen} - {*CONTENDERS}:
        raise SystemExit(f"--contenders {contenders}: there are {', '.join(CONTENDERS)}")
    with bench(size, device, [], json, commit, bandwidth=True) as run, torch.inference_mode():
        run.report.model |= {"name": f"experts of Qwen3.5-MoE, {size}", "weights": "random"}
        try:
            for count in integers(rows):
                measure_all(run, Qwen3_5MoeTextConfig(**SIZES[size]), count, chosen, check)
        except LostDeviceError as error:
            run.report.failures.append(f"{error}; the device is unusable, so what would come after it is missing")


def measure_all(run: Bench, config: Any, rows: int, contenders: Sequence[str], check: bool) -> None:
    setup = run.setup
    assert run.report.read_bandwidth is not None
    setup.log(f"{rows} rows: filling layers")
    setup.free_memory()  # of the last case
    layers = Layers(config, rows, setup.device, setup.dtype)
    expected = in_float32(layers) if check else None
    for contender in contenders:
        setup.log(f"{rows} rows: {contender}")
        found = measure(layers, contender, expected)
        differs = found.off is not None and not found.off <= TOLERANCE
        figures = {} if found.us is None else figures_of(layers, found.us, run.report.read_bandwidth)
        result = found._asdict() | {"contender": contender, "rows": rows, "differs": differs, "figures": figures}
        sizes = {"nbytes": layers.nbytes, "flops": layers.flops, "experts": layers.experts, "chosen": layers.chosen}
        run.add("experts", {name: value for name, value in result.items() if name != "us"} | sizes)
        if differs:
            run.report.failures.append(f"{rows} rows: {contender} differs from the loop in float32")


def in_float32(layers: Layers) -> Tensor:
    """Return what the first launch gives, expert by expert in float32."""
    layer, (ids, weights) = layers.layers[0], layers.choices[0]
    out = torch.zeros(layers.states.shape, device=layers.states.device)
    for expert in ids.unique().tolist():
        rows, places = (ids == expert).nonzero(as_tuple=True)
        gate, up = (layers.states[rows].float() @ layer.gate_up_proj[expert].float().T).chunk(2, -1)
        answers = (layer.act_fn(gate) * up) @ layer.down_proj[expert].float().T
        out.index_add_(0, rows, answers * weights[rows, places, None].float())
    return out


def measure(layers: Layers, contender: str, expected: Tensor | None) -> Measured:
    """Measure one contender; with ``expected`` compare its first result. Raises as ``measured``."""

    def off(result: Tensor) -> float:
        assert expected is not None
        return float((result.float() - expected).norm() / expected.norm())

    compute = layers.computed_by(contender)
    return measured(lambda: compute, layers.states.device, len(layers.layers), None if expected is None else off)


def figures_of(layers: Layers, us: float, bandwidth: float) -> dict[str, float]:
    per_second = 1e6 / us
    return {
        "us": us,
        "bytes_per_s": layers.nbytes * per_second,
        "of_bandwidth": layers.nbytes * per_second / bandwidth,
        "flops_per_s": layers.flops * per_second,
    }


def experts_tables(results: Sequence[Result]) -> Iterator[Table]:
    columns: Columns = {
        "rows": lambda result: f"{result['rows']:,}",
        "contender": lambda result: result["contender"],
        "us": lambda result: number(result["figures"]["us"]) if result["figures"] else "",
        "MB chosen": lambda result: number(result["nbytes"] / 1e6),
        "GB/s": lambda result: number(result["figures"]["bytes_per_s"] / 1e9) if result["figures"] else "",
        "of the read bandwidth": lambda result: percent(result["figures"].get("of_bandwidth")),
        "TFLOP/s": lambda result: number(result["figures"]["flops_per_s"] / 1e12) if result["figures"] else "",
        "off": lambda result: "" if result["off"] is None else f"{result['off']:.2%}{', DIFFERS' * result['differs']}",
        "timed": lambda result: result["timed"],
        "remark": lambda result: result["remark"],
    }
    first, ordered = results[0], [one for of_rows in groups(results, "rows") for one in of_rows]
    note = "Bytes are those of the experts that rows chose, each once, which is the least that a launch can read."
    yield Table(f"{first['chosen']} of {first['experts']} experts", ordered, columns, note, leading=2)


TABLES["experts"] = experts_tables

if __name__ == "__main__":
    typer.run(main)
