"""What is computed: rows with so many new tokens each, in layers of known models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from cold_launches import LARGER_THAN_CACHES, LAUNCHES
from torch import Tensor

from compiled_llm_ops.contracts import GatedDeltaRule, SelectiveScan

KINDS = ("prefill", "decode")


class Layer(NamedTuple):
    """The recurrence of a model's layers; sizes as of the op.

    Attributes:
        model: which has it.
        op: ``gated_delta_rule`` or ``selective_scan``.
        heads: H.
        size: D of a delta rule, P of a scan.
        other: V of a delta rule, N of a scan.
        groups: K of a delta rule, G of a scan.
        finer: a decay of each channel of a delta rule, or of each number of a scan.
    """

    model: str
    op: str
    heads: int
    size: int
    other: int
    groups: int
    finer: bool = False


LAYERS = {
    "qwen3.5": Layer("Qwen3.5", "gated_delta_rule", 32, 128, 128, 16),
    "kimi": Layer("Kimi Linear", "gated_delta_rule", 32, 128, 128, 32, finer=True),
    "nemotron-h": Layer("Nemotron-H 8B (Mamba 2)", "selective_scan", 128, 64, 128, 8),
    "bamba": Layer("Bamba 9B (Mamba 2)", "selective_scan", 128, 64, 256, 1),
    "falcon-mamba": Layer("Falcon Mamba 7B (Mamba 1)", "selective_scan", 8192, 1, 16, 1, finer=True),
}
TINY = {
    "qwen3.5": LAYERS["qwen3.5"]._replace(heads=4, size=16, other=16, groups=2),
    "kimi": LAYERS["kimi"]._replace(heads=2, size=16, other=16, groups=2),
    "nemotron-h": LAYERS["nemotron-h"]._replace(heads=4, size=8, other=16, groups=2),
    "bamba": LAYERS["bamba"]._replace(heads=4, size=8, other=16, groups=1),
    "falcon-mamba": LAYERS["falcon-mamba"]._replace(heads=32, other=8),
}


class Case(NamedTuple):
    """Rows of a batch.

    Attributes:
        kind: one of ``KINDS``.
        name: in tables.
        counts: new tokens of each row.
    """

    kind: str
    name: str
    counts: tuple[int, ...]

    def nbytes(self, layer: Layer, itemsize: int) -> int:
        """Return the bytes that have to move: tokens and results once, states of rows twice."""
        tokens, states = sum(self.counts), layer.heads * layer.size * layer.other * 4
        if layer.op == "gated_delta_rule":
            decays = layer.heads * (layer.size if layer.finer else 1) * 4
            each = (2 * layer.groups * layer.size + 2 * layer.heads * layer.other + layer.heads) * itemsize + decays
        else:
            each = 2 * (layer.heads * layer.size + layer.groups * layer.other) * itemsize + layer.heads * 4
        return tokens * each + 2 * len(self.counts) * states


MIXED = (512, 1, 1500, 64, 300, 1000, 7, 712)
CASES = (
    Case("prefill", "1 x 1,024", (1024,)),
    Case("prefill", "1 x 4,096", (4096,)),
    Case("prefill", "8 x 1,024", (1024,) * 8),
    Case("prefill", "1 x 64", (64,)),
    Case("prefill", "4,096 in 8 rows", MIXED),
    Case("prefill", "512 beside 63 x 1", (*(1,) * 63, 512)),
    *(Case("decode", f"{rows} x 1", (1,) * rows) for rows in (1, 8, 64)),
)
QUICK = ("1 x 1,024", "8 x 1,024", "8 x 1")
SMALL = (Case("prefill", "3 rows", (70, 1, 20)), Case("prefill", "1 x 66", (66,)), Case("decode", "2 x 1", (1, 1)))
"""For ``--size tiny``."""


class Inputs:
    """Arguments of the op, as many times as no cache holds what one launch reads.

    Attributes:
        layer: whose they are.
        case: the rows.
        device: of all tensors.
        args: of each launch; one after another.
    """

    def __init__(self, layer: Layer, case: Case, device: torch.device, dtype: torch.dtype) -> None:
        self.layer, self.case, self.device, self.dtype = layer, case, device, dtype
        random = torch.Generator(device).manual_seed(0)
        copies = min(LAUNCHES - 1, LARGER_THAN_CACHES // case.nbytes(layer, dtype.itemsize)) + 1
        made = self._delta if layer.op == "gated_delta_rule" else self._scan
        self.args = [made(random) for _ in range(copies if device.type == "cuda" else 1)]

    @property
    def places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Where rows' tokens begin, and the entries that they read and write."""
        rows = len(self.case.counts)
        starts = torch.tensor([0, *self.case.counts], device=self.device).cumsum(0).int()
        return starts, *torch.arange(2 * rows, dtype=torch.int32, device=self.device).split(rows)

    def _random(self, random: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=self.device).to(self.dtype)

    def _uniform(self, random: torch.Generator, *shape: int) -> Tensor:
        return torch.rand(shape, generator=random, device=self.device)

    def _delta(self, random: torch.Generator) -> GatedDeltaRule:
        _, _, heads, size, value, key_heads, finer = self.layer
        tokens, rows = sum(self.case.counts), len(self.case.counts)
        query, key = (self._random(random, tokens, key_heads, size) for _ in range(2))
        decay = -(self._uniform(random, tokens, heads, *[size] * finer) ** 3)
        beta = self._uniform(random, tokens, heads).to(self.dtype)
        states = torch.randn(2 * rows, heads, size, value, generator=random, device=self.device)
        given = query, key, self._random(random, tokens, heads, value), decay, beta, states
        return GatedDeltaRule(*given, *self.places, size**-0.5, True)

    def _scan(self, random: torch.Generator) -> SelectiveScan:
        _, _, heads, size, numbers, groups, finer = self.layer
        tokens, rows = sum(self.case.counts), len(self.case.counts)
        dt, a = self._uniform(random, tokens, heads), -self._uniform(random, heads, *[numbers] * finer)
        b, c = (self._random(random, tokens, groups, numbers) for _ in range(2))
        states = torch.randn(2 * rows, heads, size, numbers, generator=random, device=self.device)
        return SelectiveScan(self._random(random, tokens, heads, size), dt, a, b, c, states, *self.places)


def layers_of(names: Sequence[str], size: str) -> list[Layer]:
    known = TINY if size == "tiny" else LAYERS
    return [known[name] for name in names]


def cases_of(kinds: Sequence[str], size: str, quick: bool) -> list[Case]:
    known = SMALL if size == "tiny" else CASES
    return [case for case in known if case.kind in kinds and (case.name in QUICK or not quick or size == "tiny")]
