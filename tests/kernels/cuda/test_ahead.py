"""Kernels compiled without a GPU lie where a launch on one looks for them.

In processes of their own: here Triton's interpreter may stand for its compiler.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from mstar.kernels.kernel_cache import cached_kernels

PREAMBLE = """
import contextlib, json, sys, torch, triton
from mstar.kernels.cuda import row_ops
from mstar.kernels.cuda.ahead import compiling_ahead, standing_in_for
from mstar.kernels.cuda.paper import gpu_on_paper
from mstar.utils.errors import MstarError
told = {}
def norm(x):
    return row_ops.rms_norm(x, torch.empty(x.shape[1:], dtype=x.dtype, device=x.device), 1e-5)
"""
COMPILE = """
with compiling_ahead(90) as kernels, torch.inference_mode():
    x = torch.empty(4, 576, dtype=torch.bfloat16, device="cuda")
    norm(x), norm(x), norm(x[1:])
    norm(torch.empty(577, dtype=torch.bfloat16, device="cuda")[1:].view(1, 576))
told["compiled"] = kernels
"""
# The same kernel by Triton's own way to compile ahead, its signature spelled out.  From 3.7 on a launch also says of
# each constant that nothing is known of it beyond its value.
SPELLED_OUT = """
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia_driver
from triton.compiler import ASTSource
pointers = ("x_ptr", "delta_ptr", "weight_ptr", "out_ptr")
constants = {"DIM": 576, "BLOCK": 1024, "HAS_DELTA": False, "HAS_WEIGHT": True, "USE_PDL": True}
signature = {**dict.fromkeys(pointers, "*bf16"), "eps": "fp32", **dict.fromkeys(constants, "constexpr")}
constexprs = {(5 + i,): value for i, value in enumerate(constants.values())}
aligned = {(i,): [["tt.divisibility", 16]] for i in range(4)}
options = {"num_warps": 4, "launch_pdl": True}
told["spelled_out"] = [
    triton.compile(
        ASTSource(fn=row_ops._add_rms_norm, signature=signature, constexprs=constexprs, attrs=attrs),
        target=GPUTarget("cuda", 90, 32),
        options=options,
    ).hash
    for attrs in (aligned, aligned | {place: [] for place in constexprs})
]
told["launchers_per_form"] = hasattr(nvidia_driver, "make_launcher")
"""
ELSEWHERE = """
with standing_in_for(triton.__version__ + "-another"), compiling_ahead(90) as kernels:
    norm(torch.empty(4, 576, dtype=torch.bfloat16, device="cuda"))
told["elsewhere"] = kernels
try:
    with standing_in_for("0.0-other"):
        pass
except MstarError as error:
    told["refused"] = str(error)
"""
PAPER = """
with gpu_on_paper(90):
    x = torch.empty(3, 8, device="cuda", pin_memory=True)
    y = torch.nn.functional.linear(x, x.new_empty(5, 8))
    y[1:].copy_(torch.ones(2, 5), non_blocking=True)
    torch.addmm(y, x, x.new_empty(8, 5), out=y)
    host = torch.zeros(2)
    paper = [x.is_cuda, x.is_cpu, str(y.device), list(y.shape), y[1:].storage_offset(), host.is_cuda, str(host.device)]
    paper += [torch.cuda.get_device_capability(), str(torch.device("cuda", 1)), host.to("cuda").is_cuda]
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_event(torch.cuda.Event())
    paper.append(torch.cuda.get_device_properties(0).multi_processor_count)
told["paper"] = paper
"""


def run(code: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    kept |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    code = f"{PREAMBLE}{code}\nprint(json.dumps(told))"
    return subprocess.run([sys.executable, "-c", code], env=kept, capture_output=True, text=True, timeout=200)


def told(code: str, cache: Path) -> dict[str, Any]:
    done = run(code, cache)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


@pytest.fixture(scope="module")
def first(cache: Path) -> dict[str, Any]:
    return told(COMPILE + SPELLED_OUT + ELSEWHERE + PAPER, cache)


def test_a_kernel_is_compiled_once_for_each_form_at_the_place_where_triton_looks(first, cache: Path) -> None:
    assert [name for name, _, _ in first["compiled"]] == ["_add_rms_norm"] * 2, "aligned to 16 bytes, and not"
    assert [was_cached for _, _, was_cached in first["compiled"]] == [False, False]
    assert first["compiled"][0][1] in first["spelled_out"]
    listed = {kernel.key: kernel for kernel in cached_kernels(cache)}
    assert len(listed) == len({*first["spelled_out"], *(key for _, key, _ in first["compiled"] + first["elsewhere"])})
    for _, key, _ in first["compiled"]:
        kernel = listed[key]
        assert (kernel.name, kernel.arch, kernel.num_warps, kernel.spilled_bytes) == ("_add_rms_norm", 90, 4, 0)
        assert kernel.registers is not None
        assert 8 <= kernel.registers <= 255
    assert len(list(cache.glob("*/__triton_launcher*.so"))) == first["launchers_per_form"], "all are launched alike"
    assert list(cache.glob("*/cuda_utils*.so"))
    for library in cache.glob("*/*.so"):
        assert b"\0libcuda.so.1\0" in library.read_bytes(), "else it finds no driver where it is loaded"


def test_the_next_process_finds_what_the_first_compiled(first, cache: Path) -> None:
    second = told(COMPILE, cache)["compiled"]
    assert [key for _, key, _ in second] == [key for _, key, _ in first["compiled"]]
    assert all(was_cached for _, _, was_cached in second)


def test_kernels_for_another_installation_have_places_of_their_own(first) -> None:
    (name, key, was_cached), here = first["elsewhere"][0], first["compiled"][0]
    assert name == here[0]
    assert key != here[1]
    assert not was_cached
    assert "the other Triton is '0.0-othe'" in first["refused"]


def test_on_paper_what_goes_to_the_gpu_has_a_shape_and_what_stays_is_as_ever(first) -> None:
    assert first["paper"] == [
        True, False, "cuda:0", [3, 5], 5, False, "cpu", [9, 0], "cuda:1", True, 132,
    ]  # fmt: skip


def test_nothing_is_compiled_under_the_interpreter(tmp_path: Path) -> None:
    done = run("with compiling_ahead(90): pass", tmp_path, TRITON_INTERPRET="1")
    assert "TRITON_INTERPRET is set" in done.stderr
