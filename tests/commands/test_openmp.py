"""Threads on a CPU: they wait in a way that suits a busy machine, and are no more than the process may use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from compiled_llm.commands.loading import load as loading
from compiled_llm.commands.openmp import cores_of_control_group, set_up_threads
from compiled_llm.execution.threads import busy_cores


def files(root: Path, **contents: str) -> Path:
    for name, content in contents.items():
        path = root / name.replace("__", "/").replace("cpu_max", "cpu.max").replace("cfs_", "cpu.cfs_")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


@pytest.mark.parametrize(
    ("contents", "cores"),
    [
        ({}, None),
        ({"proc__self__cgroup": "0::/\n", "sys__fs__cgroup__cpu_max": "max 100000\n"}, None),
        ({"proc__self__cgroup": "0::/\n", "sys__fs__cgroup__cpu_max": "150000 100000\n"}, 1.5),
        (
            {
                "proc__self__cgroup": "0::/a/b\n",
                "sys__fs__cgroup__a__b__cpu_max": "max 100000\n",
                "sys__fs__cgroup__a__cpu_max": "50000 100000\n",
                "sys__fs__cgroup__cpu_max": "300000 100000\n",
            },
            0.5,
        ),
        (
            {
                "proc__self__cgroup": "3:memory:/\n2:cpu,cpuacct:/docker/1\n",
                "sys__fs__cgroup__cpu__docker__1__cfs_quota_us": "200000\n",
                "sys__fs__cgroup__cpu__docker__1__cfs_period_us": "100000\n",
                "sys__fs__cgroup__cpu__cfs_quota_us": "-1\n",
                "sys__fs__cgroup__cpu__cfs_period_us": "100000\n",
            },
            2.0,
        ),
        ({"proc__self__cgroup": "what is this\n"}, None),
    ],
)
def test_the_share_of_a_control_group(contents: dict[str, str], cores: float | None, tmp_path: Path) -> None:
    assert cores_of_control_group(files(tmp_path, **contents)) == cores


def test_threads_are_no_more_than_the_share_and_a_users_values_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {*range(8)})
    root = files(tmp_path, proc__self__cgroup="0::/\n", sys__fs__cgroup__cpu_max="250000 100000\n")
    for given, expected in (
        ({}, {"GOMP_SPINCOUNT": "10000", "OMP_NUM_THREADS": "2"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": "2"}),
        ({"GOMP_SPINCOUNT": "5", "OMP_NUM_THREADS": "7"}, {"GOMP_SPINCOUNT": "5", "OMP_NUM_THREADS": "7"}),
    ):
        environment = dict(given)
        set_up_threads(environment, root)
        assert environment == expected
    (root / "sys/fs/cgroup/cpu.max").write_text("1600000 100000\n")
    set_up_threads(environment := {}, root)
    assert environment == {"GOMP_SPINCOUNT": "10000"}, "torch counts the cores itself"


def test_torch_is_imported_by_a_command_with_these_settings(tmp_path: Path) -> None:
    """It reads them then: set later, they would be without effect."""
    for name in ("config.json", "tokenizer.json"):  # checks that need no torch pass
        (tmp_path / name).write_text("{}")
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'torch':\n"
        "            print('spins', os.environ.get('GOMP_SPINCOUNT'), file=sys.__stderr__)\n"
        "            sys.exit()\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in busy_cores.WAITING}
    paths = os.pathsep.join([str(tmp_path), *filter(None, [environment.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "compiled_llm", "generate", "--model", str(tmp_path), "hi"]
    done = subprocess.run(command, env={**environment, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert "spins 10000" in done.stderr


@pytest.mark.parametrize("busy", [False, True])
def test_other_work_on_a_cpu_is_told_once_in_a_line(
    busy: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (9.0 if busy else 0.5, 0.0, 0.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with pytest.raises(FileNotFoundError):
        loading.load(str(tmp_path / "none"), device="cpu")
    told = "compiled_llm: 9.0 jobs share 2 cores, and threads wait for each other; answers are slow, and "
    assert (told in capsys.readouterr().err) is busy
