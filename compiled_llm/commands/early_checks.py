"""Checks that need no torch, whose import takes seconds."""

from __future__ import annotations

import ctypes
import importlib.util


def check_driver(device: str) -> None:
    """Check what ``--device`` says.

    Raises:
        ValueError: it is ``cuda``, and there is no driver, so that torch will see no device.
    """
    if device == "cuda" and not has_driver():
        raise ValueError("--device cuda: there is no CUDA driver here (libcuda.so.1); use --device cpu")


def check_package(module: str, extra: str) -> None:
    """Check that a package is installed that one of our extras brings.

    Raises:
        RuntimeError: it is not.
    """
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it would be in
        found = False
    if not found:
        raise RuntimeError(f"this command needs {module}: pip install '.[{extra}]' in the checkout")


def check_server_packages(http: bool) -> None:
    """Check that what an engine process imports is installed, and with ``http`` what serves HTTP.

    Raises:
        RuntimeError: it is not.
    """
    for module in ("msgspec", *(("fastapi", "httptools", "prometheus_client", "uvicorn") if http else ())):
        check_package(module, "server")


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
