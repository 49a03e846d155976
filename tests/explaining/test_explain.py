"""``explain`` names the line at fault, and what it advises makes the finding go away."""

from __future__ import annotations

import copy
import gc
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter
from transformers import FalconConfig, FalconForCausalLM
from transformers.models.qwen3 import modeling_qwen3
from typer.testing import CliRunner

import compiled_llm
from compiled_llm.commands.app import app
from compiled_llm.commands.loading import load
from compiled_llm.compat.torch.dynamo import own_copy
from compiled_llm.compilation import programs as programs
from compiled_llm.compilation.graphs import cuda_graphs
from compiled_llm.compilation.inputs import DecodeInputs
from compiled_llm.compilation.program_list import DECODE_ONE
from compiled_llm.compilation.programs import Arguments
from compiled_llm.explaining import tracing
from compiled_llm.explaining.checks.recompiles import recompiles_of
from compiled_llm.explaining.profile import timings
from compiled_llm.explaining.report import Report
from compiled_llm.explaining.tracing import BrokenPrograms
from support import planted_faults as planted
from support.characters import character_tokenizer
from support.compilation.explaining_less import run_one_batch
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture
from support.parity import greedy, mixed_prompts
from support.planted_faults import plant
from support.tiny_models import tiny_qwen3

pytestmark = pytest.mark.usefixtures("one_thread")


class Fault(NamedTuple):
    """What is planted, what its finding is called, what its advice says, and what following that makes of it."""

    planted: Any
    kind: str
    advice: str
    followed: Any


BREAKS = {
    "print": Fault(planted.PrintInNorm, "graph break", "Delete the call", planted.NormPrintDeleted),
    "hook with a lock": Fault(planted.hook_with_lock, "graph break", "Take the lock out", planted.hook_without_lock),
}
UNCAPTURABLE = {
    "item": Fault(planted.Item, "no CUDA graph", "Leave it a tensor", planted.ItemLeftATensor),
    "nonzero": Fault(planted.NonZero, "no CUDA graph", "torch.where(condition, value, 0)", planted.WholeWithMask),
    "mutated": Fault(planted.Mutated, "no CUDA graph", "register_buffer in __init__", planted.MutatedBuffer),
    "environment": Fault(planted.Environment, "pinned", "Read the variable once, in __init__", planted.ReadOnce),
}
# Compiled again at the first one that fails, so each is in a model of its own.
CACHE = {
    "python cache": Fault(
        planted.PythonCache, "recompile", "Fill the container in __init__", planted.PythonCacheOnlyRead
    )
}
MORE_BREAKS = {
    "print after attention": Fault(planted.Print, "graph break", "Delete the call", planted.PrintDeleted),
    "branch": Fault(planted.Branch, "graph break", "torch.where", planted.BothSides),
    "file": Fault(planted.FileAccess, "graph break", "Read the file once, in __init__", planted.ReadOnce),
}
GROWING = {"growing": Fault(planted.Growing, "recompile", "Give it one shape", planted.OneShape)}
GROUPS = (BREAKS, UNCAPTURABLE, CACHE, GROWING, MORE_BREAKS)
FAULTS = {name: fault for group in GROUPS for name, fault in group.items()}


@pytest.fixture(autouse=True, scope="module")
def _settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planted, "SETTINGS", tmp_path_factory.mktemp("planted") / "settings")
        planted.SETTINGS.write_text("0.9")
        yield


class Explained(NamedTuple):
    """A model with several faults, what was found, and what a user had compiled of it before."""

    model: Any
    report: Report
    before: Any
    compiles: list[Any]
    norm: Any


def seen_of(model: Any) -> Any:
    """What explaining must leave as it is."""
    hooks = [len(layer.input_layernorm._forward_hooks) for layer in model.model.layers]
    return type(model), model.config._attn_implementation, hooks


@pytest.fixture(scope="module")
def explained(request: pytest.FixtureRequest) -> Callable[[str], Explained]:
    """Models by one of their faults: those with several are explained once, every other one with prompts."""

    @cache
    def explained(index: int) -> Explained:
        inputs = mixed_prompts([5, 2], 128, seed=0) if index % 2 else None
        model, compiles = plant(*(fault.planted for fault in GROUPS[index].values())), []
        norm = torch.compile(model.model.norm, backend=lambda graph, _: compiles.append(graph) or graph.forward)
        norm(torch.randn(1, 3, 64))
        before = seen_of(model)
        with pytest.MonkeyPatch.context() as patch:
            if not request.config.getoption("whole"):
                run_few_programs(patch)
            return Explained(model, compiled_llm.explain(model, inputs), before, compiles, norm)

    return lambda name: explained(next(index for index, group in enumerate(GROUPS) if name in group))


