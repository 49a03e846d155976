"""Where a model is, by the name that a user gives; told before torch is imported, which takes seconds."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple

from compiled_llm.demo_model.gguf import require_gguf
from compiled_llm.execution.reporting.progress import ProgressDisplay

DEMO = "demo"
"""The name of the demo model; ``loading.load`` fetches it."""

_TOKENIZER_FILES = (
    *("tokenizer*", "vocab*", "merges.txt", "spiece*", "tekken.json"),
    *("*.model", "*.spm", "*.tiktoken", "*.bpe", "*.bpe.codes"),
)
"""Names of the files that transformers' tokenizers are loaded from, one of which each tokenizer has."""


class Source(NamedTuple):
    """Where `from_pretrained` finds a model: a folder or hub id, and the GGUF file in it if it is one."""

    name: str
    location: str
    gguf_file: str | None = None
    is_local: bool = True

    @property
    def public_name(self) -> str:
        """The model's name for clients, who see no folders of this machine."""
        if not self.is_local or self.name == DEMO:
            return self.name
        path = Path(self.name).expanduser().resolve()
        return path.name if self.gguf_file is None else path.stem


def locate(model: str, progress: bool = True) -> Source:
    """Return where a model is: here, or on the hub.

    Args:
        model: ``demo``, a folder, a GGUF file or a hub id.
        progress: show on stderr what is asked.

    Raises:
        FileNotFoundError: there is no such folder or file.
        ValueError: it is a file or a folder, and not a model's.
        RuntimeError: the hub does not have it, or a package is missing.
    """
    if model == DEMO:
        return Source(model, model)
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ValueError(f"model {model!r} is a file, but not a .gguf: name a GGUF file, or the model's folder")
        require_gguf()
        return Source(model, str(path.parent), path.name)
    if path.is_dir():
        _check_folder(path)
        return Source(model, str(path))
    if _cannot_be_hub_id(model):
        raise FileNotFoundError(f"model {model!r}: there is no such file or folder; name one, a hub id, or `demo`")
    with ProgressDisplay(progress).task(f"no folder or file {model!r} here: asking the hub"):
        from compiled_llm.commands.loading.hub import check_on_hub  # slow to import

        check_on_hub(model)
    return Source(model, model, is_local=False)


def _check_folder(folder: Path) -> None:
    if (folder / "config.json").exists():
        _check_tokenizer(folder)
        return
    if (folder / "adapter_config.json").exists():
        if importlib.util.find_spec("peft") is None:
            raise RuntimeError(
                f"model {str(folder)!r}: the folder holds an adapter alone: install peft, to find its base"
            )
        return
    ggufs = sorted(folder.glob("*.gguf"))
    way_out = f"name its GGUF file: {ggufs[0]}" if ggufs else "name a folder that save_pretrained has written"
    raise ValueError(f"model {str(folder)!r}: the folder holds no config.json; {way_out}")


def _check_tokenizer(folder: Path) -> None:
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        raise ValueError(
            f"model {str(folder)!r}: the folder holds no tokenizer, which model.save_pretrained does not write; "
            f"add it with tokenizer.save_pretrained({str(folder)!r})"
        )


def _cannot_be_hub_id(model: str) -> bool:
    return not model or model.startswith(("/", ".", "~")) or model.count("/") > 1 or model.lower().endswith(".gguf")
