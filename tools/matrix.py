"""Run the version matrix, and note what came of it in `docs/matrix.json`, which the docs' table is made from.

    python tools/matrix.py              # the environments that have no result yet
    python tools/matrix.py torch214     # this one, again

The environments are those with the label `matrix` in `tox.ini`. They run one at a time and are deleted afterwards:
each takes several GB. Their output is kept in `build/matrix`. Interpreters that tox does not find on PATH count as
absent; pyenv's are found in `~/.pyenv/versions/*/bin`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

CHECKOUT = Path(__file__).resolve().parents[1]
RESULTS = CHECKOUT / "docs" / "matrix.json"
LOGS = CHECKOUT / "build" / "matrix"
TOX = [sys.executable, "-m", "tox"]
PACKAGES = ("torch", "transformers", "flashinfer-python")
OF_EXTRAS = ("fastapi", "httptools", "jinja2", "msgspec", "prometheus-client", "pydantic", "uvicorn", "xgrammar", "ray")
"""Those of `server`, `structured` and `ray`, which have environments of their own."""

_ASK_FOR_VERSIONS = f"""
import json, platform
from importlib.metadata import distributions
installed = {{d.name.replace("_", "-").lower(): d.version for d in distributions()}}
names = [*{PACKAGES}, *(name for name in {OF_EXTRAS} if name in installed)]
print(json.dumps({{"python": platform.python_version(), **{{name: installed.get(name) for name in names}}}}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("environments", nargs="*", help="default: those without a result")
    existing = environments()
    results = {name: result for name, result in _results().items() if name in existing}
    chosen = parser.parse_args().environments or [name for name in existing if name not in results]
    if unknown := set(chosen) - set(existing):
        parser.error(f"{', '.join(sorted(unknown))}: not among {', '.join(existing)}")
    for name in chosen:
        results[name] = run(name)
        RESULTS.write_text(json.dumps({name: results[name] for name in existing if name in results}, indent=2) + "\n")
        print(f"{name}: {results[name]}", flush=True)
    sys.exit(any(results[name]["result"] != "passed" for name in chosen))


def environments() -> list[str]:
    listed = subprocess.run(
        [*TOX, "list", "-m", "matrix", "-q", "--no-desc"], cwd=CHECKOUT, check=True, stdout=subprocess.PIPE, text=True
    )
    return listed.stdout.split()


def run(name: str) -> dict[str, Any]:
    """Run an environment, and delete it whatever happens."""
    folder, log = CHECKOUT / ".tox" / name, LOGS / f"{name}.log"
    shutil.rmtree(folder, ignore_errors=True)
    LOGS.mkdir(parents=True, exist_ok=True)
    # What is gone in minutes is worth neither caching nor compiling.
    environ = {**os.environ, "PIP_NO_CACHE_DIR": "1", "PIP_NO_COMPILE": "1"}
    started = time.monotonic()
    try:
        with log.open("w") as out:
            command = [*TOX, "run", "-e", name]
            code = subprocess.run(command, cwd=CHECKOUT, env=environ, stdout=out, stderr=out).returncode
        versions = _versions(folder)
        return {
            **(_counts(folder / "junit.xml", code) or {"result": "failed" if versions else "not run"}),
            **({"reason": _reason(log)} if code else {}),
            "versions": versions,
            "seconds": round(time.monotonic() - started),
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _counts(report: Path, code: int) -> dict[str, Any] | None:
    """What pytest says of its tests; None where it did not get to its end."""
    if not report.exists():
        return None
    cases = list(ElementTree.parse(report).iter("testcase"))
    failures = [_name(case) for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "result": "failed" if code or failures else "passed",
        "passed": len(cases) - len(failures) - skipped,
        "skipped": skipped,
        "failures": failures,
    }


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


def _reason(log: Path) -> str:
    """The line of the log that tells most."""
    lines = [line.strip() for line in log.read_text().splitlines() if line.strip()]
    telling = [line for line in lines if "ERROR: " in line or "could not find python" in line or " failed, " in line]
    return (telling or lines or ["tox said nothing"])[-1]


def _versions(folder: Path) -> dict[str, str | None]:
    python = folder / "bin" / "python"
    if not python.exists():
        return {}
    asked = subprocess.run([python, "-I", "-c", _ASK_FOR_VERSIONS], stdout=subprocess.PIPE, text=True, check=True)
    versions: dict[str, str | None] = json.loads(asked.stdout)
    return versions if versions["torch"] else {}


def _results() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


if __name__ == "__main__":
    main()
