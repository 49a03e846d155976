"""Certificates to serve HTTPS with."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def signed_by_itself(folder: Path, *options: str) -> tuple[Path, Path]:
    """A certificate of localhost, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    files = ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=localhost", "-addext", names]
    subprocess.run([*made, *files, *(options or ("-nodes",))], check=True, capture_output=True)
    return certificate, key
