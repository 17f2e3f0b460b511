"""`PackedLinear` on quantised blocks equals the fp32 panel kernel on their dequantised values, bit for bit."""

import gguf
import numpy as np
import pytest
import torch

from mstar.kernels.cpu.panel_formats import BLOCK_FORMATS, BlockRows
from mstar.kernels.cpu.panel_gemm import panel_kernel
from mstar.kernels.linear import MAX_ROWS, PackedLinear, linear_reference, takes_blocks

pytestmark = pytest.mark.skipif(panel_kernel() is None, reason="no panel kernel")

ROWS = [1, 2, 3, 5, 8, 12, 13, 31, 64, 200, 2 * MAX_ROWS + 7]
SHAPES = [(1, 32), (7, 64), (33, 96), (96, 256), (160, 96), (1000, 32)]  # full panels and outputs that fill none


def make(kind: str, out_features: int, in_features: int) -> tuple[BlockRows, torch.Tensor]:
    """A random weight in blocks, and its fp32 values by the library that defines the format."""
    quantisation = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(out_features).normal(size=(out_features, in_features)).astype(np.float32)
    data = gguf.quants.quantize(values, quantisation)
    return BlockRows(torch.from_numpy(data), kind), torch.from_numpy(gguf.quants.dequantize(data, quantisation).copy())


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_equals_the_fp32_kernel_bit_for_bit_at_all_row_counts(kind, shape, with_bias):
    blocks, weight = make(kind, *shape)
    bias = torch.randn(shape[0]) if with_bias else None
    layer, plain = PackedLinear(blocks, bias), PackedLinear(weight, bias, "panel")
    assert (layer.out_features, layer.in_features, layer.dtype) == (*shape, torch.float32)
    for rows in ROWS:
        x = torch.randn(rows, shape[1])
        y = layer(x)
        assert torch.equal(y, plain(x)), rows
        torch.testing.assert_close(y, linear_reference(x, weight, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_a_row_is_the_same_bits_in_every_batch_and_on_every_number_of_threads(kind):
    layer, x = PackedLinear(make(kind, 100, 64)[0]), torch.randn(64, 64)
    expected = layer(x)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert all(torch.equal(layer(x[:rows]), expected[:rows]) for rows in ROWS)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_stacked_rows_give_the_parts_side_by_side(kind):
    parts = [make(kind, out_features, 64) for out_features in (24, 8, 9)]
    layer = PackedLinear(BlockRows(torch.cat([blocks.data for blocks, _ in parts]), kind))
    x = torch.randn(5, 64)
    assert torch.equal(layer(x), PackedLinear.fused([weight for _, weight in parts], backend="panel")(x))


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_weight_rows_are_the_librarys_dequantised_rows_bit_for_bit(kind):
    blocks, weight = make(kind, 101, 96)
    layer = PackedLinear(blocks)
    for ids in (torch.tensor([0, 100, 31, 15, 16, 32, 0]), torch.arange(101), torch.tensor([], dtype=torch.int64)):
        rows = layer.weight_rows(ids)
        assert torch.equal(rows.view(torch.int32), weight[ids].view(torch.int32))


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_any_scale_and_integer_dequantise_exactly(kind):
    """Bytes at random: negative, subnormal and large scales, all integers (but no scale that is not finite)."""
    data = np.random.default_rng(1).integers(0, 256, (64, 4, BLOCK_FORMATS[kind].file_bytes), dtype=np.uint8)
    data[:, :, [1, 3] if kind == "Q4_1" else 1] &= 0xBF
    weight = torch.from_numpy(gguf.quants.dequantize(data.reshape(64, -1), gguf.GGMLQuantizationType[kind]).copy())
    layer = PackedLinear(BlockRows(torch.from_numpy(data.reshape(64, -1)), kind))
    identity = torch.eye(128)
    for columns in (slice(0, 3), slice(0, 128)):  # in registers, and through the scratch
        assert torch.equal(layer(identity[columns]), weight.T[columns])


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_blocks_take_no_more_memory_than_in_the_file_and_are_never_modified(kind):
    blocks, _ = make(kind, 64, 96)
    before = blocks.data.clone()
    layer = PackedLinear(blocks)
    layer(torch.randn(20, 96))
    assert torch.equal(blocks.data, before)
    assert layer._weight.nbytes == blocks.data.nbytes


def test_only_fp32_on_the_cpu_takes_blocks_and_only_of_known_kinds():
    cpu = torch.device("cpu")
    assert all(takes_blocks(kind, torch.float32, cpu) for kind in BLOCK_FORMATS)
    assert not takes_blocks("Q4_1", torch.bfloat16, cpu)
    assert not takes_blocks("Q4_1", torch.float32, torch.device("cuda"))
    assert not takes_blocks("Q6_K", torch.float32, cpu)


@pytest.mark.parametrize(
    ("data", "kind", "named"),
    [
        (torch.zeros(2, 20, dtype=torch.uint8), "Q6_K", "kind"),
        (torch.zeros(2, 19, dtype=torch.uint8), "Q4_1", "data"),
        (torch.zeros(20, dtype=torch.uint8), "Q4_1", "data"),
        (torch.zeros(2, 20), "Q4_1", "data"),
    ],
)
def test_refuses_blocks_that_do_not_fit_naming_what(data, kind, named):
    with pytest.raises(ValueError, match=f"^{named}:"):
        BlockRows(data, kind)


def test_refuses_blocks_on_the_torch_backend():
    with pytest.raises(ValueError, match=r"^backend:"):
        PackedLinear(make("Q4_1", 8, 32)[0], None, "torch")
