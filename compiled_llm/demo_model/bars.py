"""Transformers' progress bars, which fight ours for the terminal's last line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from transformers import modeling_gguf_pytorch_utils
from transformers.utils import logging as transformers_logging


@contextmanager
def without_bars() -> Iterator[None]:
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        # The bar of the GGUF reader obeys no setting.
        with mock.patch.object(modeling_gguf_pytorch_utils, "tqdm", lambda tensors, **_: tensors, create=True):
            yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()
