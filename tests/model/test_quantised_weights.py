"""Weights left in their quantised blocks: same model, fewer bytes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf
import pytest
import torch

from mstar.kernels.linear import takes_blocks

from .driver import CPU, SMALL, generate, load_small
from .small_checkpoints import random_model, write_gguf

KINDS = ["Q4_0", "Q4_1", "Q8_0"]
DEQUANTISED = dataclasses.replace(SMALL, keep_blocks=False)

pytestmark = pytest.mark.skipif(not takes_blocks("Q4_1", torch.float32, CPU), reason="no panel kernel")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_blocks_give_the_logits_of_dequantised_weights_bit_for_bit(
    family: str, kind: str, tied: bool, tmp_path: Path
) -> None:
    model = random_model(family, tie_word_embeddings=tied)
    file = write_gguf(tmp_path / "model.gguf", model, gguf.GGMLQuantizationType[kind])
    blocks, plain = load_small(file), load_small(file, options=DEQUANTISED)
    prompts = [[1, 2, 3, 4, 5], [7]]
    run, expected = generate(blocks, prompts, 6), generate(plain, prompts, 6)
    assert torch.equal(run.logits, expected.logits)
    assert (run.tokens == expected.tokens).all()
    assert blocks.num_parameters == plain.num_parameters
    assert blocks.weight_bytes < plain.weight_bytes / (1.5 if not tied else 3)


@pytest.mark.parametrize("kind", ["Q5_0", "F16"])
def test_other_kinds_are_dequantised_at_load(kind: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", random_model("llama"), gguf.GGMLQuantizationType[kind])
    assert load_small(file).weight_bytes == load_small(file, options=DEQUANTISED).weight_bytes


def test_a_16_bit_dtype_dequantises_at_load(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", random_model("llama"), gguf.GGMLQuantizationType.Q8_0)
    loaded = load_small(file, dtype=torch.bfloat16)
    assert loaded.weight_bytes == 2 * loaded.num_parameters
