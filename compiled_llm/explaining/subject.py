"""The subject of a report: the model, the versions and the machine, and when it was looked at."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from compiled_llm.compat.own_version import OWN_VERSION
from compiled_llm.explaining.cpu import cpu_name


def subject_of(model: PreTrainedModel) -> dict[str, Any]:
    return {
        "model": type(model).__name__,
        "name": str(model.name_or_path),
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "machine": _machine(model.device),
        "versions": {
            "compiled_llm": OWN_VERSION,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "Python": platform.python_version(),
        },
        "date": time.strftime("%Y-%m-%d %H:%M %z"),
    }


def head_rows(data: dict[str, Any]) -> dict[str, str]:
    others = {**data["versions"]}
    own = others.pop("compiled_llm")
    return {
        "weights": f"{_rounded(data['parameters'])} parameters, {data['dtype']}",
        **({"packed weights": _counted(data["packed_weights"])} if data["packed_weights"] else {}),
        **({"from": data["name"]} if data["name"] else {}),
        "device": f"{data['device']}: {data['machine']}",
        "compiled_llm": own,
        "versions": ", ".join(f"{name} {number}" for name, number in others.items()),
        "date": data["date"],
    }


def title_of(data: dict[str, Any]) -> str:
    named = f" ({Path(*Path(data['name']).parts[-2:])})" if data["name"] else ""
    return f"{data['model']}{named} on {data['device']}"


def _counted(packed_weights: dict[str, int]) -> str:
    return ", ".join(f"{count} {words}" for words, count in packed_weights.items())


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{cpu_name()}, {os.cpu_count()} cores, {threads} thread{'s' * (threads > 1)}"


def _rounded(parameters: int) -> str:
    """Write 134,515,008 as ``134.5 M``."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if parameters >= size:
            return f"{parameters / size:.1f} {unit}"
    return str(parameters)