def run_few_programs(patch: pytest.MonkeyPatch) -> None:
    """Those of one row, and around graph breaks that of prompts: the others have the same lines."""
    broken = BrokenPrograms.__init__

    def with_plain_decode(programs: BrokenPrograms, *more: Any) -> None:
        broken(programs, *more)
        programs._programs[DECODE_ONE] = programs._functions[DECODE_ONE]

    run_one_batch(patch)
    patch.setattr(BrokenPrograms, "__init__", with_plain_decode)


@pytest.fixture(scope="module")
def reports(explained: Callable[[str], Explained]) -> Callable[[str], Report]:
    """The report that names a fault."""
    return lambda name: explained(name).report


def planted_line(thing: Any) -> int:
    lines, first = inspect.getsourcelines(thing)
    return first + next(number for number, line in enumerate(lines) if line.rstrip().endswith("# planted"))


def the_finding(report: Report, thing: Any) -> dict[str, Any]:
    """The one finding on the planted line."""
    place = planted.__file__, planted_line(thing)
    (finding,) = [entry for entry in report.data["findings"] if (entry["file"], entry["line"]) == place]
    assert finding["source"].endswith("# planted")
    assert not finding["follows"]
    assert f"planted_faults.py:{finding['line']}" in str(report)
    return finding


