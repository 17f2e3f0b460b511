"""Token positions: the next one of every stream, and the rotary embedding of the step's tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch

from mstar.engine.resources.base import EngineResourceInfo, Resource
from mstar.engine.resources.kv.config import Fork
from mstar.engine.resources.kv.graph_steps import MOST_LABELS
from mstar.engine.resources.kv.manager import PagedKVManager
from mstar.engine.resources.kv.plan import KVPlan
from mstar.engine.resources.positions.config import PositionConfig, PositionScheme, PositionSpec, PositionStep
from mstar.engine.resources.positions.graph_positions import DevicePositions
from mstar.engine.resources.positions.overrides import advance_of, check_advance, explicit_ids
from mstar.engine.resources.positions.rotary import LabelBuffers, Positions, Rotary
from mstar.engine.resources.ragged import ragged_arange
from mstar.engine.resources.spec import NodeResourceSpec, ResourceReqConfig
from mstar.engine.resources.step import MAIN_LABEL, BucketKey, LabelRows, ResourceStep, SlotLease, StepContext
from mstar.kernels import rope
from mstar.utils import knobs


@dataclass
class _Plan:
    """One plan: what it wrote by label, and the counters its forks overwrote.

    ``starts``, of a plan made ahead: the streams and counters it read.  ``in_graph``: the forward builds tables.
    """

    planned: dict[str, Positions] = field(default_factory=dict)
    starts: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    overwritten: list[tuple[int, int]] = field(default_factory=list)
    in_graph: bool = False
    slot: int = 0


class PositionManager(Resource):
    """``next_position`` int64 [streams], on the host, by the cache's stream numbers (label by label, master row).

    The KV plan gives each label's rows, order and padded tokens.  Rotary tables are built once per step and label: by
    ``plan``, or, with MSTAR_INGRAPH_DECODE_ROPE, by the captured forward of a leased decode step itself: where that
    moves lengths on (the KV plan has a head), from positions on the device, which it moves on too
    (:class:`DevicePositions`), else from the static positions.  ``counters`` counts planned steps of either way:
    ``ingraph_table_steps``, ``staged_table_steps``.
    """

    supports_preplan = True
    is_rebuilt_by_tokens = True

    def __init__(self, config: PositionConfig, kv: PagedKVManager, info: EngineResourceInfo) -> None:
        self.config = config
        self.counters: Counter[str] = Counter()
        self.next_position = np.zeros(info.total_rows, np.int64)
        self._kv = kv
        self._info = info
        self._rotary = Rotary(config, kv.config.head_dim, info)
        self._is_sequential = config.scheme is PositionScheme.SEQUENTIAL
        # A cached prefix says nothing of how many blocks it was, nor of the length that dynamic scaling had seen.
        self.prefix_skip_safe = self._is_sequential and not self._rotary.is_dynamic
        self._in_graph = knobs.ingraph_decode_rope()
        self._ids_are_counters = self._rotary.axes == 1 and not self._rotary.is_dynamic  # of decode rows
        self._row_of: dict[int, int] = {}
        # What the last commit on a slot moved, and how far: the same again while its batch is.
        self._moved: dict[int, tuple[PositionStep, LabelRows, np.ndarray, np.ndarray]] = {}
        self._buffers: dict[str, LabelBuffers] = {}
        self._reserved_tokens = 0
        self._planned: dict[str, Positions] = {}
        self._staged: _Plan | None = None
        self._epoch = 0  # moves when a counter does
        self._device: DevicePositions | None = None
        self._repeating: dict[int, tuple[PositionStep, SlotLease]] = {}  # by slot, the last that moves its positions
        self._overwritten: list[tuple[int, int]] = []

    @classmethod
    def build(cls, spec: NodeResourceSpec, info: EngineResourceInfo) -> Self:
        assert isinstance(spec, PositionSpec)
        return cls(spec.config, PagedKVManager.needed_by(spec.resource_key, spec.config.kv_cache, info), info)

    # Requests.

    def ingest_request(self, request_id: int, row: int, config: ResourceReqConfig | None) -> None:
        if self._row_of.get(request_id) != row:
            self._row_of[request_id] = row
            self._reset(row)

    def remove_request(self, request_id: int, row: int) -> None:
        self._row_of.pop(request_id, None)

    def apply_cached_prefix(
        self, request_id: int, row: int, matched_len: int, matched_ids: np.ndarray | None = None
    ) -> None:
        if self._is_sequential:
            self._epoch += 1
            self.next_position[row] = matched_len  # stream of "main"; ingest has set the others to 0

    def reset_rows(self, request_ids: Sequence[int], rows: Sequence[int], free: bool = False) -> None:
        if min(rows, default=self._info.capacity) < self._info.capacity:  # those of padding rows are 0 and stay so
            self._reset(np.asarray(rows, np.int64))

    def _reset(self, rows: np.ndarray | int) -> None:
        self._epoch += 1
        for start in range(0, self.next_position.size, self._info.total_rows):
            self.next_position[start : start + self._info.total_rows][rows] = 0

    # Steps.

    def plan(self, step: ResourceStep, ctx: StepContext) -> dict[str, Positions]:
        """The positions of each plan label.

        Raises:
            ValueError: ``pos_ids`` or ``advance`` of the step do not fit its segments.
            KeyError: a fork of a request that was not ingested.
        """
        assert isinstance(step, PositionStep)
        plans: Mapping[str, KVPlan] = ctx.plan_results[self.config.kv_cache]
        explicit = explicit_ids(step, plans, self._rotary.axes) if step.pos_ids is not None else {}
        if step.advance is not None:
            check_advance(step, ctx)
        staged = _Plan(slot=ctx.slot)
        if ctx.is_preplan:
            self._staged = staged
        else:
            self._overwritten = staged.overwritten
        for fork in step.pre_forks:
            staged.overwritten.append(self._fork(fork))
        self._take_in_labels()
        if ctx.slot_lease is not None:
            self._repeating.pop(ctx.slot, None)
        for label, kv_plan in plans.items():
            if self._in_graph and kv_plan.head is not None and self._ids_are_counters:
                staged.in_graph = True
                staged.planned[label] = self._plan_in_graph(label, kv_plan, explicit.get(label), step, ctx)
                continue
            if ctx.is_preplan:
                staged.starts.append((kv_plan.streams, self.next_position[kv_plan.streams]))
            planned = self._write(label, kv_plan, explicit.get(label), ctx.slot_lease)
            # A packed bucket replays one graph for rows of any length, so all of its steps must stage alike.
            if self._in_graph and kv_plan.is_decode and ctx.slot_lease is not None and not ctx.is_packed:
                staged.in_graph = True
            else:
                self._buffers[label].build_tables(planned, ctx.slot_lease)
            staged.planned[label] = planned
        if not explicit and staged.planned and all(each.head is not None for each in staged.planned.values()):
            assert ctx.slot_lease is not None
            self._repeating[ctx.slot] = step, ctx.slot_lease
        if not ctx.is_preplan:
            self._take(staged, ctx)
        return staged.planned

    def promote_preplan(self, step: ResourceStep, ctx: StepContext) -> dict[str, Positions]:
        staged, self._staged = self._staged, None
        assert staged is not None, "nothing was planned ahead"
        if not all(np.array_equal(self.next_position[streams], at) for streams, at in staged.starts):
            self._restore(staged.overwritten)  # counters moved since
            return self.plan(step, ctx)
        self._take(staged, ctx)
        return staged.planned

    def clear_preplan(self) -> None:
        if self._staged is not None:
            self._restore(self._staged.overwritten)
            if self._device is not None:
                for label in self._staged.planned:
                    self._device.discard(label, self._staged.slot)
            self._staged = None

    def rotate(self, q: torch.Tensor, k: torch.Tensor, label: str = MAIN_LABEL) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotates q [n, query heads, head_dim] and k [n, kv heads, head_dim] to the positions of a label's tokens."""
        return self.rotate_heads(q, label), self.rotate_heads(k, label)

    def rotate_heads(self, x: torch.Tensor, label: str = MAIN_LABEL) -> torch.Tensor:
        """Rotates any heads x [n, heads, head_dim], such as queries and keys side by side; returns a new tensor."""
        cos, sin = self.tables(label)
        return rope.rotate(x, cos, sin, self.config.interleave)

    def tables(self, label: str = MAIN_LABEL) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of a label's tokens, [n, 1, rotary_dim] each, as :func:`mstar.kernels.rope.rotate` takes
        them; built here, once a step, where the plan left that to the forward."""
        planned = self._planned[label]
        if planned.head is not None:
            planned.head.begin()
        if planned.tables is None:
            planned.tables = self._rotary.tables(planned)
        return planned.tables

    def pos_ids(self, label: str = MAIN_LABEL) -> torch.Tensor:
        """Positions of a label's tokens on the device: int64 [n], or [3, n] where they are three-fold."""
        planned = self._planned[label]
        if planned.head is not None:
            planned.head.begin()
        ids = planned.ids
        return ids if ids.dim() == 1 else ids.t()

    def repeats_in_graph(self, step: ResourceStep, ctx: StepContext) -> bool:
        last = self._repeating.get(ctx.slot)
        return last is not None and last[0] is step and last[1] is ctx.slot_lease

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        assert isinstance(step, PositionStep)
        self._overwritten = []
        before, self._epoch = self._epoch, self._epoch + 1
        for rows in ctx.labels(step).values():
            last = self._moved.get(ctx.slot)
            if last is None or last[0] is not step or last[1] is not rows:
                real = rows.num_real
                last = step, rows, self._streams(rows)[:real], self._moves(step, rows)[:real]
                self._moved[ctx.slot] = last
            self.next_position[last[2]] += last[3]
        if self._device is not None:
            for planned in self._planned.values():
                self._device.committed(planned, before, self._epoch)
        for fork in step.post_forks:
            self._fork(fork)

    def abandon(self, step: ResourceStep, ctx: StepContext) -> None:
        if self._device is not None:
            self._device.counters.forget(self._kv.streams_of_rows(ctx.rows))
        self._restore(self._overwritten)
        self._overwritten = []

    def build_accelerator_graph_buffers(self, buckets: Sequence[BucketKey], max_bs: int, max_seq_len: int) -> None:
        self._reserved_tokens = max(self._reserved_tokens, max_bs, max_seq_len)
        for buffers in self._buffers.values():
            buffers.reserve(self._reserved_tokens)
        if self._device is not None:
            self._device.reserve(self._reserved_tokens)

    def _plan_in_graph(
        self, label: str, kv_plan: KVPlan, explicit: torch.Tensor | None, step: PositionStep, ctx: StepContext
    ) -> Positions:
        """Positions and tables that the forward computes from the device's counters."""
        if self._device is None:
            self._device = DevicePositions(self._rotary, MOST_LABELS * self._info.total_rows, self._info)
            self._device.reserve(self._reserved_tokens)
        ids = None if explicit is None else explicit.cpu().numpy()
        buffers = self._label_buffers(label)
        assert kv_plan.head is not None
        rows = kv_plan.head.rows
        move_alike = step.advance is None and self._is_sequential and len(rows.planned) == 1
        if move_alike and ctx.labels(step) is rows.labels:
            return self._device.plan(label, kv_plan, step, ctx, buffers, ids, None)

        def moves_of(streams: np.ndarray) -> np.ndarray:
            moves = np.zeros(self.next_position.size, np.int64)
            for rows in ctx.labels(step).values():
                moves[self._streams(rows)[: rows.num_real]] = self._moves(step, rows)[: rows.num_real]
            return moves[streams]

        return self._device.plan(label, kv_plan, step, ctx, buffers, ids, moves_of)

    def _label_buffers(self, label: str) -> LabelBuffers:
        buffers = self._buffers.get(label)
        if buffers is None:
            buffers = self._buffers[label] = LabelBuffers(self._rotary, self.config.rope_theta, self._info)
            buffers.reserve(self._reserved_tokens)
        return buffers

    def _write(self, label: str, kv_plan: KVPlan, explicit: torch.Tensor | None, lease: SlotLease | None) -> Positions:
        """Writes the positions of a label's tokens, without their tables."""
        buffers = self._label_buffers(label)
        streams, tokens = kv_plan.streams, kv_plan.num_tokens
        if explicit is None and kv_plan.is_decode and self._ids_are_counters and tokens == streams.size:
            return buffers.put_counters(self.next_position, streams, lease)
        ids: np.ndarray | torch.Tensor
        if explicit is None:
            ids = self._ids(kv_plan, self.next_position[streams])
        else:
            ids = explicit.cpu().numpy() if self._rotary.is_dynamic else explicit
        bases = self._rotary.bases(ids, kv_plan.spans) if isinstance(ids, np.ndarray) else None
        return buffers.put(ids, bases, tokens, lease)

    def _ids(self, kv_plan: KVPlan, starts: np.ndarray) -> np.ndarray:
        """Positions that follow the counters: int64, flat in token order."""
        ids = starts
        if not kv_plan.is_decode:
            ids = np.repeat(starts, kv_plan.spans)
            if self._is_sequential:
                ids += ragged_arange(kv_plan.spans)
        return ids if self._rotary.axes == 1 else np.repeat(ids, self._rotary.axes)

    def _take(self, staged: _Plan, ctx: StepContext) -> None:
        """Makes this the step that the forward runs."""
        self._planned, self._overwritten = staged.planned, staged.overwritten
        if self._device is not None:
            for planned in staged.planned.values():
                self._device.bring(planned, self.next_position, self._epoch)
        if not ctx.capture:
            self.counters["ingraph_table_steps" if staged.in_graph else "staged_table_steps"] += 1

    def _moves(self, step: PositionStep, rows: LabelRows) -> np.ndarray:
        """How far each row's counter moves, int64 [n]."""
        if step.advance is not None:
            return advance_of(step.advance, step.segments, rows.label)
        return rows.spans if self._is_sequential else (rows.spans > 0) * self.config.block_step

    # Counters.

    def _streams(self, rows: LabelRows) -> np.ndarray:
        streams = self._kv.streams(rows)
        if rows.label != MAIN_LABEL:
            self._take_in_labels()  # a label without a plan of its own may be new
        return streams

    def _take_in_labels(self) -> None:
        """As many counters as the cache has streams; those of a new label start at 0."""
        missing = self._kv.stored_len.size - self.next_position.size
        if missing > 0:
            self.next_position = np.concatenate([self.next_position, np.zeros(missing, np.int64)])

    def _fork(self, fork: Fork) -> tuple[int, int]:
        """Copies a counter; returns the target's stream and what it held."""
        rows = np.array([self._row_of[fork.request_id]], np.int64)
        source, target = (
            self._streams(LabelRows(label, (fork.request_id,), rows, np.zeros(1, np.int64), 1))
            for label in (fork.source, fork.target)
        )
        self._epoch += 1
        before = int(target[0]), int(self.next_position[target[0]])
        self.next_position[target] = self.next_position[source]
        return before

    def _restore(self, overwritten: Sequence[tuple[int, int]]) -> None:
        self._epoch += 1
        for stream, position in reversed(overwritten):
            self.next_position[stream] = position
