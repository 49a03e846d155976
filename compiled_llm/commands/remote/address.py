"""`--server`: where a server is, and the key that it takes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from compiled_llm.commands.early_checks import check_package

SERVER = "Server"

Server = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="ADDRESS",
        help="The server: a URL of OpenAI's API, such as http://localhost:8000, or the path of a Unix socket "
        "(`compiled-llm serve --uds`).",
        rich_help_panel=SERVER,
    ),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file",
        metavar="PATH",
        help="Send the key in this file to the server. COMPILED_LLM_API_KEY can hold the key instead.",
        rich_help_panel=SERVER,
    ),
]


def is_url(address: str) -> bool:
    return address.startswith(("http://", "https://"))


def check_server(address: str, api_key_file: Path | None) -> None:
    """Check what can be told of an address before a connection.

    Raises:
        ValueError: it is no URL and no path, or a socket that takes no key.
        RuntimeError: a package is missing.
    """
    if is_url(address):
        return
    if "://" in address:
        raise ValueError(f"--server {address}: give http://, https://, or the path of a socket")
    if api_key_file is not None:
        raise ValueError(f"--api-key-file {api_key_file}: a socket takes no key, since only your user may open it")
    check_package("msgspec", "server")


def key_of(api_key_file: Path | None) -> str | None:
    """Return the key that requests bear: a file's first line, or the environment's; ValueError if the file has none."""
    if api_key_file is None:
        return os.environ.get("COMPILED_LLM_API_KEY") or None
    try:
        lines = api_key_file.expanduser().read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--api-key-file {api_key_file}: cannot be read: {error}") from error
    if not lines:
        raise ValueError(f"--api-key-file {api_key_file}: the file has no key")
    return lines[0]
