"""Which of FlashInfer's kernels serve a model on a device: loaded where they fit, refused with the reason where not."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mstar.engine.resources.attention.flashinfer_kernels import (
    DECODE_GROUPS,
    DecodeKernel,
    Geometry,
    PagedKernel,
    PrefillKernel,
)

VERSION = "0.6.13"
HEAD_DIMS = (64, 128, 256)  # others are wrong without notice, or crash
DTYPES = (torch.float16, torch.bfloat16)

_NO_POSITIONS = 0


@dataclass(frozen=True)
class Kernels:
    """``decode`` may be ``prefill`` itself; ``long_prefill``, where there is one, is faster for long rows alone."""

    decode: PagedKernel
    prefill: PagedKernel
    long_prefill: PagedKernel | None


def load_kernels(geometry: Geometry, kv_dtype: torch.dtype, device: torch.device) -> Kernels:
    """Loads what is built, and builds what is not, which takes minutes and CUDA's compiler; "fa3" is only loaded.

    Raises:
        ValueError: FlashInfer is missing or of another version, or has no kernel for these shapes and dtypes.
    """
    check_supported(geometry, kv_dtype, device)
    try:
        import flashinfer
        from flashinfer.decode import get_batch_decode_module
        from flashinfer.jit import gen_batch_prefill_module
        from flashinfer.prefill import get_batch_prefill_module
        from flashinfer.utils import device_support_pdl, is_sm90a_supported
    except ImportError as error:
        raise ValueError(
            f"attention backend FLASHINFER needs flashinfer-python {VERSION} (extra 'cuda'), which does not import: "
            f"{error}"
        ) from error
    if flashinfer.__version__ != VERSION:
        raise ValueError(
            f"attention backend FLASHINFER needs flashinfer-python {VERSION}, found {flashinfer.__version__}"
        )
    heads, dtype = geometry.heads, geometry.dtype
    has_window = geometry.window_left >= 0
    built_for = (dtype, dtype, dtype, torch.int32, heads.head_dim, heads.head_dim, _NO_POSITIONS, has_window, False)
    use_pdl = device_support_pdl(device)
    prefill = PrefillKernel(get_batch_prefill_module("fa2", *built_for, False), "fa2", geometry, use_pdl)
    long_prefill = None
    if is_sm90a_supported(device) and gen_batch_prefill_module("fa3", *built_for, False).is_compiled:
        long_prefill = PrefillKernel(get_batch_prefill_module("fa3", *built_for, False), "fa3", geometry, use_pdl)
    # Its plan takes a tenth of the other's at 256 rows, and the kernels are equally fast.
    decode: PagedKernel = prefill
    if heads.group in DECODE_GROUPS:
        decode = DecodeKernel(get_batch_decode_module(*built_for), geometry, use_pdl)
    return Kernels(decode, prefill, long_prefill)


def check_supported(geometry: Geometry, kv_dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError when FlashInfer has no kernel for ``geometry`` over a cache of ``kv_dtype`` on ``device``."""
    refused = "attention backend FLASHINFER (SDPA and TRITON have no such limit)"
    if device.type != "cuda":
        raise ValueError(f"{refused}: needs a CUDA device, got {device.type}")
    head_dim = geometry.heads.head_dim
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"{refused}: head_dim must be one of {', '.join(map(str, HEAD_DIMS))}, got {head_dim}")
    if geometry.dtype not in DTYPES or kv_dtype != geometry.dtype:
        raise ValueError(
            f"{refused}: queries and cache must both be float16 or both bfloat16, got {_name(geometry.dtype)} and "
            f"{_name(kv_dtype)}"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
