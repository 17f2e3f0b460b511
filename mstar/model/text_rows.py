"""Rows of a text model's steps: whole prompts, parts of them, and single tokens to be continued."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
import torch

from mstar.engine.inputs import ARNodeInputs, NodeInputs

LOOPBACK = "text_inputs"  # the input through which a sampled token comes back


def prompt_row(prompt_ids: np.ndarray, graph_walk: str, is_resumed: bool = False) -> ARNodeInputs:
    """One row with the whole of ``prompt_ids`` int64 [tokens]."""
    ids, count = torch.from_numpy(prompt_ids), prompt_ids.size
    return ARNodeInputs(input_ids=ids, input_seq_len=count, walk=graph_walk, chunk_total=count, is_resumed=is_resumed)


def decode_row(graph_walk: str) -> ARNodeInputs:
    """One row of one token: the sampler's last, or the tensor handed in under :data:`LOOPBACK`."""
    return ARNodeInputs(input_seq_len=1, walk=graph_walk)


def split_row(row: ARNodeInputs, length: int) -> tuple[ARNodeInputs, ARNodeInputs]:
    """The first ``length`` tokens of a prompt row (0 to all of them), and the rest."""
    ids = row.input_ids
    assert ids is not None, "a decode row has one token"
    head = dataclasses.replace(row, input_ids=ids[:length], input_seq_len=length, is_final_chunk=False)
    rest = dataclasses.replace(
        row, input_ids=ids[length:], input_seq_len=ids.numel() - length, chunk_start=row.chunk_start + length
    )
    return head, rest


def num_decode_rows(rows: Sequence[NodeInputs]) -> int:
    """How many of a step's ``rows`` bring no ids: the first ones."""
    return bisect_left(rows, True, key=lambda row: _ids_of(row) is not None)


def _ids_of(row: NodeInputs) -> torch.Tensor | None:
    return row.input_ids if isinstance(row, ARNodeInputs) else None


def collate(
    rows: Sequence[NodeInputs], last_tokens: Callable[[], torch.Tensor] | None, device: torch.device
) -> torch.Tensor:
    """Token ids int64 [tokens] on ``device`` of rows laid end to end, decode rows first.

    Args:
        last_tokens: each row's last sampled token [rows] on the device; asked only where there are decode rows.
            None takes the tensors they were handed.

    Raises:
        KeyError: a decode row was handed no token.
    """
    num_decode = num_decode_rows(rows)
    prompts = [ids for row in rows[num_decode:] if row.input_seq_len and (ids := _ids_of(row)) is not None]
    parts: list[torch.Tensor] = []
    if num_decode and last_tokens is not None:
        parts.append(last_tokens()[:num_decode])
    elif num_decode:
        parts += [row.tensors[LOOPBACK].reshape(1).to(device, non_blocking=True) for row in rows[:num_decode]]
    if prompts or not num_decode:
        ids = torch.cat(prompts or [torch.empty(0, dtype=torch.int64)])
        parts.append(ids.to(device, non_blocking=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
