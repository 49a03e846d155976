"""`compiled-llm doctor`: what it finds on machines that lack something."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from compiled_llm.commands.app import app
from compiled_llm.commands.doctor import command as doctor_command
from compiled_llm.commands.doctor.checks import DoctorFinding, checks, packages
from compiled_llm_ops.backends import backend_named
from compiled_llm_ops.flashinfer.install import missing_for_cuda

MIB, GIB = 2**20, 2**30

Fake = Callable[[str, str], Path]


def finding(name: str, cuda: bool = False) -> DoctorFinding:
    """The finding of a part and a name; nothing else is looked at."""
    return next(check.finding() for check in checks(cuda) if f"{check.part}: {check.name}" == name)


def assert_found(found: DoctorFinding, status: str, detail: str, fix: str = "*", prevents: bool = False) -> None:
    """In ``detail`` and ``fix``, ``*`` stands for any text."""
    assert (found.status, found.prevents) == (status, prevents), found
    for said, expected in ((found.detail, detail), (found.fix, fix)):
        assert fnmatchcase(said, expected.replace("[", "[[]")), found


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *arguments])


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Puts shell scripts where programs are looked for first."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def make(name: str, script: str) -> Path:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    return make


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Puts modules where they are imported from first."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)

    def make(name: str, source: str) -> Path:
        monkeypatch.setitem(sys.modules, name, None)  # so that the end of the test removes what is imported
        del sys.modules[name]
        path = folder / f"{name}.py"
        path.write_text(source)
        importlib.invalidate_caches()
        return path

    return make


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No program on PATH, no CUDA toolkit, no FlashInfer."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("FLASHINFER_NVCC", raising=False)
    monkeypatch.setitem(sys.modules, "flashinfer", None)


class Gpus:
    """Facts of torch about its devices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capabilities = [(9, 0)]
        self.free = 100 * GIB
        answers: dict[str, Callable[..., Any]] = {
            "device_count": lambda: len(self.capabilities),
            "get_device_capability": lambda index: self.capabilities[index],
            "get_device_name": lambda _: "NVIDIA H200",
            "mem_get_info": lambda _: (self.free, 141 * GIB),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(monkeypatch)


# ---- packages


def test_a_machine_that_has_everything_is_shown_whole() -> None:
    """The table has a line for each finding, and JSON has the same."""
    table, written = run(), run("--json")
    assert (table.exit_code, written.exit_code) == (0, 0)
    assert "compiled_llm can run here, on " in table.stdout.splitlines()[-1]
    lines, entries = table.stdout.splitlines()[:-1], json.loads(written.stdout)["findings"]
    parts = [line for line in lines if not line.startswith(" ")]
    assert parts == ["packages", "extras", "devices", "compilers", "caches"]
    shown = [re.fullmatch(r"  (?:ok|warning|missing|optional|not needed) +(.+?)  +.+", line) for line in lines]
    assert [match[1] for match in shown if match] == [entry["name"] for entry in entries]
    assert len(lines) == len(parts) + len(entries)
    assert "\x1b" not in table.stdout
    needed = {entry["name"]: entry for entry in entries if entry["needed"]}
    for name in ("numpy", "torch", "transformers"):
        assert needed[name]["status"] == "ok"
        assert needed[name]["detail"].startswith(importlib.import_module(name).__version__)


@pytest.mark.parametrize(
    ("lacking", "name", "cuda", "status", "fix"),
    [
        ("gguf", "extras: gguf", False, "optional", "pip install '.[demo]'"),
        ("ray", "extras: ray.serve", False, "optional", "pip install '.[ray]'"),
        ("triton", "packages: triton", False, "not needed", ""),
        ("triton", "packages: triton", True, "missing", "pip install 'triton'"),
        ("flashinfer", "packages: flashinfer", False, "not needed", ""),
    ],
)
def test_missing_package_is_named_with_the_command_that_brings_it(
    lacking: str, name: str, cuda: bool, status: str, fix: str, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, lacking, None)
    found = finding(name, cuda)
    assert (found.status, found.fix, found.prevents) == (status, fix, status == "missing")


def test_ray_without_its_serve_is_no_ray(module: Fake) -> None:
    module("ray", "")
    assert finding("extras: ray.serve").fix == "pip install '.[ray]'"


def test_packages_are_those_of_our_metadata() -> None:
    found = {package.module: package.extra for package in packages()}
    expected = {"torch": "", "flashinfer": "cuda", "typer": "demo", "prometheus_client": "server", "ray.serve": "ray"}
    assert expected.items() <= found.items()
    assert not {"compiled_llm", "ninja", "pytest"} & found.keys()


def test_missing_requirement_prevents_and_sets_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = run()
    assert result.exit_code == 1
    assert re.search(r"missing     transformers +not installed: .+ -> pip install 'transformers", result.stdout)
    assert result.stdout.splitlines()[-1].startswith("compiled_llm cannot run here on ")
    assert "transformers (missing)" in result.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "source", "detail", "fix"),
    [
        ("depyf", "raise OSError('libfoo.so.1')", "libfoo.so.1", "pip install --force-reinstall --no-deps 'depyf*"),
        ("gguf", "import no_such_module", "No module named 'no_such_module'", "pip install '.[demo]'*"),
    ],
)
def test_package_that_raises_on_import_is_reinstalled_or_gets_what_it_lacks(
    name: str, source: str, detail: str, fix: str, module: Fake
) -> None:
    module(name, source)
    assert_found(finding(f"extras: {name}"), "failed", f"does not import: {detail}", fix)


