"""`compiled-llm compile`: what it refuses, at once and in one line, and what it leaves behind then: nothing."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from compiled_llm.commands.app import app
from support.compilation.artifact_folders import compiled, made_up

WIDE = {"COLUMNS": "300", "NO_COLOR": "1"}


def test_a_profile_that_is_none_is_refused_at_once(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("{}")
    arguments = ["compile", str(model_folder), "-o", str(tmp_path / "artifacts"), "--profile"]
    for name, message in (("profile", "is damaged, or is no profile"), ("none", "cannot be read: No such file")):
        done = CliRunner().invoke(app, [*arguments, str(tmp_path / name)], env=WIDE)
        assert done.exit_code == 2
        assert f"--profile {tmp_path / name} {message}" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["profile"]


def test_a_folder_that_exists_is_not_written_over(model_folder: Path, tmp_path: Path) -> None:
    folder = made_up(tmp_path / "artifacts")
    for target, message in ((folder, "exists already"), (tmp_path / "no" / "where", "there is no folder")):
        done = CliRunner().invoke(app, ["compile", str(model_folder), "-o", str(target)], env=WIDE)
        assert done.exit_code == 2
        assert message in done.output
    assert list(tmp_path.iterdir()) == [folder]


def test_a_model_that_cannot_be_loaded_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    done = compiled(tmp_path / "model", tmp_path / "artifacts", "--device", "cpu")
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "model"]


def test_generate_says_why_artifacts_are_refused(model_folder: Path, tmp_path: Path) -> None:
    folder = made_up(tmp_path / "artifacts")
    arguments = ["generate", "Hi", "--model", str(model_folder), "--device", "cpu", "--artifacts"]
    done = CliRunner().invoke(app, [*arguments, str(folder)], env=WIDE)
    assert done.exit_code == 2
    assert "was made for something else: " in done.output
    assert "option mode 'compile' there, 'cuda-graphs' here" in done.output
    done = CliRunner().invoke(app, [*arguments, str(tmp_path / "nowhere")], env=WIDE)
    assert done.exit_code == 2
    assert "cannot be read: No such file or directory" in done.output
