"""Which shapes of a text model's steps are captured."""

from __future__ import annotations

import numpy as np
import torch

from mstar.engine.accelerator_graph_config import (
    AcceleratorGraphConfig,
    BatchedAcceleratorGraphConfig,
    PackedAcceleratorGraphConfig,
    decode_rows_then_prompt,
)
from mstar.engine.inputs import ARNodeInputs
from mstar.model.text_rows import LOOPBACK, prompt_row
from mstar.model.text_sampling import VARIANTS

SMALLEST_PREFILL = 64  # tokens
FEW_ROWS = 16  # of a packed step: a row past the real ones costs its logits and its draw


def text_graph_configs(
    device: torch.device, max_rows: int, max_tokens: int, decode_sizes: tuple[int, ...] = ()
) -> list[AcceleratorGraphConfig]:
    """Captures of ``decode`` (equal rows of one token), and of ``prefill`` and ``mixed`` (ragged rows on one token
    axis), which share theirs; each in every variant of sampling.

    On the CPU every padded row costs its arithmetic: decode has a dense ladder, and packed steps, which run over
    the real tokens of their bucket there, need one bucket only.  On a GPU the layers are kernels of our own already,
    so nothing is compiled, and a packed bucket's rows cost little beside its tokens.

    Args:
        max_rows: rows of the largest step.
        max_tokens: prompt tokens of the largest captured step; beside them there is room for a decode row each.
        decode_sizes: batch sizes of decode, or empty for the device's ladder; those beyond ``max_rows`` are cut to it.
    """
    on_cpu = device.type == "cpu"
    ladder = sorted({min(size, max_rows) for size in decode_sizes})
    if not ladder:
        ladder = dense_ladder(max_rows) if on_cpu else coarse_ladder(max_rows)
    largest = max_tokens + max_rows
    lengths = [largest] if on_cpu else token_ladder(min(SMALLEST_PREFILL, largest), largest)
    rows = [max_rows] if on_cpu else sorted({min(FEW_ROWS, max_rows), max_rows})
    return [
        config
        for variant in VARIANTS
        for config in (_decode_config(ladder, variant), _packed_config(lengths, rows, variant))
    ]


def _decode_config(batch_sizes: list[int], variant: str | None) -> AcceleratorGraphConfig:
    last_token = torch.zeros(1, dtype=torch.int64)
    return BatchedAcceleratorGraphConfig(
        capture_graph_walk="decode",
        single_request_inputs=ARNodeInputs({LOOPBACK: last_token}, input_seq_len=1, walk="decode"),
        additional_key_info=variant,
        compile=False,
        capture_batch_sizes=batch_sizes,
    )


def _packed_config(lengths: list[int], batch_sizes: list[int], variant: str | None) -> AcceleratorGraphConfig:
    return PackedAcceleratorGraphConfig(
        capture_graph_walk="prefill",
        replay_graph_walks=["prefill", "mixed"],
        additional_key_info=variant,
        capture_token_lengths=lengths,
        make_node_input=lambda length: prompt_row(np.zeros(length, np.int64), "prefill"),
        token_layout=decode_rows_then_prompt,
        compile=False,
        capture_batch_sizes=batch_sizes,
    )


def dense_ladder(largest: int) -> list[int]:
    """Every size to 64, then every 8th to 256, then every 32nd; the largest always."""
    return sorted(
        {*range(1, min(largest, 64) + 1), *range(72, min(largest, 256) + 1, 8), *range(288, largest, 32), largest}
    )


def coarse_ladder(largest: int) -> list[int]:
    """1, 2, 4, every 8th size to 64, every 16th to 128, every 32nd to 256, then every 64th; the largest always."""
    steps = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, largest, 64))
    return sorted({*(size for size in steps if size < largest), largest})


def token_ladder(smallest: int, largest: int) -> list[int]:
    """``smallest`` times 1, 1.5, 2, 3, 4, 6, 8 and so on, and ``largest``: at most a third of a step is padding."""
    sizes, size = {largest}, smallest
    while size < largest:
        sizes |= {size, min(size * 3 // 2, largest)}
        size *= 2
    return sorted(sizes)
