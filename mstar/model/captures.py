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

SMALLEST_PREFILL = 32  # tokens


def text_graph_configs(
    device: torch.device, max_rows: int, max_tokens: int, decode_sizes: tuple[int, ...] = ()
) -> list[AcceleratorGraphConfig]:
    """Captures of ``decode`` (equal rows of one token), and of ``prefill`` and ``mixed`` (ragged rows on one token
    axis), which share theirs; each in every variant of sampling on the CPU, whose replays may read the host.  Elsewhere
    steps of the full variant run eager.

    On the CPU every padded row costs its arithmetic: decode has a dense ladder, and packed steps, which run over
    the real tokens of their bucket there, need one bucket only.

    Args:
        max_rows: rows of the largest step.
        max_tokens: prompt tokens of the largest captured step; beside them there is room for a decode row each.
        decode_sizes: batch sizes of decode, or empty for the device's ladder; those beyond ``max_rows`` are cut to it.
    """
    on_cpu = device.type == "cpu"
    ladder = sorted({min(size, max_rows) for size in decode_sizes})
    if not ladder:
        ladder = dense_ladder(max_rows) if on_cpu else doubling_ladder(1, max_rows)
    largest = max_tokens + max_rows
    lengths = [largest] if on_cpu else doubling_ladder(min(SMALLEST_PREFILL, largest), largest)
    rows = [max_rows] if on_cpu else doubling_ladder(1, max_rows)
    return [
        config
        for variant in (VARIANTS if on_cpu else VARIANTS[:1])
        for config in (_decode_config(ladder, variant), _packed_config(lengths, rows, variant))
    ]


def _decode_config(batch_sizes: list[int], variant: str | None) -> AcceleratorGraphConfig:
    last_token = torch.zeros(1, dtype=torch.int64)
    return BatchedAcceleratorGraphConfig(
        capture_graph_walk="decode",
        single_request_inputs=ARNodeInputs({LOOPBACK: last_token}, input_seq_len=1, walk="decode"),
        additional_key_info=variant,
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
        capture_batch_sizes=batch_sizes,
    )


def dense_ladder(largest: int) -> list[int]:
    """Every size to 64, then every 8th to 256, then every 32nd; the largest always."""
    return sorted(
        {*range(1, min(largest, 64) + 1), *range(72, min(largest, 256) + 1, 8), *range(288, largest, 32), largest}
    )


def doubling_ladder(smallest: int, largest: int) -> list[int]:
    """``smallest`` doubled up to ``largest``, which is always the last."""
    sizes = [smallest]
    while sizes[-1] * 2 < largest:
        sizes.append(sizes[-1] * 2)
    return sorted({*sizes, largest})
