"""`compiled-llm doctor`: what it finds on machines that lack something, and that it really builds and compares."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import shutil
import subprocess
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
from compiled_llm.commands.doctor import command as doctor_command, trial as doctor_build
from compiled_llm.commands.doctor.checks import DoctorFinding, Outcome, checks, essence, packages
from compiled_llm_ops.backends import backend_named
from compiled_llm_ops.flashinfer.install import missing_for_cuda
from support.commands.foreign_folder import ForeignFolder
from support.server.engine_processes import COMMAND

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
    table, written = run("--quick"), run("--quick", "--json")
    assert (table.exit_code, written.exit_code) == (0, 0)
    assert table.stdout.endswith("whether kernels build was not tried\n")
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
    result = run("--quick")
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
    assert "nvcc" not in [name for name, *_ in doctor_build.trials("cuda")]


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


# ---- builds


@pytest.fixture(scope="module")
def trial() -> doctor_build.Trial:
    return doctor_build.Trial("cpu")


def test_ops_run_and_their_tokens_are_compared(trial: doctor_build.Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[torch.Tensor] = []
    monkeypatch.setattr(trial, "wrong", compared.append)
    trial.run("eager")
    monkeypatch.undo()
    (tokens,) = compared
    assert not hasattr(trial.model, "compiled"), "it is unwrapped"
    assert torch.equal(tokens, trial.model.generate(trial.prompt, max_new_tokens=16, do_sample=False))
    assert trial.wrong(tokens) == []


@pytest.mark.parametrize("position", [0, 7, 15])
def test_one_wrong_token_is_an_error(trial: doctor_build.Trial, position: int) -> None:
    tokens = trial.model.generate(trial.prompt, max_new_tokens=16, do_sample=False)
    tokens[0, 40 + position] = (tokens[0, 40 + position] + 1) % 128
    assert trial.wrong(tokens)[0] == position


def test_wrong_tokens_are_a_bug_to_report(trial: doctor_build.Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "wrong", lambda tokens: [7, 9])
    monkeypatch.setattr(doctor_build, "trials", lambda device: [("ops", "running", lambda: trial.run("eager"))])
    (found,) = doctor_build.try_builds(cuda=False)
    said = "of 16 tokens 2 are not HuggingFace's, the first of them number 8"
    assert_found(found, "failed", said, "*report it*", prevents=True)


def test_sixteen_bits_may_round_but_not_err() -> None:
    trial = doctor_build.Trial("cpu")
    trial.model.to(torch.bfloat16)
    assert "16 tokens" in trial.run("eager").detail


def test_slower_path_is_no_proof(trial: doctor_build.Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial.model.generation_config, "no_repeat_ngram_size", 5)
    with pytest.raises(RuntimeError, match=r"did not take the fast loop: \{'processed loop': 1\}, .*processors"):
        trial.run("eager")


def test_builds_stop_at_the_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "CppCompileError: C++ compile error\nOutput:\n/tmp/a.cpp:1:9: fatal error: Python.h: no such file"
    monkeypatch.setattr(doctor_build, "build_with_inductor", Mock(side_effect=RuntimeError(said)))
    (found,) = doctor_build.try_builds(cuda=False)
    essential = "CppCompileError: C++ compile error: /tmp/a.cpp:1:9: fatal error: Python.h: no such file"
    assert_found(found, "failed", essential, "install Python's headers*", prevents=True)
    for said, fix in (("CUDA out of memory", "see in nvidia-smi*"), ("error: expected ';'", "TORCH_LOGS*")):
        monkeypatch.setattr(doctor_build, "build_with_inductor", Mock(side_effect=RuntimeError(said)))
        assert_found(*doctor_build.try_builds(cuda=False), "failed", "*", fix, prevents=True)


def test_an_error_of_nvcc_is_told(program: Fake) -> None:
    broken = program("nvcc", "echo 'nvcc fatal   : Unsupported gcc version!' >&2; exit 1")
    with pytest.raises(RuntimeError) as error:
        doctor_build.build_with_nvcc(str(broken))
    assert essence(error.value) == "nvcc fails: nvcc fatal   : Unsupported gcc version!"


@pytest.mark.whole
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_nvcc_builds() -> None:
    assert doctor_build.build_with_nvcc(str(shutil.which("nvcc"))).detail == "a CUDA kernel"


def assert_built(code: int, stdout: str, stderr: str, detail: str) -> None:
    found = json.loads(stdout)
    builds = {entry["name"]: entry for entry in found["findings"] if entry["part"] == "kernel builds"}
    assert (code, found["can_run"]) == (0, True), stdout + stderr
    assert {"Inductor", "ops", "compiled model"} <= set(builds)
    assert all(entry["status"] == "ok" and entry["seconds"] > 0 for entry in builds.values())
    assert detail in builds["compiled model"]["detail"]
    assert "compiling a tiny model" in stderr


def test_json_has_each_build_with_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the case below, with nothing compiled."""
    run_trial = doctor_build.Trial.run
    monkeypatch.setattr(doctor_build, "build_with_inductor", lambda device: Outcome("ok", "nothing"))
    monkeypatch.setattr(doctor_build.Trial, "run", lambda trial, mode: run_trial(trial, "eager"))
    result = run("--json")
    assert_built(result.exit_code, result.stdout, result.stderr, "16 tokens, each HuggingFace's choice")


