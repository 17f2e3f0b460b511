"""Rotary scaling of a checkpoint: read from either spelling, its context, and the text that comes of it (BC-40)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import PreTrainedModel

from mstar.model.checkpoint import open_checkpoint
from mstar.model.rope import ORIGINAL, context_length, parse_rope_scaling
from mstar.utils.errors import LoadError

from .driver import generate, load_small
from .small_checkpoints import CLASSES, edit_config, random_model, save, write_gguf

FLOAT_ERROR = 1e-4
TRAINED = 64
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
TYPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": LLAMA3 | {ORIGINAL: 16},
    "yarn": YARN,
    "yarn-original": YARN | {ORIGINAL: 32},
    "yarn-exact-range": YARN | {"truncate": False},
    "yarn-mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn-attention-factor": YARN | {"attention_factor": 1.2, "beta_fast": 16.0, "beta_slow": 2.0},
}


# Reading.


@pytest.mark.parametrize(
    ("raw", "scaling", "context"),
    [
        (None, None, 4096),
        ({}, None, 4096),
        ({"rope_type": "default"}, None, 4096),
        ({"type": None}, None, 4096),
        ({"rope_type": "linear", "factor": 2}, {"factor": 2.0}, 8192),
        ({"rope_type": "dynamic", "factor": 2.0}, {"factor": 2.0, ORIGINAL: 4096}, 8192),
        ({"rope_type": "dynamic", "factor": 2.0, ORIGINAL: 1024}, {"factor": 2.0, ORIGINAL: 4096}, 8192),
        ({"rope_type": "yarn", "factor": 4.0}, {"factor": 4.0, ORIGINAL: 4096, "truncate": True}, 16384),
        (
            {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 1024, "truncate": False, "mscale": 1},
            {"factor": 4.0, ORIGINAL: 1024, "truncate": False, "mscale": 1.0},
            4096,
        ),
        (LLAMA3, {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 4096}, 4096),
        (
            LLAMA3 | {ORIGINAL: 512},
            {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 512},
            4096,
        ),
    ],
)
@pytest.mark.parametrize("spelling", ["rope_type", "type"])
def test_a_scaling_is_read_in_either_spelling_and_stretches_the_context_once(
    raw: dict[str, Any] | None, scaling: dict[str, Any] | None, context: int, spelling: str
) -> None:
    if raw is not None:
        raw = {spelling if key == "rope_type" else key: value for key, value in raw.items()}
    read = parse_rope_scaling(raw, 4096, "config.json")
    assert read == (scaling if scaling is None else {"rope_type": (raw or {})[spelling]} | scaling)
    assert context_length(4096, read) == context


@pytest.mark.parametrize("raw", [{"type": "longrope"}, {"rope_type": "Yarn"}, {"type": 7}, {"type": ["yarn"]}])
def test_an_unknown_type_is_refused_by_name(raw: dict[str, Any]) -> None:
    with pytest.raises(LoadError, match=r"config\.json: rope_type .* is unknown; known: default, linear, dynamic"):
        parse_rope_scaling(raw, 4096, "config.json")


# Computing.


@torch.no_grad()
def expected_logits(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Logits [steps, vocabulary] of a cached run, which keeps keys as they were turned when they were written."""
    cache, logits = None, []
    for ids in (list(prompt), *([token] for token in tokens[:-1])):
        output = model(torch.tensor([ids]), cache=cache, use_cache=True)
        cache = output.cache
        logits.append(output.logits[0, -1])
    return torch.stack(logits)


def assert_same_text(checkpoint: Path, model_of: Any, prompts: list[list[int]], steps: int) -> None:
    """All prompts in one batch against one transformers model each: dynamic scaling leaves a trace in a model."""
    run = generate(load_small(checkpoint), prompts, steps)
    for row, prompt in enumerate(prompts):
        expected = expected_logits(model_of(), prompt, run.tokens[row].tolist())
        torch.testing.assert_close(run.logits[:, row], expected, atol=FLOAT_ERROR, rtol=0)
        assert run.tokens[row].tolist() == expected.argmax(-1).tolist()


PROMPTS = [[5, 99, 42], [*range(60)], [*range(90, 0, -1)]]  # within, into and beyond the trained range of 64


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("kind", TYPES)
def test_every_type_computes_what_transformers_computes(kind: str, family: str, tmp_path: Path) -> None:
    parameters = TYPES[kind] | {"rope_theta": 1000.0}

    def model_of() -> PreTrainedModel:
        return random_model(family, rope_parameters=dict(parameters), max_position_embeddings=TRAINED)

    save(model_of(), tmp_path)
    longest = open_checkpoint(str(tmp_path)).config.context_length
    prompts = [prompt for prompt in PROMPTS if len(prompt) + 8 <= longest]
    assert len(prompts) == (1 if kind in ("default", "llama3") else 3)
    assert_same_text(tmp_path, model_of, prompts, 8)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "yarn-original"])
def test_old_spellings_are_read(kind: str, tmp_path: Path) -> None:
    model = random_model("llama", rope_parameters=TYPES[kind] | {"rope_theta": 1000.0}, max_position_embeddings=TRAINED)
    save(model, tmp_path)
    new = open_checkpoint(str(tmp_path)).config
    old = {"type" if key == "rope_type" else key: value for key, value in TYPES[kind].items()}
    edit_config(tmp_path, remove=("rope_parameters",), rope_theta=1000.0, rope_scaling=old)
    assert open_checkpoint(str(tmp_path)).config == new


def test_a_trained_length_beside_the_block_wins_over_the_blocks(tmp_path: Path) -> None:
    parameters = YARN | {"rope_theta": 1000.0, ORIGINAL: 32}
    save(random_model("llama", rope_parameters=parameters, max_position_embeddings=TRAINED), tmp_path)
    edit_config(tmp_path, **{ORIGINAL: 16})
    scaling = open_checkpoint(str(tmp_path)).config.rope_scaling
    assert scaling is not None
    assert scaling[ORIGINAL] == 16


def test_a_row_of_dynamic_scaling_turns_by_its_own_length_alone(tmp_path: Path) -> None:
    parameters = TYPES["dynamic"] | {"rope_theta": 1000.0}
    save(random_model("llama", rope_parameters=parameters, max_position_embeddings=TRAINED), tmp_path)
    together = generate(load_small(tmp_path), PROMPTS, 6)
    for row, prompt in enumerate(PROMPTS):
        alone = generate(load_small(tmp_path), [prompt], 6)
        assert alone.tokens[0].tolist() == together.tokens[row].tolist()


# GGUF.


def test_a_gguf_says_yarn_in_its_own_keys(tmp_path: Path) -> None:
    parameters = YARN | {"rope_theta": 1000.0, ORIGINAL: TRAINED, "beta_fast": 16.0}

    def model_of() -> PreTrainedModel:
        return random_model("qwen2", rope_parameters=dict(parameters), max_position_embeddings=TRAINED)

    class Writer(gguf.GGUFWriter):
        def write_header_to_file(self, path: Path | None = None) -> None:
            self.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            self.add_rope_scaling_factor(4.0)
            self.add_rope_scaling_orig_ctx_len(TRAINED)
            self.add_float32("qwen2.rope.scaling.yarn_beta_fast", 16.0)
            super().write_header_to_file(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", Writer)
        file = write_gguf(tmp_path / "m.gguf", model_of(), gguf.GGMLQuantizationType.F32)
    assert_same_text(file, model_of, PROMPTS, 4)
