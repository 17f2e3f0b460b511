"""Every test runs captured steps strictly, in child processes too: what a real graph would freeze raises.

Where there is no GPU, Triton's interpreter runs the kernels.
"""

from __future__ import annotations

import os

import torch

os.environ.setdefault("MSTAR_GRAPH_STRICT", "1")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read as triton is imported