IN_WHOLE = [pytest.mark.whole]
"""Growing shows in each run what is compiled again, and two breaks what follows from one."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=IN_WHOLE if name in {**UNCAPTURABLE, **CACHE, **MORE_BREAKS} else []) for name in FAULTS],
)
def test_a_fault_is_named_by_its_line_and_advice(name, reports):
    fault = FAULTS[name]
    finding = the_finding(reports(name), fault.planted)
    assert finding["kind"] == fault.kind
    assert fault.advice in finding["advice"]


@pytest.mark.parametrize(
    "group",
    [
        pytest.param(group, id=", ".join(group), marks=IN_WHOLE if group in (UNCAPTURABLE, CACHE, MORE_BREAKS) else [])
        for group in GROUPS
    ],
)
def test_nothing_but_the_faults_is_named(group, reports):
    report = reports(next(iter(group)))
    causes = [entry for entry in report.data["findings"] if not entry["follows"]]
    lines = {(entry["file"], entry["line"]) for entry in causes if entry["kind"] != "slow path"}
    assert lines == {(planted.__file__, planted_line(fault.planted)) for fault in group.values()}, str(report)
    assert [entry["kind"] for entry in causes].count("slow path") == ("hook with a lock" in group)


@pytest.mark.whole
def test_what_is_advised_makes_every_finding_go_away_and_the_model_serves(monkeypatch, whole):
    """All of it in one model: any that did not help would still be a finding. No package of an extra is imported."""
    faults = FAULTS if whole else {**BREAKS, **UNCAPTURABLE, **GROWING}
    for extra in ("depyf", "fastapi", "matplotlib", "msgspec", "prometheus_client", "typer", "uvicorn", "xgrammar"):
        monkeypatch.setitem(sys.modules, extra, None)

    def make() -> Any:
        return plant(*dict.fromkeys(fault.followed for fault in faults.values()))

    report = compiled_llm.explain(make())
    assert [finding["kind"] for finding in report.data["findings"]] == ["slow path"], f"of the hook; {report}"
    inputs = mixed_prompts([4, 9], 128, seed=0)
    expected = greedy(make(), inputs, 12)
    torch.testing.assert_close(greedy(compiled_llm.wrap(make(), mode="eager"), inputs, 12), expected)


@pytest.mark.whole
def test_a_module_swapped_after_wrap_is_named_and_wrapping_again_serves(monkeypatch):
    monkeypatch.setattr(
        programs,
        "compiled",
        lambda program, function, *more: torch.compile(function, backend="eager", fullgraph=True, dynamic=False),
    )
    inputs = mixed_prompts([4], 128, seed=0)
    model = compiled_llm.wrap(plant(planted.PrintDeleted), progress=False)
    greedy(model, inputs, 1)
    assert model.compiled.explain().clean
    model.model.layers[0].mlp = plant(planted.Swapped).model.layers[0].mlp
    greedy(model, inputs, 1)
    for report in (model.compiled.explain(), compiled_llm.explain(model)):
        finding = the_finding(report, planted.Swapped)
        assert finding["kind"] == "recompile"
        assert (finding["old"], finding["new"]) == ("PrintDeleted", "Swapped")
        assert finding["pinned_by"] == "model.model.layers.0.mlp"
        assert "compiled_llm.unwrap(model), then wrap it again" in finding["advice"]
    compiled_llm.wrap(compiled_llm.unwrap(model), progress=False)
    torch.testing.assert_close(greedy(model, inputs, 1), greedy(plant(planted.Swapped), inputs, 1))
    assert model.compiled.explain().clean


def test_recompiles_say_the_old_value_the_new_one_and_what_pins_it(reports):
    finding = the_finding(reports("growing"), planted.Growing)
    assert finding["pinned_by"] == "size of model.model.layers.0.mlp.history"
    assert int(finding["new"]) == int(finding["old"]) + 1


@pytest.mark.parametrize(("old", "new"), [(2.0, 3.0), ("sum", "max")])
def test_so_does_a_value_that_equals_another_one_no_more(old, new):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = old

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.by if isinstance(self.by, float) else getattr(x, self.by)()

    def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x)

    model, called = Scaled(), own_copy(call)
    compiled = torch.compile(called, backend="eager", dynamic=False)
    for value in (old, new):
        model.by = value
        compiled(model, torch.ones(3))
    (finding,) = recompiles_of(called, "decode", model)
    assert (finding.pinned_by, finding.old, finding.new) == ("model.by", repr(old), repr(new))
    assert finding.programs == ("decode",)


def test_a_model_whose_attention_does_not_reach_pages_is_told_so():
    config = FalconConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    report = compiled_llm.explain(FalconForCausalLM(config).eval())
    (finding,) = report.data["findings"]
    assert finding["kind"] == "refused"
    assert "do not reach the attention interface" in finding["reason"]


def test_what_forward_raises_is_a_finding_with_its_line():
    class Raises(planted.PrintDeleted):
        def forward(self, x):
            raise KeyError("no such thing")  # planted

    (finding,) = compiled_llm.explain(plant(Raises)).data["findings"]
    assert (finding["kind"], finding["file"], finding["line"]) == ("error", __file__, planted_line(Raises))
    assert "KeyError" in finding["reason"]


def test_explaining_leaves_no_trace(explained):
    for name in ("hook with a lock", "growing"):
        model, report, before, compiles, norm = explained(name)
        assert not report.clean
        norm(torch.randn(1, 3, 64))
        assert len(compiles) == 1, "explaining threw away what the user had compiled"
        assert seen_of(model) == before
    assert len(model.model.layers[0].mlp.history) == 1, "it grows in each forward"
    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
    functions = [thing for thing in gc.get_objects() if type(thing) is FunctionType]
    left = [thing for thing in functions if thing.__module__ == modeling_qwen3.__name__ and entries(thing.__code__)]
    assert left == [modeling_qwen3.Qwen3RMSNorm.forward]


def test_text_and_data_say_the_same(reports):
    report = reports("growing")
    finding = the_finding(report, planted.Growing)
    for said in (finding["source"], finding["reason"], finding["advice"], f"planted_faults.py:{finding['line']}"):
        assert " ".join(said.split()) in " ".join(str(report).split())
    assert json.loads(json.dumps(report.data)) == report.data


@pytest.mark.parametrize("wrapped", [True, False])
def test_what_keeps_calls_on_a_slower_path_is_named_before_there_are_any(wrapped, monkeypatch):
    monkeypatch.setattr(tracing, "compile_whole", lambda function, backend: function)
    model = in_eager_mode() if wrapped else tiny_qwen3(eos_token_id=None)
    assert compiled_llm.explain(model).clean
    handle = model.model.embed_tokens.register_forward_hook(lambda *_: None)
    (finding,) = compiled_llm.explain(model).data["findings"]
    assert finding["kind"] == "slow path"
    assert "slower path as the model is: hooks are on inner modules (model.embed_tokens, by" in finding["reason"]
    assert "compiled_llm.traced_hook" in finding["advice"]
    if wrapped:  # once a call has taken it, that one is told
        model.generate(**mixed_prompts([4], 128, seed=0), max_new_tokens=2)
        (finding,) = compiled_llm.explain(model).data["findings"]
        assert finding["reason"].startswith("generate took a slower path, 1 times: hooks")
    else:
        handle.remove()
        assert compiled_llm.explain(model).clean


@pytest.mark.parametrize(
    ("output", "said", "wrapped"),
    [("output_hidden_states", "hidden states are asked for", False), ("output_attentions", "is on", True)],
)
def test_outputs_that_a_config_asks_for_are_a_slow_path_and_no_graph_break(output, said, wrapped):
    model = tiny_qwen3(attn_implementation="eager", **{output: True})
    if wrapped:
        compiled_llm.wrap(model, mode="eager", progress=False)
    report = compiled_llm.explain(model)
    (finding,) = report.data["findings"]
    assert finding["kind"] == "slow path"
    assert said in finding["reason"]
    assert getattr(model.config, output)


def test_history_counts_slow_paths_with_their_causes():
    model = in_eager_mode()
    model.generate(**mixed_prompts([4], 128, seed=0), max_new_tokens=3, do_sample=False, num_beams=2)
    report = model.compiled.explain()
    (finding,) = report.data["findings"]
    assert finding["kind"] == "slow path"
    assert "beam" in finding["reason"]
    assert "num_beams" in finding["advice"]
    assert report.data["history"]["generate_calls"] == {"compiled forward": 1}


def in_eager_mode(**options: Any) -> Any:
    return compiled_llm.wrap(tiny_qwen3(eos_token_id=None), mode="eager", progress=False, **options)


@torch.no_grad()
def test_history_says_why_page_tables_were_uploaded():
    model = in_eager_mode(page_size=4)

    def causes() -> dict[str, int]:
        history = model.compiled.explain().data["history"]
        assert sum(history["upload_causes"].values()) == history["uploads"] == model.compiled.stats().uploads
        return history["upload_causes"]

    greedy(model, mixed_prompts([3], 128, seed=0), 45)
    # Tokens 3 to 46 are stored by decode steps; the pages of the first 36 are known from the beginning.
    assert causes() == {"bucket_prepared": 1, "call_moved_in": 1, "new_page": 1}
    greedy(model, mixed_prompts([3, 2], 128, seed=0), 2)
    assert causes()["call_moved_in"] == 2
    generate_loop = model.compiled.generate_loop()
    rows = [generate_loop.admit([1, 2, 3], 8) for _ in range(3)]
    for _ in range(3):
        generate_loop.step()
    generate_loop.release(rows[0])
    generate_loop.step()
    assert causes()["rows_changed"] == 1
    tokens = torch.tensor([[5]])
    cache = model(torch.tensor([[1, 2, 3, 4]]), use_cache=True).past_key_values
    model(tokens, past_key_values=cache)
    other = copy.deepcopy(cache)
    for _ in range(2):
        model(tokens, past_key_values=cache)
    assert causes()["page_copied"] == 1
    other.close()


@pytest.mark.parametrize("sizes", [[1], [1, 3], None], ids=["another size", "this size", "no warmup"])
def test_a_bucket_that_warmup_did_not_name_starts_cold(sizes):
    model = in_eager_mode()
    if sizes is not None:
        model.compiled.warmup(sizes)
    greedy(model, mixed_prompts([4, 2, 3], 128, seed=0), 3)
    report = model.compiled.explain()
    reasons = [finding["reason"] for finding in report.data["findings"] if finding["kind"] == "cold start"]
    assert len(reasons) == len(report.data["findings"]) == (sizes == [1])
    for finding in report.data["findings"]:
        assert "for decode bucket 4: warmup did not name a batch size of 3" in finding["reason"]
        assert "warmup([..., 3])" in finding["advice"]
    if sizes is None:  # the first call of a size waits, and that is no fault
        found = [(cold["what"], cold["rows"], cold["cause"]) for cold in report.data["history"]["cold_starts"]]
        assert found == [("prefill", 3, "warmup_not_called"), ("decode bucket 4", 3, "warmup_not_called")]
        assert "waited for decode bucket 4" in str(report)


@torch.no_grad()
def test_prefill_from_embeddings_is_waited_for_but_no_warmup_would_help():
    model = in_eager_mode()
    model.compiled.warmup([1])
    embeddings = model.get_input_embeddings()(torch.tensor([[1, 2, 3]]))
    for _ in range(2):
        model(inputs_embeds=embeddings, use_cache=False)
    report = model.compiled.explain()
    assert report.clean
    (entry,) = report.data["history"]["cold_starts"]
    assert (entry["what"], entry["rows"]) == ("prefill from embeddings", 1)
    assert entry["cause"] == "never_prepared"


def test_what_a_change_of_the_model_took_starts_cold_with_that_as_its_cause():
    model = in_eager_mode()
    model.compiled.warmup([1])
    model.double()
    greedy(model, mixed_prompts([4], 128, seed=0), 3)
    reasons = [entry["reason"] for entry in model.compiled.explain().data["findings"]]
    said = "moved, converted, hooked or given more positions after warmup"
    assert [said in reason for reason in reasons] == [True, True]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model that is told of CUDA graphs: one for each bucket that has run, and those in its ``again``."""
    model = in_eager_mode()
    model_runner = model.compiled.model_runner()
    model.again, seen, own = [], set(), model_runner.graph_manager.programs.prepared

    def prepared(arguments: Arguments, compare: bool = True) -> Any:
        if isinstance(arguments.inputs, DecodeInputs):
            seen.add(arguments.inputs.slots.shape[0])
        return own(arguments, compare)

    monkeypatch.setattr(model_runner.graph_manager.programs, "in_trees", True)
    monkeypatch.setattr(model_runner.graph_manager.programs, "prepared", prepared)
    monkeypatch.setattr(model_runner.graph_manager.cuda_graphs, "replay", True)
    monkeypatch.setattr(model_runner.graph_manager.cuda_graphs, "_in_trees", True)
    monkeypatch.setattr(cuda_graphs, "cudagraph_tree_graphs", lambda device: len(seen) + len(model.again))
    model.compiled.warmup([1, 2])
    return model


