"""What stands around the code: the workflow's commands are those of `.ci/run`, tox, README and the page on deploying.

Nothing is run on GitHub here: files are parsed.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.docs.pages import CHECKOUT, blocks_of

GITHUB = CHECKOUT / ".github"
WORKFLOW = yaml.safe_load((GITHUB / "workflows" / "checks.yml").read_text())
JOBS: dict[str, Any] = WORKFLOW["jobs"]
README = CHECKOUT / "README.md"
DEPLOY = (CHECKOUT / "docs" / "how-to" / "deploy.md").read_text()
NEWEST_ACTIONS = {"actions/checkout@v6", "actions/setup-python@v6", "actions/upload-artifact@v6"}


def commands(job: str) -> list[str]:
    return [line for step in JOBS[job]["steps"] for line in step.get("run", "").splitlines()]


def environments(label: str) -> set[str]:
    """The names of tox's environments with a label, those in braces written out."""
    found = set()
    for name, text in re.findall(r"^\[testenv:([^\]]+)\]\n(.*?)(?=^\[|\Z)", tox_ini(), re.MULTILINE | re.DOTALL):
        if f"labels = {label}" in text:
            parts = [part.split(",") for part in re.split(r"[{}]", name)]
            found |= {"".join(each) for each in itertools.product(*parts)}
    return found


def tox_ini() -> str:
    return (CHECKOUT / "tox.ini").read_text()


def test_the_workflow_checks_what_ci_checks() -> None:
    assert commands("checks") == [".ci/run"]
    assert os.access(CHECKOUT / ".ci" / "run", os.X_OK)
    assert commands("docs") == ["pip install tox", "tox -e docs"]
    assert "[testenv:docs]" in tox_ini()
    assert JOBS["docs"]["steps"][-1]["with"]["path"] == re.search(r"site_dir: (.+)", mkdocs())[1]  # type: ignore[index]
    assert JOBS["checks"]["steps"][1]["with"]["python-version"] == "3.11"


def mkdocs() -> str:
    return (CHECKOUT / "mkdocs.yml").read_text()


def test_the_workflow_draws_other_cases_each_week() -> None:
    assert JOBS["drawn"]["if"].startswith("github.event_name == 'schedule'")
    assert commands("drawn")[-1].startswith("tox -e py -- --seed ${{ github.run_number }}")


def test_the_workflow_runs_the_whole_matrix() -> None:
    rows = JOBS["matrix"]["strategy"]["matrix"]["include"]
    pythons = {row["environment"]: row["python"] for row in rows}
    assert set(pythons) == environments("matrix")
    assert len(pythons) == len(rows)
    for name, python in pythons.items():
        named = re.fullmatch(r"py(\d)(\d+)", name)
        assert python == (f"{named[1]}.{named[2]}" if named else "3.11")
    assert commands("matrix") == ["pip install tox", "tox -e ${{ matrix.environment }}"]


def test_a_release_needs_all_checks_and_is_what_was_tested() -> None:
    assert set(JOBS["release"]["needs"]) == set(JOBS) - {"release", "drawn"}, "what a tag runs"
    assert JOBS["release"]["if"] == "github.ref_type == 'tag'"
    text = "\n".join(commands("release"))
    assert "python -m build" in text
    readmes = README.read_text()
    (extras,) = re.findall(r"pip install -c constraints.txt \"\.\[([\w,]+)\]\" --extra-index-url", readmes)
    assert f'pip install -c constraints.txt "$(ls dist/*.whl)[{extras}]"' in text
    generate, _ = re.findall(r"^compiled-llm (.+)$", readmes, re.MULTILINE)
    assert f"empty/bin/compiled-llm {generate} |" in text
    (asked,) = re.findall(r"^curl .+ -d ('.+')$", readmes, re.MULTILINE)
    assert asked in text
    said = re.findall(r"^```text\n(.*?)\n^```$", readmes, re.MULTILINE | re.DOTALL)
    assert {line for line in said if f'grep -x "{line}"' in text} == set(said)


def test_the_release_reads_readmes_python(tmp_path: Path) -> None:
    (command,) = [line for line in commands("release") if line.startswith("sed ")]
    (tmp_path / "dist").mkdir()
    (tmp_path / "README.md").write_text(README.read_text())
    subprocess.run(command, shell=True, check=True, cwd=tmp_path / "dist")
    (block,) = blocks_of(README)
    assert (tmp_path / "dist" / "readme.py").read_text() == block.code


@pytest.mark.parametrize("command", ["docker build", "docker run"])
def test_the_image_is_built_and_started_as_the_page_says(command: str) -> None:
    (ours,) = [line for line in commands("release") if line.startswith(command)]
    words = [word for word in shlex.split(ours) if word not in ("-d", "--name", "served")]
    assert shlex.join(words) in DEPLOY


def test_actions_are_of_one_version_each_and_may_only_read() -> None:
    used = {step["uses"] for job in JOBS.values() for step in job["steps"] if "uses" in step}
    assert used == NEWEST_ACTIONS
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in JOBS.values())


def test_who_reports_a_fault_is_asked_for_what_the_doctor_says() -> None:
    form = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / "fault.yml").read_text())
    fields = {field["id"]: field for field in form["body"] if "id" in field}
    assert "`compiled-llm doctor`" in fields["doctor"]["attributes"]["description"]
    assert all(fields[name]["validations"]["required"] for name in ("code", "seen", "doctor"))
    wish = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / "wish.yml").read_text())
    for each in (form, wish):
        assert {"name", "description", "body"} <= set(each)
        assert all(field["type"] in ("markdown", "textarea") for field in each["body"])


def test_what_is_cited_is_this_version() -> None:
    cited = yaml.safe_load((CHECKOUT / "CITATION.cff").read_text())
    package = (CHECKOUT / "pyproject.toml").read_text()
    assert f'version = "{cited["version"]}"' in package
    assert re.search(rf'^license = "{cited["license"]}\b', package, re.MULTILINE)
    assert cited["authors"][0]["name"] in package
