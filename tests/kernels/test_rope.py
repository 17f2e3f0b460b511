"""Rotary tables and rotation: those of transformers, pair by pair, in every layout of pairs and axes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from mstar.kernels import rope
from mstar.kernels.rope_frequencies import inverse_frequencies


def tables(positions: torch.Tensor, dim: int, interleave: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return rope.cos_sin(positions, inverse_frequencies(dim, 10_000.0, None), interleave)


def test_rotation_equals_transformers() -> None:
    torch.manual_seed(0)
    q, k, positions = torch.randn(7, 9, 64), torch.randn(7, 3, 64), torch.randint(0, 8192, (7,))
    reference = LlamaRotaryEmbedding(LlamaConfig(hidden_size=256, num_attention_heads=4))
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], *reference(q, positions[None]))
    for x, wanted in zip((q, k), expected, strict=True):
        rotated = rope.rotate(x, *tables(positions, 64), interleave=False)
        torch.testing.assert_close(rotated, wanted[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("interleave", [False, True])
def test_rotation_turns_each_pair_by_its_angle(interleave: bool) -> None:
    x, positions = torch.randn(5, 2, 24), torch.tensor([0, 1, 2, 50, 4000])
    rotated = rope.rotate(x, *tables(positions, 16, interleave), interleave)
    first = [2 * i if interleave else i for i in range(8)]
    second = [2 * i + 1 if interleave else i + 8 for i in range(8)]
    pair = torch.complex(x[..., first].double(), x[..., second].double())
    angle = positions.float()[:, None] * inverse_frequencies(16, 10_000.0, None)
    turned = pair * torch.polar(torch.ones(5, 1, 8).double(), angle[:, None].double())
    torch.testing.assert_close(rotated[..., first].double(), turned.real, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rotated[..., second].double(), turned.imag, rtol=1e-5, atol=1e-5)
    assert torch.equal(rotated[..., 16:], x[..., 16:])


# Tables.


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_written_in_place_have_the_bits_of_fresh_ones(interleave: bool, dtype: torch.dtype) -> None:
    positions = torch.randint(0, 1 << 17, (33,))
    fresh = [table.to(dtype) for table in tables(positions, 48, interleave)]
    out = (torch.full((33, 1, 48), 7.0, dtype=dtype), torch.full((33, 1, 48), 7.0, dtype=dtype))
    written = rope.cos_sin(positions, inverse_frequencies(48, 10_000.0, None), interleave, out=out)
    for table, own, expected in zip(written, out, fresh, strict=True):
        assert table.data_ptr() == own.data_ptr()
        assert torch.equal(own, expected)


def test_the_factor_multiplies_both_tables() -> None:
    positions, frequencies = torch.arange(40), inverse_frequencies(32, 10_000.0, None)
    plain, scaled = (rope.cos_sin(positions, frequencies, False, factor=factor) for factor in (1.0, 1.25))
    for a, b in zip(plain, scaled, strict=True):
        assert torch.equal(a * 1.25, b)


def test_tokens_may_have_frequencies_of_their_own() -> None:
    positions, rows = torch.tensor([3, 500, 9000]), torch.rand(3, 16)
    together = rope.cos_sin(positions, rows, False)
    for i in range(3):
        alone = rope.cos_sin(positions[i : i + 1], rows[i], False)
        assert all(torch.equal(a[i : i + 1], b) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("dim", [12, 48, 64, 128])
def test_a_tokens_tables_have_the_same_bits_in_every_batch(dim: int) -> None:
    positions = torch.randint(0, 1 << 17, (301,))
    whole = tables(positions, dim)
    for first, last in ((0, 1), (5, 8), (100, 133), (300, 301)):
        part = tables(positions[first:last], dim)
        assert all(torch.equal(a[first:last], b) for a, b in zip(whole, part, strict=True))


# Three axes.

SECTIONS = [(16, 24, 24), (24, 20, 20), (64, 0, 0), (1, 31, 32)]


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize(
    ("interleaved", "reference_class"), [(False, Qwen2VLRotaryEmbedding), (True, Qwen3VLTextRotaryEmbedding)]
)
def test_axes_turn_the_pairs_that_transformers_gives_them(
    section: tuple[int, int, int], interleaved: bool, reference_class: type
) -> None:
    positions = torch.randint(0, 5000, (3, 21))
    config = SimpleNamespace(
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(section)},
        max_position_embeddings=32768,
        head_dim=128,
    )
    expected_cos, expected_sin = reference_class(config)(torch.zeros(1), positions[:, None])
    axes = torch.tensor(rope.axes_of(section, interleaved))
    cos, sin = rope.cos_sin(positions, inverse_frequencies(128, 1e6, None), False, axes=axes)
    torch.testing.assert_close(cos[:, 0], expected_cos[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(sin[:, 0, 64:], expected_sin[0, :, 64:], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("section", "interleaved", "axes"),
    [
        ((1, 2, 1), False, [0, 1, 1, 2]),
        ((4, 2, 2), True, [0, 1, 2, 0, 1, 2, 0, 0]),
        ((3, 0, 0), True, [0, 0, 0]),
    ],
)
def test_sections_lie_end_to_end_or_take_turns(
    section: tuple[int, int, int], interleaved: bool, axes: list[int]
) -> None:
    assert rope.axes_of(section, interleaved) == axes


@pytest.mark.parametrize("interleaved", [False, True])
def test_text_with_three_equal_axes_turns_as_with_one(interleaved: bool) -> None:
    positions, frequencies = torch.randint(0, 5000, (21,)), inverse_frequencies(128, 1e6, None)
    axes = torch.tensor(rope.axes_of((24, 20, 20), interleaved))
    three = rope.cos_sin(positions.expand(3, -1), frequencies, False, axes=axes)
    one = rope.cos_sin(positions, frequencies, False)
    assert all(torch.equal(a, b) for a, b in zip(three, one, strict=True))


# Rotation.


@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (128, 64), (128, 96), (24, 16)])  # the last fills no vectors
@pytest.mark.parametrize("rows", [0, 1, 5, 40])
def test_rotation_of_strided_heads_equals_the_reference(dim: int, rotary_dim: int, rows: int) -> None:
    heads = torch.randn(rows, 7, dim)
    at = tables(torch.arange(rows) * 17, rotary_dim)
    for x in (heads, heads[:, :5], heads[:, 5:], heads.transpose(0, 1).contiguous().transpose(0, 1)):
        rotated, expected = rope.rotate(x, *at, False), rope.rotate_reference(x, *at, False)
        torch.testing.assert_close(rotated, expected, rtol=1e-6, atol=1e-6)


def test_tables_of_another_dtype_are_what_the_rotation_is_computed_in() -> None:
    x = torch.randn(9, 4, 64).bfloat16()
    at = tables(torch.arange(9) * 100, 64)
    rotated = rope.rotate(x, *at, False)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, rope.rotate_reference(x.float(), *at, False).bfloat16())


def test_a_row_rotates_to_the_same_bits_in_every_batch() -> None:
    x = torch.randn(70, 3, 64)
    cos, sin = tables(torch.arange(70) * 5, 64)
    whole = rope.rotate(x, cos, sin, False)
    for row in (0, 1, 33, 69):
        one = slice(row, row + 1)
        assert torch.equal(rope.rotate(x[one], cos[one], sin[one], False), whole[one])
