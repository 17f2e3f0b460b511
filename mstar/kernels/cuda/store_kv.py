"""New keys and values to their places in the paged cache, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mstar.kernels.cuda.pdl import launch_options, release_dependents, wait_for_inputs


def store_kv(layer: torch.Tensor, key_index: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """As :func:`mstar.kernels.attention.write_kv`, a value lying ``page_size`` rows behind its key.

    Args:
        layer: [pages, 2, page_size, Hkv, D], contiguous.
        key_index: int64 [n]; tokens that share a place leave one of theirs there.
        k, v: [n, Hkv, D] of any float dtype, each token's heads contiguous.
    """
    page_size, kv_heads, head_dim = layer.shape[2:]
    width = kv_heads * head_dim
    _store_kernel[(k.shape[0],)](
        layer,
        key_index,
        k,
        v,
        k.stride(0),
        v.stride(0),
        PAGE_SIZE=page_size,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        **launch_options(layer, num_warps=1 if width <= 512 else 4),
    )


@triton.jit
def _store_kernel(
    layer,
    key_index,
    k,
    v,
    k_stride,
    v_stride,
    PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    release_dependents(USE_PDL)
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    is_part = at < WIDTH
    wait_for_inputs(USE_PDL)
    place = layer + tl.load(key_index + token) * WIDTH
    key = tl.load(k + token * k_stride + at, mask=is_part)
    value = tl.load(v + token * v_stride + at, mask=is_part)
    tl.store(place + at, key.to(layer.dtype.element_ty), mask=is_part)
    tl.store(place + PAGE_SIZE * WIDTH + at, value.to(layer.dtype.element_ty), mask=is_part)
