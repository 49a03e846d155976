"""``explain`` names the line at fault, and what it advises makes the finding go away."""

from __future__ import annotations

import gc
import inspect
import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter
from transformers import FalconConfig, FalconForCausalLM, PreTrainedTokenizerFast
from transformers.models.qwen3 import modeling_qwen3
from typer.testing import CliRunner

import compiled_llm
import planted
from compiled_llm import compile as programs
from compiled_llm.commands import app
from compiled_llm.explaining.report import Report
from conftest import tiny_qwen3
from parity import greedy, mixed_prompts

# What is planted, what its finding is called, what its advice says, and what following that makes of it.
LAYERS = {
    "print": (planted.Print, "graph break", "Delete the call", planted.PrintDeleted),
    "item": (planted.Item, "no CUDA graph", "Leave it a tensor", planted.ItemLeftATensor),
    "branch": (planted.Branch, "graph break", "torch.where", planted.BothSides),
    "file": (planted.FileAccess, "graph break", "Read the file once, in __init__", planted.FileReadOnce),
    "environment": (planted.Environment, "pinned", "Read the variable once, in __init__", planted.EnvironmentReadOnce),
    "nonzero": (planted.NonZero, "no CUDA graph", "torch.where(condition, value, 0)", planted.WholeWithMask),
    "python cache": (planted.PythonCache, "recompile", "Fill the container in __init__", planted.PythonCacheOnlyRead),
    "mutated": (planted.Mutated, "no CUDA graph", "register_buffer in __init__", planted.MutatedBuffer),
    "growing": (planted.Growing, "recompile", "Give it one shape", planted.OneShape),
}


@pytest.fixture(autouse=True)
def _settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted, "SETTINGS", tmp_path / "settings")
    planted.SETTINGS.write_text("0.9")


def plant(layer: type[nn.Module]) -> Any:
    model = tiny_qwen3(eos_token_id=None)
    own = model.model.layers[1].mlp
    new = layer(model.config).eval()
    new.load_state_dict(own.state_dict(), strict=False)
    model.model.layers[1].mlp = new
    return model


def planted_line(thing: Any) -> int:
    lines, first = inspect.getsourcelines(thing)
    return first + next(number for number, line in enumerate(lines) if line.rstrip().endswith("# planted"))


def the_finding(report: Report, thing: Any) -> dict[str, Any]:
    """The one finding, consequences aside, which must be on the planted line."""
    (finding,) = [entry for entry in report.data["findings"] if not entry["follows"]]
    assert (finding["file"], finding["line"]) == (planted.__file__, planted_line(thing)), str(report)
    assert finding["source"].endswith("# planted")
    assert f"test_explain.py:{finding['line']}" not in str(report)
    assert f"planted.py:{finding['line']}" in str(report)
    return finding


def assert_serves(make: Any) -> None:
    """Explained clean, and the same tokens as HuggingFace."""
    report = compiled_llm.explain(make())
    assert report.clean, str(report)
    inputs = mixed_prompts([4, 9], 128, seed=0)
    expected = greedy(make(), inputs, 12)
    torch.testing.assert_close(greedy(compiled_llm.wrap(make(), mode="eager"), inputs, 12), expected)


@pytest.mark.parametrize("name", LAYERS)
def test_a_fault_is_named_by_its_line_and_its_advice_removes_it(name):
    layer, kind, advice, followed = LAYERS[name]
    finding = the_finding(compiled_llm.explain(plant(layer)), layer)
    assert finding["kind"] == kind
    assert advice in finding["advice"]
    assert_serves(lambda: plant(followed))


def test_a_hook_with_a_lock_is_named_and_without_the_lock_it_serves():
    def hooked(hook: Any) -> Any:
        model = tiny_qwen3(eos_token_id=None)
        model.model.layers[1].mlp.register_forward_hook(hook)
        return model

    finding = the_finding(compiled_llm.explain(hooked(planted.hook_with_lock)), planted.hook_with_lock)
    assert finding["kind"] == "graph break"
    assert "Take the lock out" in finding["advice"]
    assert_serves(lambda: hooked(planted.hook_without_lock))


def test_a_module_swapped_after_wrap_is_named_and_wrapping_anew_serves(monkeypatch):
    monkeypatch.setattr(
        programs,
        "compiled",
        lambda function, config, options: torch.compile(function, backend="eager", fullgraph=True, dynamic=False),
    )
    inputs = mixed_prompts([4], 128, seed=0)
    model = compiled_llm.wrap(tiny_qwen3(eos_token_id=None), progress=False)
    greedy(model, inputs, 4)
    assert model.compiled.explain().clean
    model.model.layers[1].mlp = plant(planted.Swapped).model.layers[1].mlp
    greedy(model, inputs, 4)
    for report in (model.compiled.explain(), compiled_llm.explain(model)):
        finding = the_finding(report, planted.Swapped)
        assert finding["kind"] == "recompile"
        assert (finding["old"], finding["new"]) == ("Qwen3MLP", "Swapped")
        assert finding["pinned_by"] == "model.model.layers.1.mlp"
        assert "compiled_llm.unwrap(model), then wrap it again" in finding["advice"]
    compiled_llm.wrap(compiled_llm.unwrap(model), progress=False)
    torch.testing.assert_close(greedy(model, inputs, 12), greedy(plant(planted.Swapped), inputs, 12))
    assert model.compiled.explain().clean


def test_recompiles_say_the_old_value_the_new_one_and_what_pins_it():
    finding = the_finding(compiled_llm.explain(plant(planted.Growing)), planted.Growing)
    assert finding["pinned_by"] == "size of model.model.layers.1.mlp.history"
    assert int(finding["new"]) == int(finding["old"]) + 1


