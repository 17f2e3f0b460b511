"""Sliding windows of a checkpoint: one for all layers is served as transformers computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from mstar.model.checkpoint import open_checkpoint

from .driver import generate, load_small
from .small_checkpoints import edit_config, random_model, save, write_gguf

PROMPTS = [[5, 99, 42], [*range(40)], [*range(90, 0, -1)]]
SLIDING, FULL = "sliding_attention", "full_attention"

WINDOWED: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"sliding_window": 16}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "layer_types": [SLIDING] * 2}),
]


@pytest.mark.parametrize(("family", "shape"), WINDOWED)
@pytest.mark.parametrize("window", [1, 16, 33])
def test_a_window_of_all_layers_is_attended_as_transformers_does(
    family: str, shape: dict[str, Any], window: int, tmp_path: Path
) -> None:
    model = random_model(family, **shape | {"sliding_window": window})
    save(model, tmp_path)
    assert open_checkpoint(str(tmp_path)).config.sliding_window == window
    run = generate(load_small(tmp_path), PROMPTS, 8)
    for row, prompt in enumerate(PROMPTS):
        ids = torch.tensor([[*prompt, *run.tokens[row, :-1].tolist()]])
        with torch.no_grad():
            expected = model(ids).logits[0, len(prompt) - 1 :]
        torch.testing.assert_close(run.logits[:, row], expected, atol=5e-5, rtol=0)
        assert run.tokens[row].tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("family", "changes", "removed", "window"),
    [
        ("mistral", {"sliding_window": None}, (), None),
        ("mistral", {}, ("sliding_window",), 4096),
        ("mistral", {"sliding_window": 8, "layer_types": [FULL] * 2}, (), None),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8}, ("layer_types",), None),
        ("qwen2", {"use_sliding_window": True, "sliding_window": None}, ("layer_types",), None),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, ("layer_types", "max_window_layers"), None),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, ("layer_types",), None),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, ("layer_types", "sliding_window"), 4096),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, ("layer_types",), 8),
        ("llama", {"sliding_window": 8}, (), None),  # transformers' Llama knows no such key
        ("llama", {"layer_types": [SLIDING] * 2, "sliding_window": 8}, (), 8),
    ],
)
def test_where_a_window_is_declared_depends_on_the_family(
    family: str, changes: dict[str, Any], removed: tuple[str, ...], window: int | None, tmp_path: Path
) -> None:
    save(random_model(family), tmp_path)
    edit_config(tmp_path, remove=removed, **changes)
    assert open_checkpoint(str(tmp_path)).config.sliding_window == window


@pytest.mark.parametrize(("metadata", "window"), [({}, None), ({"attention.sliding_window": 24}, 24)])
def test_a_gguf_names_its_window_in_its_own_key(metadata: dict[str, int], window: int | None, tmp_path: Path) -> None:
    keys = {f"qwen2.{key}": value for key, value in metadata.items()}
    kind = gguf.GGMLQuantizationType.F32
    file = write_gguf(tmp_path / "m.gguf", random_model("qwen2"), kind, metadata=keys)
    assert open_checkpoint(str(file)).config.sliding_window == window
