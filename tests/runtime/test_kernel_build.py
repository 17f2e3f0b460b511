"""A model's kernels are compiled without a GPU: an engine warms up on paper, in all its captured steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mstar.kernels.kernel_cache import cached_kernels

from .tiny import write_checkpoint

pytest.importorskip("triton")

OPTIONS = {"dtype": "bfloat16", "max_running_requests": 1, "max_batch_tokens": 63, "max_seq_len": 128}
BUILD = """
from mstar.runtime.kernel_build import build_kernels
from mstar.runtime.options import EngineOptions
built = build_kernels(EngineOptions(**options), capability)
print(json.dumps([built.dropped, [kernel.was_cached for kernel in built.kernels]]))
"""
LOAD = """
import triton
from mstar.runtime.core import EngineCore
from mstar.runtime.options import EngineOptions
missed = []
triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: None if cache_hit else missed.append(src.name)
core = EngineCore(EngineOptions(**options))
print(json.dumps([core.engine.dropped_buckets(), missed]))
"""


def run(code: str, cache: Path, options: dict[str, Any], capability: int = 90) -> Any:
    """The last line that a process of its own prints: here Triton's interpreter may stand for its compiler."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    given = f"import json\noptions, capability = {options!r}, {capability}\n"
    done = subprocess.run(
        [sys.executable, "-c", given + code], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_captured_step_can_be_carried_out_without_a_gpu_or_weights(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "tiny")
    (model / "model.safetensors").unlink()
    dropped, was_cached = run(BUILD, tmp_path / "cache", OPTIONS | {"model": str(model)})
    assert dropped == {}
    assert was_cached
    assert not any(was_cached)
    assert len(cached_kernels(tmp_path / "cache")) == len(was_cached)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_an_engine_finds_all_that_was_built_ahead(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "tiny")
    options = OPTIONS | {"model": str(model), "load_format": "dummy", "max_running_requests": 4}
    major, minor = torch.cuda.get_device_capability()
    dropped, built = run(BUILD, tmp_path / "cache", options, 10 * major + minor)
    assert dropped == {}
    assert built
    assert run(LOAD, tmp_path / "cache", options | {"device": "cuda:0"}) == [{"LLM": 0}, []]
