"""Projections from TMA streams equal torch's operators in fp32, and compile for Hopper without one.

Gluon has no interpreter: what they compute is tested on a GPU alone.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from linear_cases import Heads, assert_near, random

from mstar.kernels.cuda import linear_choice, stream_choice
from mstar.kernels.cuda.linear_add import launch_linear_add_
from mstar.kernels.cuda.norm_linear import launch_norm_linear
from mstar.kernels.cuda.norm_qkv import launch_norm_qkv
from mstar.kernels.cuda.tiles import Tile
from mstar.kernels.fused_linears import (
    linear_add_reference_,
    norm_gate_up_reference,
    norm_qkv_rope_store_reference,
)

EPS = 1e-5
# hidden, heads, kv heads, head dim, inner, whether queries and keys have norms
MODELS = {
    "135M": (576, 9, 3, 64, 1536, False),
    "360M": (960, 15, 5, 64, 2560, False),
    "0.5B": (896, 14, 2, 64, 4864, False),
    "0.6B": (1024, 16, 8, 128, 3072, True),
    "1B": (2048, 32, 8, 64, 8192, False),
    "1.7B": (2048, 16, 8, 128, 6144, True),
}
COMPILE = """
import json, torch
from pathlib import Path
from mstar.kernels.cuda.ahead import compiling_ahead
from mstar.kernels.cuda.linear_add import launch_linear_add_
from mstar.kernels.cuda.norm_linear import launch_norm_linear
from mstar.kernels.cuda.norm_qkv import launch_norm_qkv
from mstar.kernels.cuda.tiles import Tile
from mstar.kernels.kernel_cache import cache_folder

def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="cuda")

with compiling_ahead(90) as kernels, torch.inference_mode():
    x, key_index = empty(64, 576), empty(64, dtype=torch.int64)
    cos, sin = (empty(64, 1, 64, dtype=torch.float32) for _ in range(2))
    qk_norm = empty(12, 64)
    launch_norm_linear(x, 1e-5, empty(3072, 576), None, Tile("stream", 64, 32, 128, 4, stages=5), is_gated=True)
    launch_norm_linear(x, None, empty(960, 576), empty(960), Tile("stream", 128, 64, 128, 8, stages=2))
    launch_linear_add_(x, empty(64, 576), empty(576, 576), None, Tile("stream", 64, 16, 128, 4, stages=5))
    launch_linear_add_(x, empty(64, 1536), empty(576, 1536), empty(576), Tile("stream", 64, 32, 128, 4, stages=9))
    for norm, columns in ((None, 16), (qk_norm, 64)):
        launch_norm_qkv(x, 1e-5, empty(960, 576), None, norm, 0.0, cos, sin, key_index, empty(9, 2, 16, 3, 64), 9, 3,
                        64, Tile("stream", 64, columns, 128, 4, stages=5))
