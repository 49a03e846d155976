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
    VLLM(),
    SGLang(),
]
ON_CPU = ("hf-eager", "compiled-llm:cuda-graphs")
"""What runs on a CPU by default: there, the other modes are slower or the same."""


def choose(names: str, device_type: str) -> list[Contender]:
    """Return contenders by name, in the order of ``ALL``.

    Args:
        names: names with commas between; ``all``; or ``default``: all on CUDA, ``ON_CPU`` on a CPU.
        device_type: ``cuda`` or ``cpu``.

    Raises:
        ValueError: there is no such contender.
    """
    if names == "default":
        return [contender for contender in ALL if device_type != "cpu" or contender.name in ON_CPU]
    return list(ALL) if names == "all" else _named([name.strip() for name in names.split(",")])


def _named(names: Sequence[str]) -> list[Contender]:
    known = [contender.name for contender in ALL]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--contenders: no {', '.join(unknown)}; there are {', '.join(known)}, all and default")
    return [contender for contender in ALL if contender.name in names]
