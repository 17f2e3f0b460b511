"""Embedding rows of each request's last token, read where the sampler leaves it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mstar.kernels.cuda.pdl import launch_options, release_dependents, wait_for_inputs


def embed_rows(
    weight: torch.Tensor, last_token: torch.Tensor, index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`mstar.kernels.embedding.embed_rows`, in one kernel."""
    rows, hidden = index.numel(), weight.shape[1]
    ids = torch.empty_like(index)
    x = torch.empty(rows, hidden, dtype=weight.dtype, device=weight.device)
    options = launch_options(x, num_warps=4)
    _embed_kernel[(rows,)](
        weight, weight.stride(0), last_token, index, ids, x, hidden, BLOCK=triton.next_power_of_2(hidden), **options
    )
    return ids, x


@triton.jit
def _embed_kernel(
    weight, weight_stride, last_token, index, ids, x, hidden, BLOCK: tl.constexpr, USE_PDL: tl.constexpr
):  # fmt: skip
    release_dependents(USE_PDL)
    wait_for_inputs(USE_PDL)
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    token = tl.load(last_token + tl.load(index + row))
    values = tl.load(weight + token * weight_stride + lane, mask=lane < hidden)
    tl.store(x + row * hidden + lane, values, mask=lane < hidden)
    tl.store(ids + row, token)
