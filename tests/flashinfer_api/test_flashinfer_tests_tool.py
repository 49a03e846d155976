"""`tools/flashinfer_tests.py`: what it changes in tests, which cases it draws, and how it counts them."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from support.imports import CHECKOUT, module_at

TESTS = """
import pytest
import torch

import flashinfer
from flashinfer.utils import has_flashinfer_jit_cache
from tests.test_helpers.jit_utils import gen_modules
from tests.test_helpers.utils_fp4 import create_nvfp4_kv


@pytest.fixture(autouse=not has_flashinfer_jit_cache())
def built():
    flashinfer.jit.build_jit_specs(gen_modules())
    raise AssertionError


@pytest.mark.parametrize("kv_len", [8, 16, 2**20])
def test_runs(kv_len):
    q, k = torch.randn(2, 4, device="cuda:0"), torch.randn(kv_len, 2, 4).to(0)
    assert flashinfer.decode.single_decode_with_kv_cache(q, k, k).device == torch.device("cuda")


@pytest.mark.parametrize("kv_len", range(9))
def test_fails(kv_len):
    assert kv_len < 0, "some reason"


def test_calls_what_is_left_out():
    states = torch.zeros(2, 2, 4)
    flashinfer.single_prefill_with_kv_cache(states, states, states, backend="cudnn")


def test_has_four_bits():
    create_nvfp4_kv()


def test_calls_what_is_not_here():
    flashinfer.trtllm_batch_decode_with_kv_cache()


def test_is_skipped():
    pytest.skip("no reason")


def test_starts_another_process():
    import subprocess
    import sys

    subprocess.run([sys.executable, "-c", "from flashinfer import single_decode_with_kv_cache"], check=True)
"""


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(CHECKOUT / "tools"))
        yield module_at(CHECKOUT / "tools" / "flashinfer_tests.py")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with tests in the manner of FlashInfer's."""
    helpers, tests = (tmp_path / "tests" / name for name in ("test_helpers", "attention"))
    for folder in (helpers, tests):
        folder.mkdir(parents=True)
    (helpers / "__init__.py").touch()
    (helpers / "jit_utils.py").write_text("raise AssertionError\n")
    (helpers / "utils_fp4.py").write_text("raise AssertionError\n")
    (tests / "test_something.py").write_text(TESTS)
    return tmp_path


def test_the_device_alone_is_changed(tool: ModuleType) -> None:
    source = 'x.to(0), y.to("cuda:0"), "cuda", "cuda:1", torch.cuda.synchronize(), z.to(0.5)'
    changed = 'x.to("cpu"), y.to("cpu"), "cpu", "cuda:1", torch.cuda.synchronize(), z.to(0.5)'
    assert tool.on_device(source, "cpu") == changed


@pytest.mark.whole
def test_cases_are_drawn_run_and_counted(tool: ModuleType, checkout: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    command = [sys.executable, str(CHECKOUT / "tools" / "flashinfer_tests.py"), str(checkout)]
    options = ["--only", "test_something", "--most", "4", "--numbers", "1000", "--report", str(report)]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr  # more than a tenth fails
    found = {name.split("::")[1]: own for name, own in tool.outcomes_of(report).items()}
    assert found.keys() == {name for name in TESTS.split() if name.startswith("test_")} or len(found) == 7
    assert found["test_runs"][:5] == (2, 0, 0, 1, 0)
    assert found["test_fails"][:5] == (0, 4, 0, 0, 5)
    assert all("some reason" in said for said in found["test_fails"].said)
    assert found["test_calls_what_is_left_out"].left_out == Counter(backend=1)
    assert found["test_has_four_bits"].left_out == Counter(kv_cache_sf=1)
    assert found["test_calls_what_is_not_here"].left_out == Counter(trtllm_batch_decode_with_kv_cache=1)
    assert found["test_is_skipped"].skipped == 1
    assert found["test_starts_another_process"].passed == 1
    assert "seed 0: 3 of 7 cases passed; of all 17, left out are 1 (5.9%) by backend" in done.stdout.replace("\n", " ")


def test_a_folder_without_tests_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tests" / "test_helpers").mkdir(parents=True)
    command = [sys.executable, str(CHECKOUT / "tools" / "flashinfer_tests.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "is not there" in done.stderr
