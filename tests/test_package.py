from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]
PACKAGES = ("compiled_llm", "compiled_llm_flashinfer", "compiled_llm_ops")


def run_fresh(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter that sees neither the checkout nor the environment's paths."""
    return subprocess.run([sys.executable, "-I", "-c", code], cwd=folder, capture_output=True, text=True, timeout=300)


def location(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


OPS_ALONE = """
import sys
sys.modules.update(transformers=None, flashinfer=None)
import compiled_llm_flashinfer, compiled_llm_ops
assert "compiled_llm" not in sys.modules
del sys.modules["transformers"], sys.modules["flashinfer"]
"""
EXTRAS = ["depyf", "fastapi", "httptools", "matplotlib", "msgspec", "prometheus_client", "ray", "typer", "uvicorn"]
WITHOUT_EXTRAS = f"""
extras = {[*EXTRAS, "xgrammar"]}
sys.modules.update(dict.fromkeys(extras))
import torch, transformers, compiled_llm
config = transformers.LlamaConfig(vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
                                  num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                                  eos_token_id=None, pad_token_id=0)
model = transformers.LlamaForCausalLM(config).eval()
prompt = torch.tensor([[3, 4, 5]])
expected = model.generate(prompt, max_new_tokens=5, do_sample=False).tolist()
wrapped = compiled_llm.wrap(model, mode="eager", kv_memory="2000 tokens", progress=False)
assert wrapped.generate(prompt, max_new_tokens=5, do_sample=False).tolist() == expected
with compiled_llm.Engine(wrapped) as engine:
    processors = [lambda tokens, logits: logits]
    params = compiled_llm.SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logits_processors=processors)
    (output,) = engine.generate([[3, 4, 5]], params)
assert expected == [[3, 4, 5, *output.token_ids]]
compiled_llm.explain
for name in extras:
    del sys.modules[name]
"""
IMPORT_ALL = """
import importlib, inspect, pkgutil
for found in pkgutil.walk_packages(compiled_llm.__path__, "compiled_llm."):
    try:
        importlib.import_module(found.name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] not in ("lm_eval", "ray"):  # what is not installed for tests
            raise
for name in compiled_llm.__all__:
    value = getattr(compiled_llm, name)
    assert inspect.isclass(value) or inspect.isfunction(value), (name, value)
    assert value is getattr(importlib.import_module(value.__module__), name)
assert issubclass(compiled_llm.OutOfPagesError, Exception)
for call in (compiled_llm.explain, compiled_llm.wrap, compiled_llm.unwrap):
    try:
        call("no model")
    except (AttributeError, TypeError, ValueError):
        pass
assert compiled_llm.WrapConfig().mode == "cuda-graphs"
print("done")
"""


def test_installed_package_runs_without_extras_in_an_empty_directory_and_public_names_stay_themselves(
    tmp_path: Path,
) -> None:
    """Ops are imported without transformers and FlashInfer, then models and engines run without the packages of extras;
    then every submodule is imported. In one process, since importing takes longest.

    `jinja2` and `pydantic` may be there by others: transformers brings them, or tells that they are missing. That
    `explain` imports no extra later, either, is tested with it.
    """
    done = run_fresh(OPS_ALONE + WITHOUT_EXTRAS + IMPORT_ALL, tmp_path)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_importing_the_package_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    code = "import sys, compiled_llm; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    done = run_fresh(code, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"COMPILED_LLM_LOGS": "graphs,uplods"}, "COMPILED_LLM_LOGS: 'uplods' is none of uploads, graphs, pages\n"),
        ({"COMPILED_LLM_LOGS": " , ,"}, ""),
        ({"COMPILED_LLM_CACHE": "~nobody/cache"}, ""),
        ({"COMPILED_LLM_CACHE": "relative"}, ""),
    ],
)
def test_no_environment_variable_keeps_the_package_from_being_imported(
    environ: dict[str, str], said: str, tmp_path: Path
) -> None:
    code = "import os; os.rmdir(os.getcwd()); import compiled_llm"  # nor does a working directory that is gone
    done = subprocess.run(
        [sys.executable, "-W", "error", "-I", "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, said)


def test_ops_have_one_name_only(tmp_path: Path) -> None:
    done = run_fresh("import ops.compiled_llm_ops", tmp_path)
    assert "ModuleNotFoundError: No module named 'ops'" in done.stderr


def test_version_is_the_distributions() -> None:
    assert importlib.import_module("compiled_llm").__version__ == version("compiled-llm")


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed(package: str) -> None:
    assert (location(package) / "py.typed").is_file()


@pytest.mark.parametrize("folder", ["ops", "tests", "tools"])
def test_source_roots_are_no_packages(folder: str) -> None:
    assert not (CHECKOUT / folder / "__init__.py").exists()


@pytest.mark.skipif("TOX_ENV_NAME" not in os.environ, reason="only tox promises to test the built wheel")
@pytest.mark.parametrize("package", PACKAGES)
def test_tox_tests_the_built_wheel(package: str) -> None:
    assert location(package).is_relative_to(sys.prefix)
    assert not location(package).is_relative_to(CHECKOUT / package)


def test_no_two_test_files_have_one_name() -> None:
    """pytest would import the first of them alone, and report the other as an error, if both are run."""
    names = Counter(path.name for path in (CHECKOUT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
