"""Fused projections equal torch's operators in fp32, however the work is cut; fixed cuts keep a row's bits."""

import pytest
import torch

pytest.importorskip("triton")

from linear_cases import Heads, assert_near, random, teach_interpreter_bfloat16_products

from mstar.kernels.cuda import linear_choice
from mstar.kernels.cuda.linear_add import launch_linear_add_
from mstar.kernels.cuda.linears import linear_add_, norm_gate_up, norm_qkv_rope_store
from mstar.kernels.cuda.norm_linear import launch_norm_linear
from mstar.kernels.cuda.norm_qkv import launch_norm_qkv
from mstar.kernels.cuda.tiles import Tile
from mstar.kernels.fused_linears import (
    linear_add_reference_,
    norm_gate_up_reference,
    norm_qkv_rope_store_reference,
)
from mstar.kernels.linear import PackedLinear
from mstar.model.layers.fused import fold_norm
from mstar.model.layers.norm import RMSNorm

EPS = 1e-5
# rows, tile; 192 inputs leave a rest in some.
CUTS = [
    (1, Tile("vector", 1, 16, 64, 4)),
    (3, Tile("vector", 4, 16, 64, 4)),
    (5, Tile("whole", 16, 16, 16, 4, slices=4)),
    (20, Tile("whole", 16, 32, 32, 4, slices=4)),
    (9, Tile("whole", 16, 16, 32, 8, slices=8)),
    (33, Tile("loop", 16, 32, 32, 4, stages=7, release="start")),
    (70, Tile("loop", 64, 32, 128, 4, stages=2, release="waited")),
]
SHAPES = {"135M": (576, 9, 3, 64, 1536, False), "0.6B": (1024, 16, 8, 128, 3072, True)}


@pytest.fixture(autouse=True)
def bfloat16_products(monkeypatch, device):
    torch.manual_seed(0)
    if device.type == "cpu":
        teach_interpreter_bfloat16_products(monkeypatch)


def floats(*tensors):
    return [None if tensor is None else tensor.float() for tensor in tensors]


@pytest.mark.parametrize(("rows", "tile"), CUTS)
@pytest.mark.parametrize(("dtype", "has_bias"), [(torch.bfloat16, True), (torch.float16, False)])
def test_linear_adds_in_place(rows, tile, dtype, has_bias, device):
    x, y = (random(rows, size, device=device, dtype=dtype) for size in (64, 192))
    weight = random(64, 192, device=device, dtype=dtype, scale=192**-0.5)
    bias = random(64, device=device, dtype=dtype) if has_bias else None
    wanted = x.float()
    linear_add_reference_(wanted, *floats(y, weight, bias))
    launch_linear_add_(x, y, weight, bias, tile)
    assert_near(x, wanted)


@pytest.mark.parametrize("has_bias", [True, False])
def test_programs_share_inputs(has_bias, device):
    x, y = (random(20, size, device=device, dtype=torch.bfloat16) for size in (64, 192))
    weight = random(64, 192, device=device, dtype=torch.bfloat16, scale=192**-0.5)
    bias = random(64, device=device, dtype=torch.bfloat16) if has_bias else None
    wanted = x.float()
    linear_add_reference_(wanted, *floats(y, weight, bias))
    launch_linear_add_(x, y, weight, bias, Tile("loop", 16, 32, 32, 4, stages=2, splits=3, release="waited"))
    assert_near(x, wanted)


@pytest.mark.parametrize(("rows", "tile"), CUTS)
@pytest.mark.parametrize(("dtype", "has_bias"), [(torch.bfloat16, True), (torch.float16, False)])
def test_norm_and_gate_go_into_the_projection(rows, tile, dtype, has_bias, device):
    x = random(rows, 192, device=device, dtype=dtype, scale=3.0)
    weight = random(64, 192, device=device, dtype=dtype, scale=192**-0.5)
    bias = random(64, device=device, dtype=dtype) if has_bias else None
    got = launch_norm_linear(x, EPS, weight, bias, tile, is_gated=True)
    assert_near(got, norm_gate_up_reference(x.float(), None, EPS, *floats(weight, bias)))
    normed = torch.nn.functional.rms_norm(x.float(), (192,), None, EPS)
    wanted = torch.nn.functional.linear(normed, *floats(weight, bias))
    assert_near(launch_norm_linear(x, EPS, weight, bias, tile), wanted)
    x = normed.to(dtype)
    assert_near(launch_norm_linear(x, None, weight, bias, tile), torch.nn.functional.linear(*floats(x, weight, bias)))


