"""Random weights: every tensor that a model asks for and no other, from config.json alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mstar.model.checkpoint import open_checkpoint
from mstar.model.loader import EMBEDDING
from mstar.model.options import ModelLoadOptions
from mstar.model.registry import load_model
from mstar.model.weights import choose_dtype, open_tensors
from mstar.utils.errors import LoadError

from .small_checkpoints import CLASSES, edit_config, random_model, save

CPU = torch.device("cpu")


def config_alone(folder: Path, family: str = "llama", **overrides: Any) -> Path:
    save(random_model(family, **overrides), folder)
    for file in folder.iterdir():
        if file.name != "config.json":
            file.unlink()
    return folder


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_folder_with_a_config_alone_has_the_tensors_that_its_checkpoint_has(tmp_path: Path, family, is_tied) -> None:
    overrides = {"tie_word_embeddings": is_tied}
    if family == "llama":
        overrides |= {"attention_bias": True, "mlp_bias": True}
    whole = open_tensors(open_checkpoint(str(save(random_model(family, **overrides), tmp_path / "whole"))))
    alone = config_alone(tmp_path / "alone", family, **overrides)
    dummy = open_tensors(open_checkpoint(str(alone)), load_format="dummy")
    assert {n: e.shape for n, e in dummy.entries.items()} == {n: e.shape for n, e in whole.entries.items()}
    with pytest.raises(LoadError, match="safetensors"):
        open_tensors(open_checkpoint(str(alone)))


def test_weights_are_the_same_each_time_and_of_a_size_that_keeps_activations_in_range(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(config_alone(tmp_path)))
    first, second = (open_tensors(checkpoint, load_format="dummy") for _ in range(2))
    name = "model.layers.1.mlp.down_proj.weight"
    weight, again, other = (torch.empty(first.entries[name].shape) for _ in range(3))
    first.read_into(name, weight)
    second.read_into(name, again)
    first.read_into(name.replace("layers.1", "layers.0"), other)
    assert torch.equal(weight, again)
    assert not torch.equal(weight, other)
    assert weight.std() * weight.shape[1] ** 0.5 == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(("stored", "served"), [("float16", torch.float16), (None, torch.bfloat16)])
def test_where_16_bits_are_fast_the_dtype_is_the_one_that_the_config_names(tmp_path: Path, stored, served) -> None:
    folder = config_alone(tmp_path)
    edit_config(folder, remove=("torch_dtype",) if stored else ("torch_dtype", "dtype"), dtype=stored)
    source = open_tensors(open_checkpoint(str(folder)), load_format="dummy")
    assert choose_dtype(None, source.entries[EMBEDDING].dtype, torch.device("cuda")) == served


def test_a_model_loads_with_no_tensor_left_over(tmp_path: Path) -> None:
    options = ModelLoadOptions(load_format="dummy", max_running_requests=2, kv_memory_bytes=1 << 20)
    model = load_model(str(config_alone(tmp_path, "qwen3")), device=CPU, dtype=None, options=options)
    assert model.num_parameters == sum(p.numel() for p in random_model("qwen3").parameters())
