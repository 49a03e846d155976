"""A model and its tokenizer from whatever names one: `demo`, a folder, a GGUF file or a hub id."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.import_utils import is_peft_available
from transformers.utils.peft_utils import find_adapter_config_file

from compiled_llm.commands.loading.cut_files import cut_file
from compiled_llm.commands.loading.source import DEMO, Source, locate
from compiled_llm.compat.huggingface import attention_implementation
from compiled_llm.demo_model.bars import without_bars
from compiled_llm.demo_model.folder import folder as demo_folder
from compiled_llm.demo_model.gguf import parsed_once
from compiled_llm.execution.reporting.progress import ProgressDisplay
from compiled_llm.execution.threads.busy_cores import other_work
from compiled_llm.model.classifiers import names_classifier
from compiled_llm.model.inputs import vocabulary_of

if TYPE_CHECKING:
    from transformers.models.auto.auto_factory import _BaseAutoModelClass


def load(
    model: str | Source = "demo",
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "auto",
    progress: bool = True,
    sees: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal LM, or a classifier, and its tokenizer; one that ``sees`` with what encodes images.

    Raises:
        FileNotFoundError: there is no such folder or file.
        ValueError: the dtype or device is unknown or unavailable, or a folder is not a model's.
        RuntimeError: the demo model cannot be fetched, or what was found cannot be loaded.
    """
    device = device_of(device)
    dtype = dtype_of(dtype, device)
    if progress and device.type == "cpu" and (busy := other_work()) is not None:
        warning = f"compiled_llm: {busy}; answers are slow, and OMP_NUM_THREADS=1 is often faster"
        Console(stderr=True, highlight=False).print(warning, soft_wrap=True)
    source = fetched(locate(model, progress) if isinstance(model, str) else model, progress)
    shows_bars = progress and not source.is_local  # of a download from the hub, HuggingFace's bars tell most
    display = ProgressDisplay(progress, animated=not shows_bars)
    # Not left out: transformers would ask at the terminal, or read the answer from a pipe.
    options: dict[str, Any] = {"trust_remote_code": False}
    if source.gguf_file is not None:
        options["gguf_file"] = source.gguf_file
    try:
        parsing = nullcontext() if source.gguf_file is None else parsed_once()
        with nullcontext() if shows_bars else without_bars(), parsing:
            with display.task("loading the tokenizer"):
                tokenizer = _tokenizer_of(source)
            with display.task("loading the weights"):
                config = _config_of(source)
                _refuse_hub_kernels(source.name, config)
                loaded: Any = _auto_of(config, sees).from_pretrained(source.location, dtype=dtype, **options)
    except Exception as error:  # of a file that is cut, readers raise all kinds
        if (cut := cut_file(source.location, source.gguf_file)) is not None:
            raise RuntimeError(f"{source.name} cannot be loaded: {cut}") from error
        if not isinstance(error, (OSError, ValueError, SafetensorError, UnpicklingError)):
            raise
        raise RuntimeError(f"{source.name} cannot be loaded as a causal LM: {_reason(error)}") from error
    if source.tokenizer is not None:
        _check_vocabulary(source.tokenizer, tokenizer, loaded)
    _prepare_for_batches(tokenizer)
    return loaded.to(device), tokenizer


def device_of(device: torch.device | str) -> torch.device:
    """Return a device by its name, ``auto`` for CUDA if there is one; ValueError if it is unknown or unavailable."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is not a device: use auto, cpu or cuda") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={str(device)!r}, but torch {torch.__version__} sees no CUDA device here: use cpu")
    return chosen


def dtype_of(dtype: torch.dtype | str, device: torch.device) -> torch.dtype:
    """Return a dtype by its name; ``auto`` is float32 on the CPU, else bfloat16; ValueError if it is unknown."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    chosen = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point:
        raise ValueError(f"dtype={dtype!r} is not a dtype for weights: use auto, float32, bfloat16 or float16")
    return chosen


def fetched(source: Source, progress: bool = True) -> Source:
    """Return where a model is on this machine or the hub; the demo model is fetched, or RuntimeError says why not."""
    return source._replace(location=str(demo_folder(progress))) if source.name == DEMO else source


def _tokenizer_of(source: Source) -> PreTrainedTokenizerBase:
    place, gguf_file = source.tokenizer_place
    options = {} if gguf_file is None else {"gguf_file": gguf_file}
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(place, trust_remote_code=False, **options)
    if source.chat_template is not None:
        tokenizer.chat_template = source.chat_template
    return tokenizer


def _check_vocabulary(name: str, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    largest = max(tokenizer.get_vocab().values(), default=0)
    tokens = vocabulary_of(model)
    if largest >= tokens:
        raise ValueError(f"--tokenizer {name}: its token ids go up to {largest}, and the model's to {tokens - 1}")


def _prepare_for_batches(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.padding_side = "left"  # a decoder-only model continues at the right end
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token


def _config_of(source: Source) -> PretrainedConfig | None:
    """Return a model's config; None of a GGUF file, which says little."""
    if source.gguf_file is not None:
        return None
    config: PretrainedConfig = AutoConfig.from_pretrained(_base_of(source.location), trust_remote_code=False)
    return config


def _auto_of(config: PretrainedConfig | None, sees: bool) -> type[_BaseAutoModelClass]:
    if config is not None and names_classifier(config):
        return AutoModelForSequenceClassification
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def _refuse_hub_kernels(model: str, config: PretrainedConfig | None) -> None:
    # A config can name a repository of compiled attention kernels, which transformers would fetch and run.
    if config is None:
        return
    parts = [config, *(part for name in config.sub_configs if (part := getattr(config, name, None)) is not None)]
    for name in map(attention_implementation, parts):
        if name is not None and "/" in name:
            raise RuntimeError(
                f"{model} cannot be loaded: its config asks for attention kernels from the hub ({name}), which "
                "compiled-llm does not fetch; load it in Python with an attn_implementation of your choice, and wrap it"
            )


def _base_of(location: str) -> str:
    """Return where transformers takes the weights from: with PEFT installed, an adapter's files can name its base."""
    file = find_adapter_config_file(location) if is_peft_available() else None
    if file is None or (Path(location) / "config.json").exists():
        return location
    return str(json.loads(Path(file).read_text(encoding="utf-8"))["base_model_name_or_path"])


def _reason(error: BaseException) -> str:
    if "trust_remote_code" in str(error):
        return (
            "it brings Python code of its own, which compiled-llm does not run; when you have read that code, load the "
            "model in Python with trust_remote_code=True, and wrap it"
        )
    if isinstance(error, UnpicklingError):
        return "its weights are a pickle that is damaged, or asks for more than tensors and so for code"
    return str(error).strip() or type(error).__name__