def test_a_model_whose_attention_does_not_reach_pages_is_told_so():
    config = FalconConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    report = compiled_llm.explain(FalconForCausalLM(config).eval())
    (finding,) = report.data["findings"]
    assert finding["kind"] == "refused"
    assert "do not reach the attention interface" in finding["reason"]


def test_a_model_in_training_mode_is_told_so():
    report = compiled_llm.explain(tiny_qwen3().train())
    assert "call model.eval() first" in report.data["findings"][0]["reason"]


def test_what_forward_raises_is_a_finding_with_its_line():
    class Raises(planted.PrintDeleted):
        def forward(self, x):
            raise KeyError("no such thing")  # planted

    (finding,) = compiled_llm.explain(plant(Raises)).data["findings"]
    assert (finding["kind"], finding["file"], finding["line"]) == ("error", __file__, planted_line(Raises))
    assert "KeyError" in finding["reason"]


def test_explaining_leaves_no_trace():
    model = plant(planted.PythonCache)
    model.model.layers[0].mlp = plant(planted.Print).model.layers[1].mlp
    model.model.layers[1].mlp.register_forward_hook(planted.hook_with_lock)
    before = type(model), model.config._attn_implementation, len(model.model.layers[1].mlp._forward_hooks)
    compiles = []
    mine = torch.compile(model.model.norm, backend=lambda graph, _: compiles.append(graph) or graph.forward)
    x = torch.randn(1, 3, 64)
    mine(x)
    assert not compiled_llm.explain(model).clean
    mine(x)
    assert len(compiles) == 1, "explaining threw away what the user had compiled"
    assert (type(model), model.config._attn_implementation, len(model.model.layers[1].mlp._forward_hooks)) == before
    assert model.model.layers[1].mlp.calls == {}
    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
    functions = [thing for thing in gc.get_objects() if type(thing) is FunctionType]
    left = [thing for thing in functions if thing.__module__ == modeling_qwen3.__name__ and entries(thing.__code__)]
    assert left == [modeling_qwen3.Qwen3RMSNorm.forward]


class Words(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.words, self.links = "", []
        self.feed(page)

    def handle_data(self, data: str) -> None:
        self.words += data

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attrs if name in ("src", "href")]


def test_text_page_and_data_say_the_same(tmp_path):
    report = compiled_llm.explain(plant(planted.Mutated), mixed_prompts([5, 2], 128, seed=0))
    (finding,) = report.data["findings"]
    page = Words(report.to_html(tmp_path / "report.html").read_text())
    assert page.links == [], "one file, nothing to fetch"
    for said in (finding["source"], finding["reason"], finding["advice"], f"planted.py:{finding['line']}"):
        assert said in page.words
        assert " ".join(said.split()) in " ".join(str(report).split())
    assert json.loads(json.dumps(report.data)) == report.data


def test_history_counts_slow_paths_with_their_causes():
    model = compiled_llm.wrap(tiny_qwen3(eos_token_id=None), mode="eager")
    model.generate(**mixed_prompts([4], 128, seed=0), max_new_tokens=3, do_sample=False, num_beams=2)
    report = model.compiled.explain()
    (finding,) = report.data["findings"]
    assert finding["kind"] == "slow path"
    assert "beam" in finding["reason"]
    assert report.data["history"]["generate_calls"] == {"compiled forward": 1}


def test_history_names_the_line_that_kept_a_cuda_graph_from_being_recorded(monkeypatch):
    model = compiled_llm.wrap(tiny_qwen3(eos_token_id=None), mode="eager", progress=False)
    paged = model.compiled.paged()
    line = planted_line(planted.Mutated.forward)
    own = paged.programs.decode

    def skipping(*args: Any) -> Any:
        log_cudagraph_skip_and_bump_counter(
            "skipping cudagraphs due to mutated inputs (1 instances). Found from : \n"
            f'  File "{planted.__file__}", line {line}, in forward\n    COUNT.add_(1.0)\n'
        )
        return own(*args)

    monkeypatch.setattr(paged.programs, "decode", skipping)
    model.compiled.warmup([1])
    finding = the_finding(model.compiled.explain(), planted.Mutated.forward)
    assert finding["kind"] == "no CUDA graph"
    assert "register_buffer" in finding["advice"]
    assert model.compiled.explain().data["history"]["cudagraph_skips"] == 1


def test_the_command_prints_the_report_and_writes_the_page(tmp_path):
    folder = tmp_path / "model"
    tiny_qwen3(eos_token_id=None).save_pretrained(folder)
    vocabulary = {"<unk>": 0, "Once": 1, "upon": 2, "a": 3, "time": 4}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<unk>").save_pretrained(folder)
    done = CliRunner().invoke(app, ["explain", str(folder), "--html", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    assert "Nothing stands in the way" in done.stdout
    assert "Nothing stands in the way" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("name", ["plan", "graphs", "pages"])
def test_logs_named_in_the_environment_go_to_stderr_and_no_others(name):
    script = """
import logging, compiled_llm
for name in ("plan", "graphs", "pages"):
    logging.getLogger(f"compiled_llm.{name}").debug("said by %s", name)
"""
    environ = {**os.environ, "COMPILED_LLM_LOGS": name}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)
    assert done.stderr == f"compiled_llm.{name}: said by {name}\n"


def test_steps_say_what_they_plan_record_and_take(caplog):
    model = compiled_llm.wrap(tiny_qwen3(eos_token_id=None), mode="eager", page_size=4, progress=False)
    with caplog.at_level("DEBUG", "compiled_llm"):
        greedy(model, mixed_prompts([3], 128, seed=0), 4)
    said = {(record.name, record.getMessage().split()[0]) for record in caplog.records}
    assert said >= {("compiled_llm.plan", "decode"), ("compiled_llm.graphs", "graphs"), ("compiled_llm.pages", "page")}
