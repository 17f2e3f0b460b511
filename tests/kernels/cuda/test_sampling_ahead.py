"""The draw's kernels compile where a launch turns sizes into constants: those that are 1.

In a process of its own: here Triton's interpreter may stand for its compiler.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

COMPILE = """
import torch
from mstar.kernels.cuda.ahead import compiling_ahead
from mstar.kernels.cuda.sampling import DeviceSampler
from mstar.kernels.sampling import RowSettings
columns = dict.fromkeys(RowSettings._fields, torch.int64)
columns |= {"temperature": torch.float32, "top_p": torch.float32, "min_p": torch.float32, "top_p_first": torch.bool}
with compiling_ahead(90) as kernels, torch.inference_mode():
    settings = RowSettings(**{name: torch.empty(3, dtype=dtype, device="cuda") for name, dtype in columns.items()})
    DeviceSampler(torch.device("cuda"), 3)(torch.empty(3, 1, device="cuda"), settings, True)
print(*(kernel.name for kernel in kernels))
"""


def test_a_vocabulary_of_one_token_compiles(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    kept |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=kept, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"{name}_kernel" for name in ("scan", "shortlist", "survey", "bracket", "race")]