def test_version_outside_the_supported_range_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "4.57.0")
    found = finding("packages: transformers")
    assert_found(found, "warning", "*4.57.0 is outside <5.25,>=5.17*", "pip install 'transformers<5.25,>=5.17'")


def test_check_that_fails_itself_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_: 1 / 0)
    assert_found(finding("compilers: ninja"), "warning", "cannot be checked: division by zero")


# ---- compilers


def test_missing_compiler_and_headers_prevent(bare: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    compiler, headers = finding("compilers: C++ compiler"), finding("compilers: Python headers")
    assert_found(compiler, "missing", "no C++ compiler was found*", "*apt install g++*", prevents=True)
    assert_found(headers, "missing", f"*{tmp_path / 'Python.h'}*", "*-dev*", prevents=True)
    assert finding("compilers: ninja", cuda=False).status == "not needed"


def test_tools_that_are_there_are_named_with_version_and_path(program: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    ninja = program("ninja", "echo 1.99")
    nvcc = program("nvcc", "echo 'nvcc: NVIDIA (R) Cuda compiler driver'; echo 'tools, release 99.1, V99.1.2'")
    monkeypatch.setenv("FLASHINFER_NVCC", str(nvcc))
    assert finding("compilers: ninja").detail == f"1.99, {ninja}"
    assert finding("compilers: nvcc").detail == f"release 99.1, V99.1.2, {nvcc}"


# ---- CUDA


def test_device_is_named_with_capability_and_memory(gpus: Gpus) -> None:
    said = "NVIDIA H200, compute capability 9.0, 100.0 of 141.0 GiB free"
    assert_found(finding("devices: cuda:0", cuda=True), "ok", said)
    gpus.free = GIB
    assert finding("devices: cuda:0", cuda=True).status == "warning"
    gpus.free, gpus.capabilities = 100 * GIB, [(8, 0)]
    said = "NVIDIA H200, compute capability 8.0, 100.0 of 141.0 GiB free, no kv_dtype='fp8_e4m3'"
    assert_found(finding("devices: cuda:0", cuda=True), "ok", said)


def test_old_devices_are_refused_or_warned_about_and_only_the_first_is_needed(gpus: Gpus) -> None:
    gpus.capabilities = [(7, 0), (7, 0), (7, 5)]
    first, second, third = (finding(f"devices: cuda:{index}", cuda=True) for index in range(3))
    assert (first.status, first.prevents) == ("failed", True)
    assert (second.status, second.prevents) == ("failed", False)
    assert (third.status, third.fix) == ("warning", "load models with dtype=float16")


def test_device_that_cannot_be_asked_prevents(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")
    monkeypatch.setattr(torch.cuda, "mem_get_info", Mock(side_effect=error))
    found = finding("devices: cuda:0", cuda=True)
    assert (found.prevents, found.detail) == (True, "CUDA error: out of memory")


@pytest.mark.parametrize("triton_runs", [False, True])
def test_on_cuda_what_flashinfer_misses_prevents_if_nothing_takes_its_place(
    triton_runs: bool, bare: None, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    installation = type(backend_named("triton").installation)
    monkeypatch.setattr(installation, "problems", lambda self, builds=True: [] if triton_runs else ["no Triton"])
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    found = {f"{one.detail}: {one.fix}": one for one in doctor_command.examine(cuda=True)}
    assert missing_for_cuda()
    for message in missing_for_cuda():
        assert (found[message].status, found[message].prevents) == (
            ("warning", False) if triton_runs else ("missing", True)
        )


def test_kernels_that_are_installed_built_need_no_compiler(bare: None, module: Fake, gpus: Gpus) -> None:
    module("flashinfer_jit_cache", "")
    for tool in ("nvcc", "ninja"):
        found = finding(f"compilers: {tool}", cuda=True)
        assert (found.status, found.detail) == ("not needed", "FlashInfer's kernels are installed already built")


def test_flashinfer_of_another_version_is_said_on_cuda(module: Fake, gpus: Gpus) -> None:
    module("flashinfer", "__version__ = '0.5.3'")
    found = finding("packages: flashinfer", cuda=True)
    assert_found(found, "warning", "*FlashInfer 0.5.3 is outside*", "pip install*")
    assert finding("packages: flashinfer", cuda=False).status == "warning"


def test_torch_that_sees_no_device_beside_a_driver_says_why(program: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("The NVIDIA driver on your system is too old (found version 11040).")
    program("nvidia-smi", "echo 570.86.10")
    assert finding("devices: NVIDIA driver").detail == "570.86.10"
    monkeypatch.setattr(torch.version, "cuda", None)
    found = finding("devices: CUDA")
    assert_found(found, "warning", "*this torch is not built for CUDA*", "*pip install --force-reinstall torch*")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=error))
    assert "driver on your system is too old" in finding("devices: CUDA").detail


def test_nvidia_smi_that_fails_is_a_warning(program: Fake) -> None:
    program("nvidia-smi", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    assert_found(finding("devices: NVIDIA driver"), "warning", "*Driver/library version mismatch*")


# ---- the CPU and the caches


@pytest.mark.parametrize(("load", "cuda", "status"), [(9.1, False, "warning"), (9.1, True, "ok"), (1.9, False, "ok")])
def test_other_work_is_a_warning_where_models_run_on_the_cpu(
    load: float, cuda: bool, status: str, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = finding("devices: CPU", cuda)
    assert found.status == status
    assert found.detail.startswith(f"2 cores, {torch.get_num_threads()} threads, ")
    assert ("9.1 jobs share" in found.detail) is (status == "warning")
    assert ("OMP_NUM_THREADS=1" in found.fix) is (status == "warning")


def test_caches_are_shown_with_path_and_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache = tmp_path / "ours"
    monkeypatch.setenv("COMPILED_LLM_CACHE", str(cache))
    assert finding("caches: compiled_llm").detail == f"{cache}, empty"
    (cache / "deep").mkdir(parents=True)
    (cache / "deep" / "file").write_bytes(bytes(3 * MIB))
    assert finding("caches: compiled_llm").detail == f"{cache}, 3.0 MiB"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc cannot be written to, not even by root")
def test_cache_that_cannot_be_written_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILED_LLM_CACHE", "/proc/not/yet/there")
    fix = "make it writable, or set COMPILED_LLM_CACHE to another folder"
    assert_found(finding("caches: compiled_llm"), "warning", "/proc/not/yet/there, not writable: *", fix)


# ---- what it shows


def test_something_needed_that_is_missing_sets_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_command, "has_cuda", lambda: False)
    looked_at = ["compilers", "C++ compiler", "ok", "g++", "", True]
    monkeypatch.setattr(doctor_command, "examine", lambda cuda: [DoctorFinding(*looked_at)])  # type: ignore[arg-type]
    assert run().exit_code == 0
    looked_at[2] = "missing"
    found = run()
    assert found.exit_code == 1
    assert "cannot run here on the CPU: C++ compiler (missing)" in found.stdout


def test_what_a_library_prints_is_no_part_of_json(module: Fake) -> None:
    module("depyf", "print('welcome'); __version__ = '1.0'")
    result = run("--json")
    assert json.loads(result.stdout)["can_run"] is True
    assert "welcome" in result.stderr


def test_terminal_gets_the_same_lines_in_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = [("packages", "torch", "ok", "2.13"), ("extras", "ray", "optional", "not installed", "pip install")]
    monkeypatch.setattr(doctor_command, "examine", lambda cuda: [DoctorFinding(*found) for found in looked_at])  # type: ignore[arg-type]
    plain = run().stdout
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "500")
    coloured = run().stdout
    assert re.sub("\x1b\\[[0-9;]*m", "", coloured) == plain
    assert "\x1b[32mok " in coloured


def test_what_is_too_long_for_a_terminal_goes_on_in_its_column() -> None:
    finding = DoctorFinding("caches", "Inductor", "warning", "here, " * 12 + "/tmp/" + "long" * 20, "make it writable")
    output = io.StringIO()
    doctor_command.show(Console(file=output, force_terminal=True, width=80, no_color=True), [finding])
    first, *rest = output.getvalue().splitlines()[1:]
    assert re.match("  warning     Inductor {11}here, here", first)
    assert len(rest) == 4
    assert all(re.match(" {33}[^ ]", line) and len(line) <= 80 for line in rest)
