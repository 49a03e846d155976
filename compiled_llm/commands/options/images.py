"""Images on the command line: files that are shown to the model with a question."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compiled_llm.features import check_has

_TYPES = {".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".gif": "gif"}


def check_images(files: Sequence[Path], asked_by: str = "--image") -> None:
    """Raise ValueError if a file that ``asked_by`` names cannot be shown."""
    if files:
        check_has("images", asked_by)
    if missing := [file for file in files if not file.expanduser().is_file()]:
        raise ValueError(f"{asked_by} {missing[0]}: there is no such file")


def seen_content(text: str, files: Sequence[Path]) -> str | list[dict[str, Any]]:
    """Return the content of a message: a text, with files in parts before it if there are some."""
    if not files:
        return text
    shown = [{"type": "image", "image": str(file.expanduser())} for file in files]
    return [*shown, {"type": "text", "text": text}]


def images_in(messages: Sequence[dict[str, Any]]) -> list[Path]:
    """Return the files that messages show."""
    return [Path(part["image"]) for message in messages for part in _parts(message) if part["type"] == "image"]


def with_data(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as OpenAI's API takes them, with the files that they show; ValueError if one cannot be read."""
    return [
        message if not _parts(message) else {**message, "content": [_sent(part) for part in _parts(message)]}
        for message in messages
    ]


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return content if isinstance(content, list) else []


def _sent(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return part
    file = Path(part["image"])
    try:
        data = base64.b64encode(file.read_bytes()).decode()
    except OSError as error:
        raise ValueError(f"the image {file} cannot be read: {error.strerror}") from error
    kind = _TYPES.get(file.suffix.lower(), "png")  # which the server tells by the file's header
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}}
