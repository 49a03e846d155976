"""Building FlashInfer's kernels, which takes minutes on a fresh machine: all modules at the same time."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress

import torch

from attention_ops.cases import Heads, smallest
from attention_ops.contenders import OpContender
from attention_ops.inputs import Inputs


def build(
    contenders: Sequence[OpContender],
    heads: Heads,
    device: torch.device,
    dtype: torch.dtype,
    log: Callable[[str], object],
) -> None:
    """Build or load each module that contenders need, by the first that needs it; what fails, fails again later."""
    first = {one.builds: one for one in reversed(contenders) if one.builds}
    if device.type != "cuda" or not first:
        return
    log("importing FlashInfer")
    with suppress(Exception):
        importlib.import_module("flashinfer")
    with ThreadPoolExecutor(len(first)) as pool:
        futures: dict[str, Future[None]] = {}
        for module in sorted(first, key=lambda name: bool(first[name].after)):
            earlier = futures.get(first[module].after)
            futures[module] = pool.submit(_build, first[module], heads, device, dtype, earlier)
        waiting = dict.fromkeys(sorted(futures))
        names = {future: name for name, future in futures.items()}
        log(f"building or loading FlashInfer's kernels: {', '.join(waiting)}")
        for future in as_completed(futures.values()):
            del waiting[names[future]]
            if waiting:
                log(f"building or loading FlashInfer's kernels: {', '.join(waiting)}")


def _build(
    contender: OpContender, heads: Heads, device: torch.device, dtype: torch.dtype, earlier: Future[None] | None
) -> None:
    if earlier is not None:
        earlier.result()  # two threads must not write the files of one module
    with suppress(Exception), torch.inference_mode(), torch.cuda.device(device):
        launch = contender.prepare(Inputs(smallest(contender.kinds[-1]), heads, device, dtype))
        if not isinstance(launch, str):
            launch(0)
            torch.cuda.synchronize(device)
