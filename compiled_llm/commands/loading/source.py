"""Where a model is, by the name that a user gives; told before torch is imported, which takes seconds."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple

from compiled_llm.demo_model.gguf import require_gguf
from compiled_llm.execution.reporting.progress import ProgressDisplay

DEMO = "demo"  # the name of the demo model; ``loading.load`` fetches it

_TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "spiece*",
    "tekken.json",
    "*.model",
    "*.spm",
    "*.tiktoken",
    "*.bpe",
    "*.bpe.codes",
)
"""Names of the files that transformers' tokenizers are loaded from, one of which each tokenizer has."""


class Source(NamedTuple):
    """A model's place for `from_pretrained`: a folder or hub id, and the GGUF file in it if it is one."""

    name: str
    location: str
    gguf_file: str | None = None
    is_local: bool = True
    tokenizer: str | None = None  # the folder or hub id of another tokenizer than the model's
    chat_template: str | None = None  # the text of another template than the tokenizer's

    @property
    def tokenizer_place(self) -> tuple[str, str | None]:
        return (self.location, self.gguf_file) if self.tokenizer is None else (self.tokenizer, None)

    @property
    def public_name(self) -> str:
        """The model's name for clients, who see no folders of this machine."""
        if not self.is_local or self.name == DEMO:
            return self.name
        path = Path(self.name).expanduser().resolve()
        return path.name if self.gguf_file is None else path.stem


def locate(
    model: str, progress: bool = True, tokenizer: str | None = None, chat_template: Path | None = None
) -> Source:
    """Return where a model is: here, or on the hub.

    Raises:
        FileNotFoundError: there is no such folder or file.
        ValueError: it is a file or a folder, and not a model's; or the template's file is no text.
        RuntimeError: the hub does not have it, or a package is missing.
    """
    template = None if chat_template is None else _template_of(chat_template)
    place = None if tokenizer is None else _tokenizer_place(tokenizer, progress)
    return _located(model, progress, own_tokenizer=place is None)._replace(tokenizer=place, chat_template=template)


def _located(model: str, progress: bool, own_tokenizer: bool) -> Source:
    if model == DEMO:
        return Source(model, model)
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ValueError(f"model {model!r} is a file, but not a .gguf: name a GGUF file, or the model's folder")
        require_gguf()
        return Source(model, str(path.parent), path.name)
    if path.is_dir():
        _check_folder(path, own_tokenizer)
        return Source(model, str(path))
    if _cannot_be_hub_id(model):
        raise FileNotFoundError(f"model {model!r}: there is no such file or folder; name one, a hub id, or `demo`")
    _ask_hub(model, progress)
    return Source(model, model, is_local=False)


def _tokenizer_place(tokenizer: str, progress: bool) -> str:
    path = Path(tokenizer).expanduser()
    if path.is_dir():
        if not _has_tokenizer(path):
            raise ValueError(f"--tokenizer {tokenizer}: the folder holds no tokenizer")
        return str(path)
    if path.is_file() or _cannot_be_hub_id(tokenizer):
        raise ValueError(f"--tokenizer {tokenizer}: there is no such folder; name one, or a hub id")
    _ask_hub(tokenizer, progress)
    return tokenizer


def _template_of(file: Path) -> str:
    """Return the text of a chat template, of which Jinja has read that it is one."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        text = file.expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--chat-template {file}: is not UTF-8 text: {error.reason}") from error
    except OSError as error:
        raise ValueError(
            f"--chat-template {file}: cannot be read: {error.strerror}; name a file with a Jinja template"
        ) from error
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except TemplateSyntaxError as error:
        if "'generation'" not in str(error):  # a tag of transformers' own
            where = f"--chat-template {file}, line {error.lineno}"
            raise ValueError(f"{where}: is no Jinja template: {error.message}") from error
    return text


def _ask_hub(name: str, progress: bool) -> None:
    with ProgressDisplay(progress).task(f"no folder or file {name!r} here: asking the hub"):
        from compiled_llm.commands.loading.hub import check_on_hub  # slow to import

        check_on_hub(name)


def _check_folder(folder: Path, own_tokenizer: bool) -> None:
    if (folder / "config.json").exists():
        if own_tokenizer:
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
    if not _has_tokenizer(folder):
        raise ValueError(
            f"model {str(folder)!r}: the folder holds no tokenizer, which model.save_pretrained does not write; "
            f"add it with tokenizer.save_pretrained({str(folder)!r}), or name another one's folder with --tokenizer"
        )


def _has_tokenizer(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES)


def _cannot_be_hub_id(model: str) -> bool:
    return not model or model.startswith(("/", ".", "~")) or model.count("/") > 1 or model.lower().endswith(".gguf")