@pytest.mark.parametrize(("rows", "tile"), CUTS)
@pytest.mark.parametrize(
    ("dtype", "has_bias", "has_qk_norm"), [(torch.bfloat16, True, True), (torch.float16, False, False)]
)
def test_heads_are_normed_rotated_and_stored(rows, tile, dtype, has_bias, has_qk_norm, device):
    heads, kv_heads, head_dim = 3, 1, tile.columns if has_qk_norm else 64
    outputs = (heads + 2 * kv_heads) * head_dim
    x = random(rows, 192, device=device, dtype=dtype)
    weight = random(outputs, 192, device=device, dtype=dtype, scale=192**-0.5)
    bias = random(outputs, device=device, dtype=dtype) if has_bias else None
    qk_norm = 1 + random(heads + kv_heads, head_dim, device=device, dtype=dtype, scale=0.2) if has_qk_norm else None
    behind = Heads.of(rows, kv_heads, head_dim, head_dim, x)
    layer = behind.layer.float()
    wanted = norm_qkv_rope_store_reference(
        x.float(), None, EPS, *floats(weight, bias, qk_norm), EPS, behind.cos, behind.sin, behind.key_index, layer,
        heads, kv_heads, head_dim,
    )  # fmt: skip
    got = launch_norm_qkv(
        x, EPS, weight, bias, qk_norm, EPS, behind.cos, behind.sin, behind.key_index, behind.layer,
        heads, kv_heads, head_dim, tile,
    )  # fmt: skip
    assert_near(got, wanted)
    assert_near(behind.layer, layer)


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("is_folded", [False, True])
def test_a_float16_norm_does_not_overflow(rows, is_folded, device):
    x = random(rows, 64, device=device, dtype=torch.float16, scale=4000.0)
    norm = None if is_folded else torch.full((64,), 40.0, device=device, dtype=torch.float16)
    weight = random(32, 64, device=device, dtype=torch.float16, scale=1 if is_folded else 1 / 40)
    wanted = norm_gate_up_reference(*floats(x, norm), EPS, weight.float())
    torch.testing.assert_close(norm_gate_up(x, norm, EPS, weight).float(), wanted, rtol=1e-2, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_folds_into_the_projection(dtype, device):
    norm = RMSNorm(1 + random(64, device=device, dtype=dtype, scale=0.2), EPS)
    weight = random(48, 64, device=device, dtype=dtype)
    linear = PackedLinear(weight.clone())
    left = fold_norm(norm, linear)
    if dtype == torch.float16:
        assert left is norm.weight
        assert torch.equal(linear.weight, weight)
    else:
        assert left is None
        assert torch.equal(linear.weight, (weight.float() * norm.weight.float()).to(dtype))


@pytest.mark.parametrize("head_dim", [32, 24])
@pytest.mark.parametrize("rotary_dim", [32, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize(("deterministic", "is_folded"), [(False, True), (False, False), (True, True)])
def test_any_head_any_dtype(head_dim, rotary_dim, dtype, rows, deterministic, is_folded, device):
    rotary_dim = min(rotary_dim, head_dim)
    x = random(rows, 48, device=device, dtype=dtype)
    norm = None if is_folded else 1 + random(48, device=device, dtype=dtype, scale=0.2)
    qk_norm = 1 + random(3, head_dim, device=device, dtype=dtype, scale=0.2)
    weight = random(4 * head_dim, 48, device=device, dtype=dtype, scale=48**-0.5)
    bias = random(4 * head_dim, device=device, dtype=dtype)
    behind = Heads.of(rows, 1, head_dim, rotary_dim, x)
    layer = behind.layer.float()
    wanted = norm_qkv_rope_store_reference(
        *floats(x, norm), EPS, *floats(weight, bias, qk_norm), EPS, behind.cos, behind.sin, behind.key_index,
        layer, 2, 1, head_dim,
    )  # fmt: skip
    got = norm_qkv_rope_store(
        x, norm, EPS, weight, bias, qk_norm, EPS, behind.cos, behind.sin, behind.key_index, behind.layer,
        2, 1, head_dim, deterministic=deterministic,
    )  # fmt: skip
    assert_near(got, wanted)
    assert_near(behind.layer, layer)
    out = norm_gate_up(x, norm, EPS, weight, bias, deterministic=deterministic)
    assert_near(out, norm_gate_up_reference(*floats(x, norm), EPS, *floats(weight, bias)))
    wanted_x = x.float()
    back = random(48, out.shape[1], device=device, dtype=dtype, scale=0.1)
    linear_add_reference_(wanted_x, *floats(out, back))
    linear_add_(x, out, back, deterministic=deterministic)
    assert_near(x, wanted_x)


@pytest.mark.parametrize("rows", [1, 5])
def test_deterministic_rows_keep_their_bits(rows, device):
    """Alone, or in the middle of seventy."""
    dtype = torch.bfloat16
    x = random(70, 64, device=device, dtype=dtype)
    weight, back = (random(128, 64, device=device, dtype=dtype, scale=0.1) for _ in range(2))
    some = x[30 : 30 + rows].clone()
    all_out = norm_gate_up(x, None, EPS, weight, deterministic=True)
    out = norm_gate_up(some, None, EPS, weight, deterministic=True)
    assert torch.equal(out, all_out[30 : 30 + rows])
    linear_add_(x, all_out, back[:64], deterministic=True)
    linear_add_(some, out, back[:64], deterministic=True)
    assert torch.equal(some, x[30 : 30 + rows])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 64, 65, 128, 256, 257])
def test_chosen_cuts_cover_the_models(shape, rows):
    hidden, heads, kv_heads, head_dim, inner, has_qk_norm = SHAPES[shape]
    outputs = (heads + 2 * kv_heads) * head_dim
    qkv = linear_choice.qkv_tile(rows, hidden, outputs, head_dim, has_qk_norm=has_qk_norm)
    tiles = [
        (linear_choice.add_tile(rows, heads * head_dim, hidden), heads * head_dim, hidden),
        (linear_choice.add_tile(rows, inner, hidden), inner, hidden),
        (linear_choice.gate_up_tile(rows, hidden, 2 * inner), hidden, 2 * inner),
        (linear_choice.norm_linear_tile(rows, hidden, outputs), hidden, outputs),
        (qkv, hidden, outputs),
        (linear_choice.deterministic_tile(head_dim), hidden, outputs),
    ]
    assert all(tile is None or tile.fits(inputs, outputs) for tile, inputs, outputs in tiles)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_model_shapes(shape, deterministic, device):
    """Every row count with a cut of its own, at full size."""
    if device.type == "cpu":
        pytest.skip("too large for the interpreter")
    hidden, heads, kv_heads, head_dim, inner, has_qk_norm = SHAPES[shape]
    make = {"device": device, "dtype": torch.bfloat16}
    outputs = (heads + 2 * kv_heads) * head_dim
    qkv, gate_up = (random(size, hidden, **make, scale=hidden**-0.5) for size in (outputs, 2 * inner))
    down = random(hidden, inner, **make, scale=inner**-0.5)
    qk_norm = 1 + random(heads + kv_heads, head_dim, **make, scale=0.2) if has_qk_norm else None
    for rows in (1, 2, 16, 40, 64, 128, 256, 300):
        x = random(rows, hidden, **make)
        behind = Heads.of(rows, kv_heads, head_dim, head_dim, x)
        layer = behind.layer.float()
        tail = (EPS, behind.cos, behind.sin, behind.key_index)
        wanted = norm_qkv_rope_store_reference(
            x.float(), None, EPS, qkv.float(), None, *floats(qk_norm), *tail, layer, heads, kv_heads, head_dim
        )
        got = norm_qkv_rope_store(
            x, None, EPS, qkv, None, qk_norm, *tail, behind.layer, heads, kv_heads, head_dim,
            deterministic=deterministic,
        )  # fmt: skip
        assert_near(got, wanted)
        assert_near(behind.layer, layer)
        out = norm_gate_up(x, None, EPS, gate_up, deterministic=deterministic)
        assert_near(out, norm_gate_up_reference(x.float(), None, EPS, gate_up.float()))
        wanted_x = x.float()
        linear_add_reference_(wanted_x, *floats(out, down))
        linear_add_(x, out, down, deterministic=deterministic)
        assert_near(x, wanted_x)
