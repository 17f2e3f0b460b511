"""`PackedLinear` equals `linear_reference` for any rows, sizes and strides, whichever backend runs."""

import threading

import pytest
import torch

from mstar.kernels.cpu.panel_formats import BLOCK_FORMATS, BlockRows
from mstar.kernels.cpu.panel_gemm import panel_kernel
from mstar.kernels.linear import MAX_ROWS, PackedLinear, linear_reference

ROWS = [1, 2, 3, 4, 5, 7, 8, 12, 16, 31, 32, 64, 100]
# SmolLM2's projections scaled down (qkv, o, gate-up, down, head), then sizes that fill no panel or vector.
SHAPES = [(160, 96), (96, 96), (512, 96), (96, 256), (1024, 96), (1, 1), (7, 5), (33, 17), (100, 63), (31, 1)]
BACKENDS = ["torch", pytest.param("panel", marks=pytest.mark.skipif(panel_kernel() is None, reason="no panel kernel"))]


def make(out_features: int, in_features: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(out_features * 1000 + in_features)
    weight = torch.randn(out_features, in_features, generator=generator) * in_features**-0.5
    return weight.to(dtype), torch.randn(out_features, generator=generator).to(dtype)


def assert_equal_within_float_error(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias=None) -> None:
    expected = linear_reference(x.double(), weight.double(), None if bias is None else bias.double())
    assert got.dtype == weight.dtype
    assert got.shape == expected.shape
    tolerance = 1e-5 if weight.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_reference_at_all_row_counts(shape, with_bias, backend):
    weight, bias = make(*shape)
    bias = bias if with_bias else None
    layer = PackedLinear(weight, bias, backend)
    for rows in ROWS:
        x = torch.randn(rows, shape[1])
        assert_equal_within_float_error(layer(x), x, weight, bias)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [0, MAX_ROWS, MAX_ROWS + 1, 2 * MAX_ROWS + 37])
def test_prefill_longer_than_one_kernel_call_and_empty_input(rows, backend):
    weight, bias = make(40, 24)
    x = torch.randn(rows, 24)
    assert_equal_within_float_error(PackedLinear(weight, bias, backend)(x), x, weight, bias)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_inputs_and_strided_weights(backend):
    weight = torch.randn(48, 2 * 20)[:, ::2]
    layer = PackedLinear(weight, None, backend)
    for x in (torch.randn(20, 9).T, torch.randn(9, 60)[:, 20:40], torch.randn(18, 20)[::2]):
        assert not x.is_contiguous()
        assert_equal_within_float_error(layer(x), x, weight)