def test_a_weight_that_moved_is_to_blame_for_graphs_captured_again(captured):
    assert captured.compiled.explain().clean
    layer = captured.model.layers[1].mlp.down_proj
    layer.weight.data.copy_(layer.weight.data * 2)
    assert captured.compiled.explain().clean
    layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
    captured.again += [1, 2]
    (finding,) = captured.compiled.explain().data["findings"]
    assert finding["kind"] == "captured again"
    assert finding["reason"].endswith(": model.layers.1.mlp.down_proj.weight.")
    assert finding["reason"].startswith("2 CUDA graphs")
    assert "in place" in finding["advice"]


def test_graphs_captured_again_for_no_known_reason_are_told_and_how_to_find_it(captured):
    captured.again.append(1)
    (finding,) = captured.compiled.explain().data["findings"]
    assert "TORCH_LOGS=+cudagraphs" in finding["advice"]


@pytest.fixture
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, few in (("_WARM", 1), ("_RUNS", 1), ("_RUN", 2), ("_PROFILED", 4), ("_STEPS", 11)):
        monkeypatch.setattr(timings, name, few)


@pytest.mark.usefixtures("_few_steps")
def test_timings_of_a_wrapped_model_are_of_the_buckets_that_are_ready():
    model = in_eager_mode()
    greedy(model, mixed_prompts([4, 2], 128, seed=0), 3)
    before = model.compiled.explain().data["history"]
    report = model.compiled.explain(timings=True)
    prefill, decode = report.data["timings"]
    assert (prefill["program"], prefill["rows"], prefill["tokens"]) == ("prefill", 2, 2 * 128)
    assert (decode["program"], decode["rows"]) == ("decode", 2)
    assert 128 < decode["tokens"] < 192
    calls = {kernel["name"]: kernel["launches"] for kernel in decode["kernels"]}
    assert calls["compiled_llm::decode_attention"] == 2, "one a layer, in each of the steps"
    assert {"attention", "matrix products"} <= {kind["name"] for kind in decode["kinds"]}
    assert f"decode, 2 rows of about {decode['tokens']} tokens" in str(report)
    assert "the rest: compiled loops, Python" in str(report)
    assert report.data["history"] == before, "looking changes nothing"
    assert model.compiled.stats().pages.used == 0


