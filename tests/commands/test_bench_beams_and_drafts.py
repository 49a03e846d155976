"""The benchmark of modes runs all of them on both contenders, over the paths that it is about."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from compiled_llm.commands.bench import models
from compiled_llm.commands.bench.beams_and_drafts import Modes, Sizes, main
from compiled_llm.huggingface.wrap import wrap

SMALL = ["--prompt", "6", "--new", "4", "--turns", "2", "--rows", "2", "--runs", "2"]


def test_every_mode_is_measured_for_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "modes.json"
    main(["--model", "tiny", "--device", "cpu", "--dtype", "float32", "--mode", "eager", "--json", str(file), *SMALL])
    found = json.loads(file.read_text())
    by_contender = [
        [each["mode"] for each in found if each["contender"] == name] for name in ("huggingface", "compiled-llm")
    ]
    assert by_contender[0] == by_contender[1]
    assert len(by_contender[0]) == 5
    assert all(len(each["seconds"]) == 2 and min(each["seconds"]) > 0 for each in found)
    assert [each["tokens"] for each in found[:5]] == [4, 4, 4, 8, 12]
    assert "chat of 2 turns" in capsys.readouterr().out


def test_each_mode_takes_the_path_that_is_measured() -> None:
    model, draft = (
        wrap(
            models.build("tiny", torch.device("cpu"), torch.float32),
            mode="eager",
            kv_memory="500 tokens",
            progress=False,
        )
        for _ in range(2)
    )
    sizes = Sizes(prompt=6, new=5, turns=3, rows=2)
    for run in Modes(model, draft, sizes).all().values():
        run()
    stats = model.compiled.stats()
    assert stats.generate_calls == {"compiled forward": 3, "fast loop": 3}
    assert stats.forward_calls == {"compiled": 1}
    assert stats.pages is not None
    assert stats.pages.used == 0