def test_bf16_keeps_its_dtype_on_the_torch_path():
    weight, bias = make(96, 64, torch.bfloat16)
    layer = PackedLinear(weight, bias)
    x = torch.randn(3, 64).bfloat16()
    assert layer.backend == "torch"
    assert_equal_within_float_error(layer(x), x, weight, bias)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fused_output_is_the_parts_side_by_side(backend):
    parts = [make(out_features, 32) for out_features in (24, 8, 9)]
    biases = [parts[0][1], None, parts[2][1]]
    layer = PackedLinear.fused([weight for weight, _ in parts], biases, backend)
    x = torch.randn(5, 32)
    expected = torch.cat(
        [linear_reference(x, weight, bias) for (weight, _), bias in zip(parts, biases, strict=True)], dim=1
    )
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weight_rows_are_the_rows_given(backend):
    weight, _ = make(101, 13)
    ids = torch.tensor([0, 100, 31, 32, 33, 0])
    assert torch.equal(PackedLinear(weight, None, backend).weight_rows(ids), weight[ids])


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_are_never_modified(backend):
    weight, bias = make(50, 30)
    x = torch.randn(4, 30)
    before = [t.clone() for t in (weight, bias, x)]
    PackedLinear(weight, bias, backend)(x)
    assert all(torch.equal(a, b) for a, b in zip(before, (weight, bias, x), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_does_not_depend_on_the_thread_count(backend):
    weight, bias = make(100, 64)
    layer, x = PackedLinear(weight, bias, backend), torch.randn(9, 64)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = layer(x)
        torch.set_num_threads(2)
        torch.testing.assert_close(layer(x), alone, rtol=1e-5, atol=1e-5)
    finally:
        torch.set_num_threads(threads)


# 1 to 64, then around the sizes at which the kernels change their ways.
ROW_COUNTS = [*range(1, 65), 96, MAX_ROWS, MAX_ROWS + 1, 500, 2048]


def random_blocks(kind: str, rows: int, width: int) -> BlockRows:
    layout = BLOCK_FORMATS[kind]
    data = torch.randint(0, 256, (rows, width // 32, layout.file_bytes), dtype=torch.uint8)
    scales = torch.randn(rows, width // 32, len(layout.headers)).mul(0.01).half()
    data[..., : 2 * len(layout.headers)] = scales.view(torch.uint8)
    return BlockRows(data.flatten(1), kind)


LAYERS = [(dtype, "torch") for dtype in (torch.float32, torch.bfloat16, torch.float16)]
if panel_kernel() is not None:
    LAYERS += [(kind, "panel") for kind in (torch.float32, *BLOCK_FORMATS)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("kind", "backend"), LAYERS, ids=str)
@pytest.mark.parametrize("shape", [(160, 576), (576, 1536), (100, 96)], ids=str)
def test_deterministic_rows_keep_their_bits_whatever_the_number_of_rows(shape, kind, backend, threads):
    weight = (random_blocks(kind, *shape), None) if isinstance(kind, str) else make(*shape, kind)
    layer = PackedLinear(*weight, backend, deterministic=True)
    x = torch.randn(ROW_COUNTS[-1], shape[1]).to(layer.dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        wanted = layer(x)
        differing = [n for n in ROW_COUNTS if not torch.equal(layer(x[:n]), wanted[:n])]
        differing += [-n for n in ROW_COUNTS if not torch.equal(layer(x[-n:]), wanted[-n:])]
    finally:
        torch.set_num_threads(before)
    assert differing == []


def test_deterministic_torch_path_equals_the_reference():
    weight, bias = make(48, 24)
    layer = PackedLinear(weight, bias, "torch", deterministic=True)
    for rows in (0, *ROWS):
        x = torch.randn(rows, 24)
        assert_equal_within_float_error(layer(x), x, weight, bias)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_threads_may_call_one_layer(backend):
    weight, bias = make(200, 64)
    layer = PackedLinear(weight, bias, backend)
    inputs = [torch.randn(rows, 64) for rows in (3, 40)]
    wrong = []

    def call(x: torch.Tensor) -> None:
        expected = linear_reference(x, weight, bias)
        wrong.extend(i for i in range(50) if not torch.allclose(layer(x), expected, rtol=1e-4, atol=1e-5))

    callers = [threading.Thread(target=call, args=(x,)) for x in inputs]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((torch.zeros(3),), "weight"),
        ((torch.zeros(3, 2, dtype=torch.int64),), "weight"),
        ((torch.zeros(3, 2), torch.zeros(2)), "bias"),
        ((torch.zeros(3, 2), None, "blas"), "backend"),
        ((torch.zeros(3, 2).bfloat16(), None, "panel"), "backend"),
    ],
)
def test_refuses_what_does_not_fit_naming_the_argument(arguments, named):
    with pytest.raises(ValueError, match=f"^{named}:"):
        PackedLinear(*arguments)


def test_fused_refuses_parts_that_do_not_fit():
    with pytest.raises(ValueError, match=r"^weights:"):
        PackedLinear.fused([torch.zeros(3, 2), torch.zeros(3, 4)])
    with pytest.raises(ValueError, match=r"^biases:"):
        PackedLinear.fused([torch.zeros(3, 2), torch.zeros(3, 2)], [None])


@pytest.mark.skipif(panel_kernel() is None, reason="no panel kernel")
@pytest.mark.parametrize("x", [torch.zeros(2, 5), torch.zeros(4), torch.zeros(2, 4).bfloat16()])
def test_panel_refuses_inputs_it_would_misread(x):
    with pytest.raises(ValueError, match=r"^x:"):
        PackedLinear(torch.zeros(3, 4), None, "panel")(x)