@pytest.mark.whole
def test_everything_is_built_and_compared_and_json_says_so(foreign: ForeignFolder) -> None:
    done = subprocess.run([COMMAND, "doctor", "--json"], cwd=foreign.path, capture_output=True, text=True, timeout=500)
    assert_built(done.returncode, done.stdout, done.stderr, "2 graphs, 16 tokens")
    assert foreign.executed() == ""


@pytest.mark.whole
@pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA Inductor writes Triton")
def test_broken_cxx_compiler_is_found_out_whatever_is_cached(program: Fake) -> None:
    script = 'case "$*" in *--version*) echo g++ 12;; *) echo "a.cpp:1:9: fatal error: Python.h: no" >&2; exit 1;; esac'
    program("g++", script)
    done = subprocess.run([COMMAND, "doctor"], capture_output=True, text=True, timeout=500)
    assert done.returncode == 1, done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("  failed")]
    assert re.match("  failed      Inductor +CppCompileError", line)
    assert "fatal error: Python.h" in line
    assert "Traceback" not in done.stdout + done.stderr


# ---- what it shows


def test_nothing_is_built_if_it_is_to_be_quick_or_something_needed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_command, "has_cuda", lambda: False)
    monkeypatch.delattr(doctor_command, "try_builds")
    looked_at = ["compilers", "C++ compiler", "ok", "g++", "", True]
    monkeypatch.setattr(doctor_command, "examine", lambda cuda: [DoctorFinding(*looked_at)])  # type: ignore[arg-type]
    assert run("--quick").exit_code == 0
    looked_at[2] = "missing"
    assert "cannot run here on the CPU: C++ compiler (missing)" in run().stdout


def test_failed_build_sets_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = DoctorFinding("kernel builds", "ops", "failed", "no luck", "try again", needed=True)
    monkeypatch.setattr(doctor_command, "examine", lambda cuda: [])
    monkeypatch.setattr(doctor_command, "try_builds", lambda cuda: iter([failed]))
    result = run()
    assert result.exit_code == 1
    assert re.search(r"kernel builds\n  failed      ops +no luck -> try again\n", result.stdout)
    assert "ops (failed)" in result.stdout.splitlines()[-1]


def test_what_a_library_prints_is_no_part_of_json(module: Fake) -> None:
    module("depyf", "print('welcome'); __version__ = '1.0'")
    result = run("--quick", "--json")
    assert json.loads(result.stdout)["can_run"] is True
    assert "welcome" in result.stderr


def test_terminal_gets_the_same_lines_in_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = [("packages", "torch", "ok", "2.13"), ("extras", "ray", "optional", "not installed", "pip install")]
    monkeypatch.setattr(doctor_command, "examine", lambda cuda: [DoctorFinding(*found) for found in looked_at])  # type: ignore[arg-type]
    plain = run("--quick").stdout
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "500")
    coloured = run("--quick").stdout
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
