"""Rotary frequencies and tables: those of transformers, for every type that is built."""

from types import SimpleNamespace

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from mstar.kernels import rope

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CASES = [
    (64, 10_000.0, {"rope_type": "default"}),
    (64, 100_000.0, {"rope_type": "default"}),
    (128, 1_000_000.0, {"rope_type": "linear", "factor": 4.0}),
    (64, 500_000.0, LLAMA3),
    (128, 500_000.0, LLAMA3 | {"factor": 8.0}),
]


def reference(dim, theta, scaling):
    config = LlamaConfig(
        hidden_size=dim * 4,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters=scaling | {"rope_theta": theta},
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize(("dim", "theta", "scaling"), CASES)
def test_tables_equal_transformers(dim, theta, scaling):
    positions = torch.cat((torch.arange(300), torch.tensor([8191, 8192, 32767]), torch.arange(0, 131072, 997)))
    cos, sin = rope.cos_sin(positions, rope.inverse_frequencies(dim, theta, scaling), interleave=False)
    expected_cos, expected_sin = reference(dim, theta, scaling)(torch.zeros(1), positions[None])
    half = dim // 2
    torch.testing.assert_close(cos[:, 0], expected_cos[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(sin[:, 0, half:], expected_sin[0, :, half:], rtol=0, atol=1e-6)
    torch.testing.assert_close(sin[:, 0, :half], -expected_sin[0, :, :half], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_frequencies_equal_transformers_init_functions(kind):
    scaling = LLAMA3 | {"rope_type": kind}
    config = SimpleNamespace(
        rope_parameters=scaling | {"rope_theta": 10_000.0},
        head_dim=64,
        max_position_embeddings=8192,
        standardize_rope_params=lambda: None,
    )
    expected, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    assert attention_factor == 1.0
    torch.testing.assert_close(rope.inverse_frequencies(64, 10_000.0, scaling), expected, rtol=0, atol=0)


def test_both_spellings_of_the_type_are_read():
    new = rope.inverse_frequencies(64, 10_000.0, {"rope_type": "linear", "factor": 2.0})
    old = rope.inverse_frequencies(64, 10_000.0, {"type": "linear", "factor": 2.0})
    assert torch.equal(new, old)
    assert torch.equal(new * 2, rope.inverse_frequencies(64, 10_000.0, None))


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "Linear", None])
def test_other_types_are_refused_by_name(key, kind):
    with pytest.raises(ValueError, match=f"rope_type must be one of default, linear, llama3, got '?{kind}"):
        rope.inverse_frequencies(64, 10_000.0, {key: kind, "factor": 2.0})


@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"])
@pytest.mark.parametrize("value", [None, "8", 0, -1.0, float("nan"), float("inf"), True])
def test_a_missing_or_malformed_number_is_refused_by_name(key, value):
    with pytest.raises(ValueError, match=key):
        rope.inverse_frequencies(64, 10_000.0, LLAMA3 | {key: value})


def test_rotation_equals_transformers():
    torch.manual_seed(0)
    q, k, positions = torch.randn(7, 9, 64), torch.randn(7, 3, 64), torch.randint(0, 8192, (7,))
    cos, sin = rope.cos_sin(positions, rope.inverse_frequencies(64, 10_000.0, None), interleave=False)
    tables = reference(64, 10_000.0, {"rope_type": "default"})(q, positions[None])
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], *tables)
    for x, wanted in zip((q, k), expected, strict=True):
        rotated = rope.rotate(x, cos, sin, interleave=False)
        torch.testing.assert_close(rotated, wanted[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("interleave", [False, True])
def test_rotation_turns_each_pair_by_its_angle(interleave):
    x, positions = torch.randn(5, 2, 24), torch.tensor([0, 1, 2, 50, 4000])
    frequencies = rope.inverse_frequencies(16, 10_000.0, None)
    rotated = rope.rotate(x, *rope.cos_sin(positions, frequencies, interleave), interleave)
    first = [2 * i if interleave else i for i in range(8)]
    second = [2 * i + 1 if interleave else i + 8 for i in range(8)]
    pair = torch.complex(x[..., first].double(), x[..., second].double())
    turned = pair * torch.polar(
        torch.ones(5, 1, 8).double(), (positions.float()[:, None] * frequencies)[:, None].double()
    )
    torch.testing.assert_close(rotated[..., first].double(), turned.real, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rotated[..., second].double(), turned.imag, rtol=1e-5, atol=1e-5)
    assert torch.equal(rotated[..., 16:], x[..., 16:])


@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (128, 64), (128, 96), (24, 16)])  # the last fills no vectors
@pytest.mark.parametrize("rows", [0, 1, 5, 40])
def test_rotation_of_strided_heads_equals_the_reference(dim, rotary_dim, rows):
    heads = torch.randn(rows, 7, dim)
    tables = rope.cos_sin(torch.arange(rows) * 17, rope.inverse_frequencies(rotary_dim, 10_000.0, None), False)
    for x in (heads, heads[:, :5], heads[:, 5:], heads.transpose(0, 1).contiguous().transpose(0, 1)):
        rotated, expected = rope.rotate(x, *tables, False), rope.rotate_reference(x, *tables, False)
        torch.testing.assert_close(rotated, expected, rtol=1e-6, atol=1e-6)


def test_a_row_rotates_to_the_same_bits_in_every_batch():
    x = torch.randn(70, 3, 64)
    cos, sin = rope.cos_sin(torch.arange(70) * 5, rope.inverse_frequencies(64, 10_000.0, None), False)
    whole = rope.rotate(x, cos, sin, False)
    for row in (0, 1, 33, 69):
        one = slice(row, row + 1)
        assert torch.equal(rope.rotate(x[one], cos[one], sin[one], False), whole[one])