print(json.dumps([[kernel.name, next(cache_folder().glob(f"*/{kernel.name}.ptx")).read_text()] for kernel in kernels]))
"""
INPUTS = 200  # leave a rest of the last block
# rows, tile; blocks wait for others to be read in most.
CUTS = [
    (1, Tile("stream", 64, 32, 64, 4, stages=3)),
    (5, Tile("stream", 64, 64, 64, 4, stages=4)),
    (64, Tile("stream", 64, 16, 128, 4, stages=2)),
    (70, Tile("stream", 64, 32, 64, 4, stages=2)),
    (130, Tile("stream", 128, 64, 64, 8, stages=2)),
    (257, Tile("stream", 64, 64, 128, 4, stages=2)),
]


@pytest.fixture
def gpu(device):
    if device.type == "cpu":
        pytest.skip("Gluon has no interpreter")
    torch.manual_seed(0)
    return device


def floats(*tensors):
    return [None if tensor is None else tensor.float() for tensor in tensors]


def in_new_process(code, **environment):
    """What `code` prints where Triton compiles."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    kept |= {"PYTHONPATH": os.pathsep.join(sys.path), **environment}
    done = subprocess.run([sys.executable, "-c", code], env=kept, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def products(shape):
    """Of a model's layer: the choice, inputs, outputs, and what columns divide."""
    hidden, heads, kv_heads, head_dim, inner, has_qk_norm = MODELS[shape]
    qkv = functools.partial(stream_choice.qkv_stream, head_dim=head_dim, has_qk_norm=has_qk_norm)
    return [
        (qkv, hidden, (heads + 2 * kv_heads) * head_dim, head_dim),
        (stream_choice.add_stream, heads * head_dim, hidden, hidden),
        (stream_choice.gate_up_stream, hidden, 2 * inner, 2 * inner),
        (stream_choice.add_stream, inner, hidden, hidden),
        (stream_choice.norm_linear_stream, hidden, (heads + 2 * kv_heads) * head_dim, head_dim),
    ]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return json.loads(in_new_process(COMPILE, TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton"))))


def test_streams_compile_ahead_to_tma_copies_and_warpgroup_products(compiled):
    names = [name.removeprefix("_streamed_") for name, _ in compiled]
    assert sorted(names) == ["linear_add", "linear_add", "norm_linear", "norm_linear", "norm_qkv", "norm_qkv"]
    for _, ptx in compiled:
        assert "wgmma.mma_async" in ptx
        multiplies, asks_for_weights, asks_for_inputs = ptx.split("griddepcontrol.wait")
        assert "cp.async.bulk.tensor" not in multiplies
        assert "cp.async.bulk.tensor" in asks_for_weights, "weights travel while the kernel before runs"
        assert "cp.async.bulk.tensor" in asks_for_inputs


def test_a_loop_with_a_norm_does_not_multiply_where_the_next_inputs_are_copied_to(tmp_path):
    told = in_new_process(
        """
import torch
from mstar.kernels.cuda.ahead import compiling_ahead
from mstar.kernels.cuda.norm_linear import launch_norm_linear
from mstar.kernels.cuda.tiles import Tile
from mstar.kernels.kernel_cache import cache_folder
with compiling_ahead(90) as kernels, torch.inference_mode():
    x, weight = (torch.empty(n, 1024, dtype=torch.bfloat16, device="cuda") for n in (70, 4096))
    launch_norm_linear(x, 1e-5, weight, None, Tile("loop", 64, 64, 64, 4, stages=4))
print(next(cache_folder().glob("*/_norm_linear.ttgir")).read_text())
""",
        TRITON_CACHE_DIR=str(tmp_path),
    )
    operands = [line.split("} : ")[1].split(" * ")[0] for line in told.splitlines() if "ttng.warp_group_dot %" in line]
    assert operands
    assert not any("mutable" in operand for operand in operands), "Triton gives these a place too few"


@pytest.mark.parametrize(
    ("tile", "inputs", "outputs", "fits"),
    [
        (Tile("stream", 64, 32, 128, 4, stages=2), 576, 3072, True),  # zeros fill the last block
        (Tile("stream", 64, 32, 64, 4, stages=2, splits=3), 576, 576, False),  # sums are not shared out
        (Tile("stream", 64, 64, 64, 4, stages=2), 576, 96, False),
        (Tile("stream", 64, 64, 64, 4, stages=2), 580, 96, False),  # rows that begin between 16 bytes
        (Tile("stream", 64, 64, 128, 4, stages=1), 576, 64, False),  # nothing would come while that is read
        (Tile("stream", 64, 64, 128, 4, stages=1), 128, 64, True),
        (Tile("stream", 64, 64, 256, 4, stages=4), 1024, 6144, False),  # more than shared memory holds
        (Tile("stream", 64, 64, 256, 4, stages=4), 512, 6144, True),
    ],
)
def test_a_stream_fits_where_blocks_have_room_and_hold_nothing_but_their_own(tile, inputs, outputs, fits):
    assert tile.fits(inputs, outputs) == fits


def test_programs_that_shared_memory_has_room_for_have_their_registers():
    x = torch.empty(0)
    two, one = (Tile("stream", 64, columns, 128, 4, stages=5) for columns in (16, 64))
    assert two.stream_options(x, 576, has_squares=False)["maxnreg"] == 65536 // (2 * 8 * 32)
    assert one.stream_options(x, 576, has_squares=True)["maxnreg"] * 12 * 32 <= 65536


@pytest.fixture(scope="module")
def has_streams_by_capability():
    told = in_new_process("""
import json, torch
from mstar.kernels.cuda.ahead import compiling_ahead
from mstar.kernels.cuda.streams import has_streams
told = {}
for capability in (80, 90, 100):
    with compiling_ahead(capability):
        told[capability] = has_streams(torch.device("cuda", 0)), has_streams(torch.device("cpu"))
print(json.dumps(told))
""")
    return {int(capability): has for capability, has in json.loads(told).items()}


@pytest.mark.parametrize(("capability", "has"), [(80, False), (90, True), (100, False)])
def test_streams_are_for_hopper(has_streams_by_capability, capability, has):
    assert has_streams_by_capability[capability] == [has, False]


@pytest.mark.parametrize("shape", MODELS)
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 64, 65, 128, 129, 256, 257])
def test_chosen_streams_cover_the_models_in_one_wave(shape, rows):
    for choose, inputs, outputs, unit in products(shape):
        tile = choose(rows, inputs, outputs)
        if tile is not None:
            assert tile.way == "stream"
            assert tile.fits(inputs, outputs)
            assert unit % tile.columns == 0
            assert outputs // tile.columns * -(-rows // tile.rows) <= 132


@pytest.mark.parametrize(
    ("rows", "shape", "columns"),
    [
        (16, "135M", (None, 16, 32, 16, None)),
        (64, "135M", (32, 16, 64, 16, None)),
        (128, "135M", (32, 64, 128, 32, None)),
        (256, "135M", (64, 64, 128, 64, None)),
        (16, "0.6B", (128, 16, 128, 32, 64)),
        (64, "0.6B", (128, 16, 128, 32, 64)),
        (128, "0.6B", (128, 32, 128, 32, None)),
        (256, "0.6B", (128, 32, None, 32, None)),
        (1, "0.6B", (None, None, None, None, None)),
        (257, "135M", (None, None, None, None, None)),
    ],
)
def test_streams_are_chosen_where_they_were_faster(rows, shape, columns):
    tiles = [choose(rows, inputs, outputs) for choose, inputs, outputs, _ in products(shape)]
    assert tuple(tile and tile.columns for tile in tiles) == columns


@pytest.mark.parametrize("rows", [1, 2, 16, 64, 128, 256])
def test_no_stream_is_chosen_elsewhere(rows):
    for inputs, outputs in ((576, 960), (1024, 4096), (1536, 576), (3072, 1024)):
        tiles = [
            linear_choice.add_tile(rows, inputs, outputs),
            linear_choice.gate_up_tile(rows, inputs, outputs),
            linear_choice.qkv_tile(rows, inputs, outputs, 64, has_qk_norm=False),
            linear_choice.qkv_tile(rows, inputs, outputs, 64, has_qk_norm=True),
            linear_choice.norm_linear_tile(rows, inputs, outputs),
        ]
        assert all(tile is None or tile.way != "stream" for tile in tiles)


@pytest.mark.parametrize("rows", [2, 16, 64, 128, 256])
def test_programs_have_whole_heads_where_these_have_norms(rows):
    for inputs, outputs, head_dim in ((576, 960, 64), (1024, 4096, 128)):
        tile = stream_choice.qkv_stream(rows, inputs, outputs, head_dim, has_qk_norm=True)
        assert tile is None or tile.columns == head_dim


@pytest.mark.parametrize(("rows", "tile"), CUTS)
@pytest.mark.parametrize(("dtype", "has_bias"), [(torch.bfloat16, True), (torch.float16, False)])
def test_linear_adds_in_place(rows, tile, dtype, has_bias, gpu):
    assert tile.fits(INPUTS, 64)
    x, y = (random(rows, size, device=gpu, dtype=dtype) for size in (64, INPUTS))
    weight = random(64, INPUTS, device=gpu, dtype=dtype, scale=INPUTS**-0.5)
    bias = random(64, device=gpu, dtype=dtype) if has_bias else None
    before, wanted = x.clone(), x.float()
    linear_add_reference_(wanted, *floats(y, weight, bias))
    launch_linear_add_(x, y, weight, bias, tile)
    assert_near(x, wanted)
    for _ in range(20):
        again = before.clone()
        launch_linear_add_(again, y, weight, bias, tile)
        assert torch.equal(again, x)


@pytest.mark.parametrize(("rows", "tile"), CUTS)
@pytest.mark.parametrize(("dtype", "has_bias"), [(torch.bfloat16, True), (torch.float16, False)])
def test_norm_and_gate_go_into_the_projection(rows, tile, dtype, has_bias, gpu):
    x = random(rows, INPUTS, device=gpu, dtype=dtype, scale=3.0)
    weight = random(64, INPUTS, device=gpu, dtype=dtype, scale=INPUTS**-0.5)
    bias = random(64, device=gpu, dtype=dtype) if has_bias else None
    got = launch_norm_linear(x, EPS, weight, bias, tile, is_gated=True)
    assert_near(got, norm_gate_up_reference(x.float(), None, EPS, *floats(weight, bias)))
    normed = torch.nn.functional.rms_norm(x.float(), (INPUTS,), None, EPS)
    wanted = torch.nn.functional.linear(normed, *floats(weight, bias))
    assert_near(launch_norm_linear(x, EPS, weight, bias, tile), wanted)
    x = normed.to(dtype)
    assert_near(launch_norm_linear(x, None, weight, bias, tile), torch.nn.functional.linear(*floats(x, weight, bias)))


@pytest.mark.parametrize(("rows", "tile"), CUTS)
@pytest.mark.parametrize(
    ("dtype", "has_bias", "has_qk_norm"),
    [(torch.bfloat16, True, False), (torch.bfloat16, False, True), (torch.float16, True, True)],
)
@pytest.mark.parametrize("eps", [EPS, None])
def test_heads_are_normed_rotated_and_stored(rows, tile, dtype, has_bias, has_qk_norm, eps, gpu):
    heads, kv_heads, head_dim = 3, 1, tile.columns if has_qk_norm else 64
    outputs = (heads + 2 * kv_heads) * head_dim
    x = random(rows, INPUTS, device=gpu, dtype=dtype)
    weight = random(outputs, INPUTS, device=gpu, dtype=dtype, scale=INPUTS**-0.5)
    bias = random(outputs, device=gpu, dtype=dtype) if has_bias else None
    qk_norm = 1 + random(heads + kv_heads, head_dim, device=gpu, dtype=dtype, scale=0.2) if has_qk_norm else None
    behind = Heads.of(rows, kv_heads, head_dim, head_dim, x)
    tail = (EPS, behind.cos, behind.sin, behind.key_index)
    if eps is None:
        x = torch.nn.functional.rms_norm(x, (INPUTS,), None, EPS)
    layer = behind.layer.float()
    wanted = norm_qkv_rope_store_reference(
        x.float(), None, EPS, *floats(weight, bias, qk_norm), *tail, layer, heads, kv_heads, head_dim
    )
    got = launch_norm_qkv(x, eps, weight, bias, qk_norm, *tail, behind.layer, heads, kv_heads, head_dim, tile)
    assert_near(got, wanted)
    assert_near(behind.layer, layer)
