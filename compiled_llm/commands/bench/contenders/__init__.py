"""The contenders, in the order in which they run; the first that runs is what the others are compared with."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_llm.commands.bench.contender import Contender
from compiled_llm.commands.bench.contenders.hf_eager import HFEager
from compiled_llm.commands.bench.contenders.hf_static import HFStatic
from compiled_llm.commands.bench.contenders.ours import Ours
from compiled_llm.commands.bench.contenders.sglang import SGLang
from compiled_llm.commands.bench.contenders.vllm import VLLM

ALL: list[Contender] = [
    HFEager(),
    HFStatic(),
    Ours("eager"),
    Ours("compile"),
    Ours("reduce-overhead"),
    Ours("cuda-graphs"),
    Ours("piecewise"),
    Ours("cuda-graphs", "flashinfer"),
    VLLM(),
    SGLang(),
]
ON_CPU = ("hf-eager", "compiled-llm:compile")
"""What runs on a CPU by default: there, the mode that ``wrap`` has by default is this one."""
NOT_BY_DEFAULT = ("compiled-llm:pieces", "compiled-llm:cuda-graphs:flashinfer")
"""What no user gets by default; these run if they are named."""


def choose(names: str, device_type: str) -> list[Contender]:
    """Return contenders by name, in the order of ``ALL``.

    Args:
        names: comma-separated names, ``ours`` for what ``wrap`` does by default; ``all``; or ``default``: ``ON_CPU`` on
            a CPU, on CUDA all but ``NOT_BY_DEFAULT``.
        device_type: ``cuda`` or ``cpu``.

    Raises:
        ValueError: there is no such contender.
    """
    if names == "all":
        return list(ALL)
    if names != "default":
        ours = ON_CPU[-1] if device_type == "cpu" else "compiled-llm:cuda-graphs"
        return _named([ours if name.strip() == "ours" else name.strip() for name in names.split(",")])
    if device_type == "cpu":
        return [contender for contender in ALL if contender.name in ON_CPU]
    return [contender for contender in ALL if contender.name not in NOT_BY_DEFAULT]


def _named(names: Sequence[str]) -> list[Contender]:
    known = [contender.name for contender in ALL]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--contenders: no {', '.join(unknown)}; there are {', '.join(known)}, ours, all and default")
    return [contender for contender in ALL if contender.name in names]
