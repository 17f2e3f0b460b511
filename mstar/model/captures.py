"""Which shapes of a text model's steps are captured."""

from __future__ import annotations

import torch

from mstar.engine.accelerator_graph_config import (
    AcceleratorGraphConfig,
    BatchedAcceleratorGraphConfig,
    PackedAcceleratorGraphConfig,
)
from mstar.engine.inputs import ARNodeInputs

SMALLEST_PREFILL = 32  # tokens


def text_graph_configs(
    device: torch.device, max_rows: int, max_tokens: int, decode_sizes: tuple[int, ...] = ()
) -> list[AcceleratorGraphConfig]:
    """Captures of ``decode`` (equal rows of one token) and ``prefill`` (ragged rows on one token axis).

    On the CPU every padded row costs its arithmetic: decode has a dense ladder, and prefill, which runs over the
    real tokens of its bucket there, needs one bucket only.

    Args:
        max_rows: rows of the largest step.
        max_tokens: prompt tokens of the largest captured prefill step.
        decode_sizes: batch sizes of decode, or empty for the device's ladder.
    """
    on_cpu = device.type == "cpu"
    ladder = sorted(set(decode_sizes)) or (dense_ladder(max_rows) if on_cpu else doubling_ladder(1, max_rows))
    decode = BatchedAcceleratorGraphConfig(
        capture_graph_walk="decode",
        single_request_inputs=ARNodeInputs(input_seq_len=1, walk="decode"),
        capture_batch_sizes=ladder,
        compile=False,
    )
    prefill = PackedAcceleratorGraphConfig(
        capture_graph_walk="prefill",
        capture_token_lengths=[max_tokens]
        if on_cpu
        else doubling_ladder(min(SMALLEST_PREFILL, max_tokens), max_tokens),
        make_node_input=_dummy_prompt,
        capture_batch_sizes=[max_rows] if on_cpu else doubling_ladder(1, max_rows),
        compile=False,
    )
    return [decode, prefill]


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


def _dummy_prompt(length: int) -> ARNodeInputs:
    ids = torch.zeros(length, dtype=torch.int64)
    return ARNodeInputs(input_ids=ids, input_seq_len=length, walk="prefill", chunk_total=length)
