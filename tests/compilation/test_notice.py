from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from compiled_llm.compat.torch.dynamo import forget, own_copy
from compiled_llm.compilation.backend import Inductor
from compiled_llm.compilation.torch_compile.notice import CompilingNotice

pytestmark = pytest.mark.core


def product(x: Tensor) -> Tensor:
    return x @ x


def test_only_what_no_cache_holds_is_called_compiling(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    told: list[str] = []
    for start in ("cold", "warm"):
        notice, function, x = CompilingNotice(), own_copy(product), torch.ones(3, 3)
        compiled = torch.compile(function, backend=Inductor({"post_grad_custom_post_pass": notice}, layers_in_region=0))
        with notice.telling(lambda start=start: told.append(start)), torch.no_grad():
            torch.testing.assert_close(compiled(x), x @ x)
        forget([function])
    assert told == ["cold"]