@pytest.mark.whole
@pytest.mark.usefixtures("_few_steps")
def test_a_batch_size_that_is_ready_for_smaller_ones_to_run_in_is_timed_once_it_is_wanted(monkeypatch):
    let_a_cpu_capture(monkeypatch)
    model = in_eager_mode(max_batch_size=8)
    for wanted, timed in ([2], [2]), ([8], [2, 8]):
        model.compiled.warmup(wanted)
        assert model.compiled.stats().buckets == [2, 8]
        timings = model.compiled.explain(timings=True).data["timings"]
        assert [timing["rows"] for timing in timings if timing["program"] == "decode"] == timed


@pytest.mark.gpu
def test_on_cuda_kernels_are_timed_and_a_moved_weight_is_named():
    model = tiny_qwen3(eos_token_id=None).to("cuda", torch.bfloat16)
    compiled_llm.wrap(model, kv_memory="8192 tokens", progress=False).compiled.warmup([2])
    report = model.compiled.explain(timings=True)
    assert report.clean, str(report)
    prefill, decode = report.data["timings"]
    assert (prefill["measured"], decode["measured"], decode["rows"]) == ("kernels", "kernels", 2)
    assert decode["host_us"] > 0
    assert {"attention", "matrix products"} <= {kind["name"] for kind in decode["kinds"]}
    layer = model.model.layers[1].mlp.down_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
    inputs = mixed_prompts([4, 2], 128, seed=0)
    greedy(model, {name: tensor.to("cuda") for name, tensor in inputs.items()}, 8)
    (finding,) = model.compiled.explain().data["findings"]
    assert finding["kind"] == "captured again"
    assert finding["reason"].endswith(": model.layers.1.mlp.down_proj.weight.")


