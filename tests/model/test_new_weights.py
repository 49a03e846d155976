"""New weights from a folder: everything is checked before any weight changes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel

from compiled_llm.model.weights.new_weights import NewWeights
from support.tiny_models import TINY, tiny_llama, tiny_qwen3


def saved(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal(model: PreTrainedModel, expected: dict[str, torch.Tensor]) -> None:
    found = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def mixtral(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return MixtralForCausalLM(MixtralConfig(**{**TINY, "num_local_experts": 4})).eval()


@pytest.mark.core
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (tiny_qwen3, {}),
        (tiny_qwen3, {"max_shard_size": "100KB"}),
        (lambda seed: tiny_llama(seed, tie_word_embeddings=True), {}),
        (mixtral, {}),  # in files each expert is by itself
    ],
    ids=["whole", "sharded", "tied", "experts"],
)
def test_all_tensors_become_those_of_the_folder(make: Any, options: dict[str, Any], tmp_path: Path) -> None:
    model, other = make(0), make(1)
    own = dict(model.named_parameters())
    addresses = {name: parameter.data_ptr() for name, parameter in own.items()}
    new = NewWeights(model, saved(other, tmp_path / "new", **options))
    shutil.rmtree(tmp_path / "new")  # a trainer may write the next ones there before these are taken
    new.write()
    assert_equal(model, state(other))
    assert all(parameter is own[name] for name, parameter in model.named_parameters())
    assert addresses == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def test_numbers_get_the_dtype_of_the_model(tmp_path: Path) -> None:
    model, other = tiny_qwen3(0), tiny_qwen3(1).bfloat16()
    NewWeights(model, saved(other, tmp_path)).write()
    assert_equal(model, {name: tensor.float() for name, tensor in state(other).items()})


def test_weights_made_in_inference_mode_are_written_too(tmp_path: Path) -> None:
    with torch.inference_mode():
        model = tiny_qwen3(0)
    NewWeights(model, saved(tiny_qwen3(1), tmp_path)).write()
    assert_equal(model, state(tiny_qwen3(1)))


def test_a_model_whose_tensors_were_replaced_meanwhile_is_left_alone(tmp_path: Path) -> None:
    model: Any = tiny_qwen3(0)
    new = NewWeights(model, saved(tiny_qwen3(1), tmp_path))
    model.model.norm.weight = torch.nn.Parameter(torch.ones(64))
    before = state(model)
    with pytest.raises(RuntimeError, match="tensors of the model were replaced meanwhile"):
        new.write()
    assert_equal(model, before)


def edit(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    """Return what changes the tensors in a folder."""

    def processed(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return processed


def config(**changes: Any) -> Callable[[Path], None]:
    def processed(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return processed


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def adapter(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")


def index(text: str) -> Callable[[Path], None]:
    def written(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        (folder / "model.safetensors.index.json").write_text(text)

    return written


def fifo(folder: Path) -> None:
    """A process that opens it waits for ever."""
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


NORM = "model.norm.weight"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, "there is no folder"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "there is no model.safetensors or"),
    "pickles": (pickled, "pickles are never read"),
    "an adapter": (adapter, "merge it"),
    "a pipe": (fifo, "there is no model.safetensors or"),
    "cut": (cut, "is damaged, or no safetensors"),
    "no safetensors": (lambda folder: (folder / "model.safetensors").write_text("x" * 99), "is damaged"),
    "lacks": (edit(lambda tensors: tensors.pop(NORM)), f"lacks tensors of the model: {NORM}$"),
    "foreign": (edit(lambda tensors: tensors.update(x=torch.ones(1))), "tensors that the model has not: x$"),
    "shape": (edit(lambda tensors: tensors.update({NORM: torch.ones(3)})), rf"{NORM} has the shape \[3\].*\[64\]"),
    "dtype": (
        edit(lambda tensors: tensors.update({NORM: torch.ones(64, dtype=torch.int8)})),
        f"{NORM} has the dtype I8",
    ),
    "another model": (config(model_type="llama"), "of a llama, and the model is a qwen3"),
    "quantised": (config(quantization_config={"quant_method": "fp8"}), "in the folder are quantised"),
    "config": (lambda folder: (folder / "config.json").write_text("{"), "config.json' cannot be read as JSON"),
    "another rotary embedding": (
        config(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        r"has rope_parameters=\{.*500000.0.*\}, and the model \{.*10000.0.*\}: the model would compute something else",
    ),
    "other attention": (
        config(rms_norm_eps=1e-3, sliding_window=7, use_sliding_window=True, vocab_size=3, hidden_act="relu"),
        "has hidden_act='relu', and the model 'silu'; rms_norm_eps=0.001, .*; sliding_window=7, .*; and 2 more: ",
    ),
    "wrong config": (config(hidden_size="many"), "config.json is no Qwen3Config: "),
    "list": (lambda folder: (folder / "config.json").write_text("[]"), "it is no object"),
    "index": (index("[" * 100_000), "index.json' cannot be read as JSON"),
    "no map": (index('{"weight_map": [1]}'), "has no weight_map"),
    "number": (index('{"weight_map": {"x": 1}}'), "has no weight_map"),
    "outside": (
        index('{"weight_map": {"x": "../model-1.safetensors"}}'),
        "names the file '../model-1.safetensors'; only",
    ),
    "absolute": (index('{"weight_map": {"x": "/etc/passwd"}}'), "names the file '/etc/passwd'; only"),
    "other kind": (index('{"weight_map": {"x": "model.bin"}}'), "names the file 'model.bin'; only"),
    "missing file": (index('{"weight_map": {"x": "model-2.safetensors"}}'), "'model-2.safetensors', which is missing"),
    "not in file": (index('{"weight_map": {"x": "model-1.safetensors"}}'), "says that x is in model-1.safetensors"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_of_something_else_is_refused(damage: str, tmp_path: Path) -> None:
    model, before = tiny_qwen3(0), state(tiny_qwen3(0))
    folder = saved(tiny_qwen3(1), tmp_path / "new")
    harm, message = DAMAGES[damage]
    harm(folder)
    with pytest.raises(ValueError, match=f"^update_weights: .*{message}"):
        NewWeights(model, folder)
    assert_equal(model, before)


def test_a_folder_that_cannot_be_looked_into_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^update_weights: '/a+…' cannot be read: File name too long"):
        NewWeights(tiny_qwen3(0), Path("/" + "a" * 5000))

    def locked(_: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", locked)
    with pytest.raises(ValueError, match="cannot be read: Permission denied"):
        NewWeights(tiny_qwen3(0), tmp_path)


OF_A_TRAINER = {
    "attention_dropout": 0.1,
    "architectures": ["Other"],
    "eos_token_id": 7,
    "use_cache": False,
    "dtype": "bfloat16",
    "transformers_version": "4.50.0",
    "of_a_later_version": 1,
}


@pytest.mark.parametrize(
    "changes", [OF_A_TRAINER, {"rope_parameters": None, "rope_theta": 10000, "rope_scaling": None}]
)
def test_a_config_that_computes_the_same_is_the_models(changes: dict[str, Any], tmp_path: Path) -> None:
    """What trainers write otherwise, and the names of older versions."""
    model, other = tiny_qwen3(0), tiny_qwen3(1)
    folder = saved(other, tmp_path)
    config(**changes)(folder)
    file = folder / "config.json"
    file.write_text(
        json.dumps({name: value for name, value in json.loads(file.read_text()).items() if value is not None})
    )
    NewWeights(model, folder).write()
    assert_equal(model, state(other))


def test_an_expert_that_is_missing_is_refused(tmp_path: Path) -> None:
    model, folder = mixtral(0), saved(mixtral(1), tmp_path)
    edit(lambda tensors: tensors.pop("model.layers.1.block_sparse_moe.experts.2.w2.weight"))(folder)
    with pytest.raises(ValueError, match="down_proj has the shape"):
        NewWeights(model, folder)
    assert_equal(model, state(mixtral(0)))


def test_tied_tensors_that_differ_are_refused(tmp_path: Path) -> None:
    model = tiny_llama(0, tie_word_embeddings=True)
    folder = saved(tiny_llama(1), tmp_path)  # whose head is its own
    with pytest.raises(ValueError, match="differ in the folder, and the model has one tensor for both"):
        NewWeights(model, folder)
    equal = edit(lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    equal(folder)
    NewWeights(model, folder).write()
    assert torch.equal(model.lm_head.weight, tiny_llama(1).model.embed_tokens.weight)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = saved(tiny_qwen3(1), tmp_path)
    path = folder / "model.safetensors"
    shutil.copy(path, folder / "a.safetensors")
    path.rename(folder / "b.safetensors")
    files = {NORM: "a.safetensors", "lm_head.weight": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(ValueError, match="is in two files"):
        NewWeights(tiny_qwen3(0), folder)


def test_a_model_with_other_numbers_than_those_in_files_is_refused(tmp_path: Path) -> None:
    folder = saved(tiny_qwen3(1), tmp_path)
    model: Any = tiny_qwen3(0)
    model.model.norm.weight = torch.nn.Parameter(torch.ones(64, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"model.norm.weight has the dtype F32 in the folder, and torch.int8 in the"):
        NewWeights(model, folder)
    model = tiny_qwen3(0)
    model.hf_quantizer = object()
    with pytest.raises(ValueError, match=r"the model is quantised \(by a quantizer, after its files were read\)"):
        NewWeights(model, folder)
