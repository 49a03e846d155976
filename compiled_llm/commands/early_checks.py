"""Checks that need no torch, whose import takes seconds."""

from __future__ import annotations

import ctypes
import importlib.util


def check_driver(device: str) -> None:
    """Raise ValueError for ``cuda`` if there is no driver, so that torch will see no device."""
    if device == "cuda" and not has_driver():
        raise ValueError("--device cuda: there is no CUDA driver here (libcuda.so.1); use --device cpu")


def check_package(module: str, extra: str) -> None:
    """Raise RuntimeError if a package is missing that one of our extras brings."""
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it would be in
        found = False
    if not found:
        raise RuntimeError(f"this command needs {module}: pip install '.[{extra}]' in the checkout")


def check_server_packages(http: bool) -> None:
    """Raise RuntimeError if what an engine process imports is missing, or with ``http`` what serves HTTP."""
    for module in ("msgspec", *(("fastapi", "httptools", "prometheus_client", "uvicorn") if http else ())):
        check_package(module, "server")


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
