"""Sequential token positions: the next one of every row, and the step's rotary tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch

from mstar.engine.resources.base import EngineResourceInfo, Resource
from mstar.engine.resources.kv.manager import PagedKVManager
from mstar.engine.resources.positions.config import PositionConfig, PositionSpec, PositionStep
from mstar.engine.resources.ragged import ragged_arange
from mstar.engine.resources.spec import NodeResourceSpec, ResourceReqConfig
from mstar.engine.resources.static import StepBuffer
from mstar.engine.resources.step import BucketKey, ResourceStep, StepContext
from mstar.kernels import rope


class PositionManager(Resource):
    """``next_position`` int64 [rows], on the host, by master row.

    A step's positions are int64 [n], one per new token in row order; cos and sin are built once per step in the
    forward's dtype.
    """

    def __init__(self, config: PositionConfig, head_dim: int, info: EngineResourceInfo) -> None:
        rotary_dim = config.rotary_dim or head_dim
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            raise ValueError(f"rotary_dim must be even and in 2..{head_dim}, got {rotary_dim}")
        self.config = config
        self.next_position = np.zeros(info.total_rows, np.int64)
        self.positions = torch.empty(0, dtype=torch.int64)
        self._frequencies = rope.inverse_frequencies(rotary_dim, config.rope_theta, config.rope_scaling).to(info.device)
        self._dtype = info.dtype
        self._rotary_dim = rotary_dim
        self._row_of: dict[int, int] = {}
        self._position_buffer = StepBuffer(torch.int64, info.device, info.num_slots)
        self._tables = [StepBuffer(info.dtype, info.device, info.num_slots) for _ in range(2)]
        self._cos = self._sin = torch.empty(0)

    @classmethod
    def build(cls, spec: NodeResourceSpec, info: EngineResourceInfo) -> Self:
        assert isinstance(spec, PositionSpec)
        kv = PagedKVManager.needed_by(spec.resource_key, spec.config.kv_cache, info)
        return cls(spec.config, kv.config.head_dim, info)

    def ingest_request(self, request_id: int, row: int, config: ResourceReqConfig | None) -> None:
        if self._row_of.get(request_id) != row:
            self._row_of[request_id] = row
            self.next_position[row] = 0

    def remove_request(self, request_id: int, row: int) -> None:
        self._row_of.pop(request_id, None)

    def reset_rows(self, request_ids: Sequence[int], rows: Sequence[int], free: bool = False) -> None:
        self.next_position[np.asarray(rows, np.int64)] = 0

    def plan(self, step: ResourceStep, ctx: StepContext) -> torch.Tensor:
        starts = self.next_position[ctx.rows]
        ids = starts if (ctx.spans == 1).all() else np.repeat(starts, ctx.spans) + ragged_arange(ctx.spans)
        self.positions = self._position_buffer.put(ids, ctx.slot_lease)
        tables = rope.cos_sin(self.positions, self._frequencies, self.config.interleave)
        self._cos, self._sin = (
            buffer.view(table.numel(), ctx.slot_lease).view(table.shape).copy_(table)
            for buffer, table in zip(self._tables, tables, strict=True)
        )
        return self.positions

    def rotate(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotates q [n, query heads, head_dim] and k [n, kv heads, head_dim] to their tokens' positions."""
        return self.rotate_heads(q), self.rotate_heads(k)

    def rotate_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Rotates any heads x [n, heads, head_dim], such as queries and keys side by side; returns a new tensor."""
        return rope.rotate(x, self._cos, self._sin, self.config.interleave)

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        assert isinstance(step, PositionStep)
        n = ctx.num_real
        moved = ctx.spans if step.advance is None else np.asarray(step.advance, np.int64)
        self.next_position[ctx.rows[:n]] += moved[:n]

    def build_accelerator_graph_buffers(self, buckets: Sequence[BucketKey], max_bs: int, max_seq_len: int) -> None:
        tokens = max(max_bs, max_seq_len)
        self._position_buffer.reserve(tokens)
        for buffer in self._tables:
            buffer.reserve(tokens * self._rotary_dim)