def test_timings_of_sizes_that_cannot_be_are_refused():
    model = in_eager_mode(max_batch_size=4)
    with pytest.raises(ValueError, match="timings: 5 is not a whole number between 1 and max_batch_size=4"):
        model.compiled.explain(timings=[1, 5])
    with pytest.raises(ValueError, match="timings: 0 rows"):
        compiled_llm.explain(plant(planted.PrintDeleted), timings=[0])


def test_a_model_in_training_mode_is_told_so_and_not_timed():
    report = compiled_llm.explain(tiny_qwen3(attention_dropout=0.1).train(), timings=True)
    assert "call model.eval() first" in report.data["findings"][0]["reason"]
    assert report.data["timings"] == []
    assert "Nothing was timed" in str(report)


def test_history_names_the_line_that_kept_a_cuda_graph_from_being_captured(monkeypatch):
    model = in_eager_mode()
    model_runner = model.compiled.model_runner()
    line = planted_line(planted.Mutated.forward)
    own = model_runner.graph_manager.programs.prepared

    def skipping(*args: Any) -> Any:
        log_cudagraph_skip_and_bump_counter(
            "skipping cudagraphs due to mutated inputs (1 instances). Found from : \n"
            f'  File "{planted.__file__}", line {line}, in forward\n    COUNT.add_(1.0)\n'
        )
        return own(*args)

    monkeypatch.setattr(model_runner.graph_manager.programs, "prepared", skipping)
    model.compiled.warmup([1])
    finding = the_finding(model.compiled.explain(), planted.Mutated.forward)
    assert finding["kind"] == "no CUDA graph"
    assert "register_buffer" in finding["advice"]
    assert model.compiled.explain().data["history"]["cudagraph_skips"] == 1


@pytest.mark.parametrize("name", ["demo", None], ids=["demo", "a folder"])
def test_the_command_prints_the_report(tmp_path, monkeypatch, name):
    """And names the model as it was named."""
    monkeypatch.setattr(tracing, "compile_whole", lambda function, backend: function)
    folder = tmp_path / "model"
    monkeypatch.setattr(load, "demo_folder", lambda progress: folder)
    tiny_qwen3(eos_token_id=None, num_hidden_layers=1).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    named = name or str(folder)
    done = CliRunner().invoke(app, ["explain", named])
    assert done.exit_code == 0, done.output
    assert "Every program is one graph" in done.stdout
    said = " ".join(done.stdout.split())
    assert f"from {named} device" in said


def test_logs_named_in_the_environment_go_to_stderr_and_no_others():
    script = """
import logging, compiled_llm
for name in ("uploads", "graphs", "pages"):
    logging.getLogger(f"compiled_llm.{name}").debug("said by %s", name)
"""
    environ = {**os.environ, "COMPILED_LLM_LOGS": "graphs"}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)
    assert done.stderr == "compiled_llm.graphs: said by graphs\n"


def test_steps_say_what_they_upload_capture_and_take(caplog):
    model = in_eager_mode(page_size=4)
    with caplog.at_level("DEBUG", "compiled_llm"):
        greedy(model, mixed_prompts([3], 128, seed=0), 4)
    said = {(record.name, record.getMessage().split()[0]) for record in caplog.records}
    assert said >= {
        ("compiled_llm.uploads", "decode"),
        ("compiled_llm.graphs", "decode"),
        ("compiled_llm.pages", "pages"),
    }
