"""Kernels of Triton's are loaded as they ran, in torch as it is, without a GPU; each test says what breaks if not."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.codecache import PyCodeCache

from compiled_llm.compat.torch.kept.region_code import load_code
from compiled_llm.compat.torch.kept.triton_kernels import TritonKernel
from compiled_llm.compat.torch.triton import kernels_built

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

NAME = "triton_poi_fused_add_0"
MODULE = f"""
import triton
import triton.language as tl
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.hints import DeviceProperties

H200 = DeviceProperties(type='cuda', index=0, multi_processor_count=132, cc=90, major=9, warp_size=32)

@triton_heuristics.pointwise(
    size_hints={{'x': 1024}},
    filename=__file__,
    triton_meta={{
        'signature': {{'x': '*fp32', 'y': '*fp32', 'xnumel': 'i32', 'XBLOCK': 'constexpr'}},
        'device': H200, 'constants': {{}}, 'configs': [{{}}],
    }},
    inductor_meta={{
        'grid_type': 'Grid1D', 'kernel_name': '{NAME}', 'mutated_arg_names': [], 'backend_hash': '',
        'autotune_local_cache': True, 'autotune_remote_cache': None, 'autotune_pointwise': True, 'store_cubin': False,
        'max_autotune': True, 'max_autotune_pointwise': True, 'force_disable_caches': False,
    }},
    min_elem_per_thread=0,
)
@triton.jit
def {NAME}(x, y, xnumel, XBLOCK: tl.constexpr):
    places = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    tl.store(y + places, tl.load(x + places, places < xnumel) + 1, places < xnumel)
"""
CODE = f"""
from torch._inductor.async_compile import AsyncCompile
async_compile = AsyncCompile()
{NAME} = async_compile.triton('{NAME}', '''{MODULE}''', device_str='cuda')
async_compile.wait(globals())

def call(values):
    return {NAME}
"""


class Loader:
    """In place of torch's loader of cubins, which asks CUDA."""

    def _load_kernel(self, path: str, *args: Any) -> tuple[int, ...]:
        assert Path(path).exists()
        return (0, 1, 32, 0) if torch.__version__ >= (2, 13) else (1, 32, 0)  # type: ignore[operator]

    def _unload_kernel(self, *args: Any) -> None:
        return None


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with empty caches, of a process that seems to have a GPU."""
    from torch._dynamo import device_interface
    from torch._inductor.runtime import static_triton_launcher, triton_helpers

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "own" / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "own" / "triton"))
    monkeypatch.setattr(triton_helpers, "set_driver_to_gpu", lambda: None)
    monkeypatch.setattr(device_interface, "DeviceGuard", lambda *args: nullcontext())
    monkeypatch.setattr(static_triton_launcher.StaticallyLaunchedCudaKernel, "C_impl", Loader())
    return tmp_path


@pytest.fixture
def kernel(home: Path) -> TritonKernel:
    """A kernel that has chosen the last of several tilings."""
    kernel = getattr(PyCodeCache.load(MODULE), NAME)
    kernel.precompile()
    with pytest.raises(ValueError, match="has not run"):
        TritonKernel(kernel, MODULE).encoded()
    kernel.launchers = kernel.launchers[-1:]
    return TritonKernel(kernel, MODULE)


@pytest.fixture
def said(kernel: TritonKernel, home: Path) -> dict[str, Any]:
    """What is kept of code that launches the kernel, in the folder ``kept``; all else is gone."""
    for place, file in kernel.files().items():
        (home / "kept" / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, home / "kept" / place)
    (home / "kept/inductor/code").mkdir()
    (home / "kept/inductor/code/code.py").write_text(CODE)
    said = {"file": "code/code.py", "kernels": [], "triton": [kernel.encoded()], "aligned": [], "written": []}
    shutil.rmtree(home / "own")
    return said


def files_in(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def test_a_kernel_is_loaded_with_its_tiling_and_nothing_is_built_or_written(
    home: Path, kernel: TritonKernel, said: dict[str, Any]
) -> None:
    """If not, each start would time tilings again, and might choose one with other bits."""
    assert kernel.encoded()["tiling"]["kwargs"] == kernel.launched.config.kwargs
    kept, built = files_in(home), len(kernels_built())
    loaded: Any = load_code(home / "kept", said)([])
    assert [launcher.cache_hash for launcher in loaded.launchers] == [said["triton"][0]["name"]]
    assert loaded.launchers[0].config.kwargs == kernel.launched.config.kwargs
    assert files_in(home) == kept
    assert len(kernels_built()) == built


def test_another_kernel_than_the_one_that_was_kept_is_refused(home: Path, said: dict[str, Any]) -> None:
    """If not, a program would run other kernels than the process that kept it, without a word."""
    said["triton"][0]["name"] = "another"
    with pytest.raises(ValueError, match="another kernel"):
        load_code(home / "kept", said)


def test_a_kernel_without_its_file_is_not_kept(home: Path, kernel: TritonKernel) -> None:
    """If not, a later process would build it, where nobody may write."""
    shutil.rmtree(home / "own" / "triton")
    with pytest.raises(ValueError, match="not found"):
        kernel.files()
