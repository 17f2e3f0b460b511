"""Rotary frequencies, temperatures and tables are those of transformers, for every type and both spellings (BC-40)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mstar.kernels import rope
from mstar.kernels.rope_frequencies import attention_factor, dynamic_bases, frequencies_of, inverse_frequencies

TRAINED = 8192
POSITIONS = (0, 1, 8191, 8192, 32767)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
TYPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3,
    "llama3-32": LLAMA3 | {"factor": 32.0},
    "yarn": YARN,
    "yarn-exact-range": YARN | {"truncate": False},
    "yarn-mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn-two-mscales": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn-one-mscale": YARN | {"mscale": 0.7},
    "yarn-factor": YARN | {"attention_factor": 1.25},
    "yarn-betas": YARN | {"beta_fast": 24.0, "beta_slow": 2.0},
    "yarn-short": YARN | {"original_max_position_embeddings": 512, "factor": 64.0},
}
COUNTED = {"dynamic", "llama3", "yarn"}


def reference(dim: int, theta: float, scaling: dict[str, Any]) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=dim * 4,
        num_attention_heads=4,
        max_position_embeddings=TRAINED,
        rope_parameters=scaling | {"rope_theta": theta},
    )
    return LlamaRotaryEmbedding(config)


def completed(scaling: dict[str, Any], spelling: str) -> dict[str, Any]:
    """The mapping as a checkpoint's reader hands it on."""
    own = {spelling if key == "rope_type" else key: value for key, value in scaling.items()}
    if scaling["rope_type"] in COUNTED:
        own.setdefault("original_max_position_embeddings", TRAINED)
    return own


def tables_at(position: int, dim: int, theta: float, scaling: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables of one token at the end of a row."""
    frequencies = inverse_frequencies(dim, theta, scaling)
    if scaling.get("rope_type", scaling.get("type")) == "dynamic":
        bases = dynamic_bases(np.array([position + 1]), dim, theta, scaling)
        frequencies = frequencies_of(torch.from_numpy(bases), dim)
    cos, sin = rope.cos_sin(torch.tensor([position]), frequencies, False, factor=attention_factor(scaling))
    return cos[0, 0], sin[0, 0]


@pytest.mark.parametrize("spelling", ["rope_type", "type"])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize(("dim", "theta"), [(64, 10_000.0), (128, 1_000_000.0)])
@pytest.mark.parametrize("kind", TYPES)
def test_tables_equal_transformers(kind: str, dim: int, theta: float, position: int, spelling: str) -> None:
    cos, sin = tables_at(position, dim, theta, completed(TYPES[kind], spelling))
    expected_cos, expected_sin = reference(dim, theta, TYPES[kind])(torch.zeros(1), torch.tensor([[position]]))
    half = dim // 2
    torch.testing.assert_close(cos, expected_cos[0, 0], rtol=0, atol=1e-6)
    torch.testing.assert_close(sin[half:], expected_sin[0, 0, half:], rtol=0, atol=1e-6)
    torch.testing.assert_close(sin[:half], -expected_sin[0, 0, :half], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", TYPES)
def test_frequencies_equal_transformers_to_the_last_bit(kind: str) -> None:
    scaling = completed(TYPES[kind], "rope_type")
    expected = reference(64, 10_000.0, TYPES[kind])
    assert torch.equal(inverse_frequencies(64, 10_000.0, scaling), expected.inv_freq)
    assert attention_factor(scaling) == pytest.approx(expected.attention_scaling, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 1 << 20), min_size=1, max_size=40),
    factor=st.floats(1.0, 64.0),
    theta=st.floats(500.0, 5e6),
    dim=st.sampled_from([32, 64, 80, 128]),
)
def test_each_row_of_dynamic_scaling_has_the_frequencies_of_its_own_length(
    lengths: list[int], factor: float, theta: float, dim: int
) -> None:
    scaling = {"rope_type": "dynamic", "factor": factor, "original_max_position_embeddings": TRAINED}
    rows = frequencies_of(torch.from_numpy(dynamic_bases(np.array(lengths), dim, theta, scaling)), dim)
    for length, row in zip(lengths, rows, strict=True):
        alone = reference(dim, theta, {"rope_type": "dynamic", "factor": factor})
        alone(torch.zeros(1), torch.tensor([[length - 1]]))
        torch.testing.assert_close(row, alone.inv_freq, rtol=2e-7, atol=0)


def test_rows_within_the_trained_range_keep_their_frequencies() -> None:
    scaling = completed(TYPES["dynamic"], "type")
    rows = frequencies_of(torch.from_numpy(dynamic_bases(np.array([1, 100, TRAINED]), 64, 1e4, scaling)), 64)
    assert torch.equal(rows, inverse_frequencies(64, 1e4, scaling).expand(3, -1))


def test_linear_scaling_divides_every_frequency() -> None:
    linear = inverse_frequencies(64, 10_000.0, {"type": "linear", "factor": 2.0})
    assert torch.equal(linear * 2, inverse_frequencies(64, 10_000.0, None))


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("kind", ["longrope", "Linear", "", None, 3, ["yarn"]])
def test_other_types_are_refused_by_name(key: str, kind: object) -> None:
    with pytest.raises(ValueError, match="rope_type must be one of default, linear, dynamic, llama3, yarn, got"):
        inverse_frequencies(64, 10_000.0, {key: kind, "factor": 2.0})


NEEDED = [
    ("linear", "factor"),
    ("dynamic", "factor"),
    ("dynamic", "original_max_position_embeddings"),
    ("llama3", "factor"),
    ("llama3", "low_freq_factor"),
    ("llama3", "high_freq_factor"),
    ("llama3", "original_max_position_embeddings"),
    ("yarn", "factor"),
    ("yarn", "original_max_position_embeddings"),
]


@pytest.mark.parametrize(("kind", "key"), NEEDED)
@pytest.mark.parametrize("value", [None, "8", 0, -1.0, float("nan"), float("inf"), True])
def test_a_missing_or_malformed_number_is_refused_by_name(kind: str, key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"needs {key}"):
        inverse_frequencies(64, 10_000.0, completed(TYPES[kind], "rope_type") | {key: value})


@pytest.mark.parametrize("key", ["attention_factor", "mscale", "mscale_all_dim"])
@pytest.mark.parametrize("value", ["8", -1.0, float("nan"), True])
def test_a_malformed_temperature_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"needs {key}"):
        attention_factor(completed(TYPES["yarn-mscale"], "rope_type") | {key: value})


@pytest.mark.parametrize("key", ["beta_fast", "beta_slow"])
@pytest.mark.parametrize("value", ["8", -1.0, float("nan"), True])
def test_a_malformed_bound_of_yarns_ramp_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"needs {key}"):
        inverse_frequencies(64, 10_000.0, completed(TYPES["yarn"], "rope_type") | {key: value})


def test_dynamic_scaling_needs_more_than_one_pair() -> None:
    with pytest.raises(ValueError, match="above 2, got 2"):
        inverse_frequencies(2, 10_000.0, completed(TYPES["dynamic"], "rope_type"))
