"""Edits of logits on a device: a few kernels over every row of the batch, which a graph can hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple, Self

import numpy as np
import torch

from mstar.engine.resources.base import EngineResourceInfo
from mstar.engine.resources.columns import Columns, StepColumns
from mstar.engine.resources.compositions import Compositions
from mstar.engine.resources.logit_edits.config import LogitEditsSpec, LogitEditsStep
from mstar.engine.resources.logit_edits.requests import EditsOfRequests
from mstar.engine.resources.logit_edits.row_edits import RowEdits
from mstar.engine.resources.row_memory import RowMemory
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.engine.resources.step import BucketKey, ResourceStep, SlotLease, StepContext
from mstar.kernels.cuda.logit_edits import edit_logits, hold_back, record

_NO_TOKEN = -1
_COLUMNS = {
    "bias_at": torch.int64,
    "counts_at": torch.int64,
    "words_at": torch.int64,
    "recent_at": torch.int64,
    "stops_at": torch.int64,
    "presence": torch.float32,
    "frequency": torch.float32,
    "num_words": torch.int32,
    "recent_length": torch.int32,
    "num_stops": torch.int32,
    "is_kept": torch.int32,
}


class _Batch(NamedTuple):
    """The columns of a step, as long as the tokens kept so far bar the stop ids of the rows ``is_low`` bool [bs]."""

    is_low: np.ndarray
    is_empty: bool
    kept_rows: np.ndarray
    columns: Columns


class DeviceLogitEdits(EditsOfRequests):
    """By master row: the address of what the row is edited by, and of what it has generated where that matters.

    What a step's rows have is sent when the batch changes, or when one comes to the end of its floor.  Leased steps
    count their tokens in the forward, for a graph runs no commit; others count them at commit.  How many tokens were
    kept, which lifts the floor, is known on the host.
    """

    force_double_buffer = True

    def __init__(self, spec: LogitEditsSpec, info: EngineResourceInfo) -> None:
        super().__init__(spec, info)
        rows, device = info.total_rows, info.device
        self._bias = RowMemory(rows, spec.vocab_size, torch.float32, 0, device)
        self._counts = RowMemory(rows, spec.vocab_size, torch.int32, 0, device)
        self._words = RowMemory(rows, None, torch.int32, 0, device)
        self._recent = RowMemory(rows, None, torch.int32, _NO_TOKEN, device)
        self._stops = RowMemory(rows, None, torch.int32, 0, device)
        self._presence, self._frequency = np.zeros(rows, np.float32), np.zeros(rows, np.float32)
        self._num_words, self._recent_length = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        self._num_stops = np.zeros(rows, np.int32)
        self._least = np.zeros(rows, np.int64)  # kept tokens from which stop ids may come
        self._columns = StepColumns(_COLUMNS, device, info.num_slots)
        # By slot, -1 for eager steps: what its columns hold.
        self._batches: defaultdict[int, Compositions[_Batch]] = defaultdict(lambda: Compositions(1))
        self._recorded: set[BucketKey] = set()  # whose forward counts its tokens
        self._batch: _Batch | None = None  # of the planned step
        self._lease: SlotLease | None = None
        self._tokens: torch.Tensor | None = None

    @classmethod
    def build(cls, spec: NodeResourceSpec, info: EngineResourceInfo) -> Self:
        assert isinstance(spec, LogitEditsSpec)
        return cls(spec, info)

    def plan(self, step: ResourceStep, ctx: StepContext) -> None:
        assert isinstance(step, LogitEditsStep)
        lease = self._lease = ctx.slot_lease
        slot = -1 if lease is None else lease.slot
        composition = self._version, ctx.rows, ctx.request_ids, step.kept_rids
        is_low = self._kept[ctx.rows] < self._least[ctx.rows]
        batch = self._batches[slot].find(*composition)
        if batch is None or not np.array_equal(batch.is_low, is_low):
            laid_out = self._laid_out_on_device(ctx, step.kept_rids, is_low)
            batch = self._batches[slot].keep(laid_out, *composition)
        self._batch, self._tokens = batch, None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        batch = self._batch
        assert batch is not None, "apply before plan"
        logits = logits.contiguous()
        if self._lease is None and batch.is_empty:
            return logits.to(torch.float32, copy=True)
        of = batch.columns
        return edit_logits(logits, of["bias_at"], of["counts_at"], of["presence"], of["frequency"])

    def hold_back(self, logits: torch.Tensor) -> torch.Tensor:
        batch = self._batch
        assert batch is not None, "hold_back before plan"
        if self._lease is not None or not batch.is_empty:
            of = batch.columns
            hold_back(
                logits,
                of["words_at"],
                of["num_words"],
                of["recent_at"],
                of["recent_length"],
                of["stops_at"],
                of["num_stops"],
            )
        return logits

    def record(self, tokens: torch.Tensor) -> None:
        assert self._batch is not None, "record before plan"
        self._tokens = tokens
        if self._lease is not None:
            self._recorded.add(self._lease.bucket)
            self._move(self._batch, tokens)

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        batch, tokens, lease = self._batch, self._tokens, self._lease
        assert batch is not None, "commit before plan"
        if lease is None and tokens is not None and not batch.is_empty:
            self._move(batch, tokens)
        if tokens is not None or (lease is not None and lease.bucket in self._recorded):
            self._kept[batch.kept_rows] += 1
        self.abandon(step, ctx)

    def abandon(self, step: ResourceStep, ctx: StepContext) -> None:
        self._batch = self._tokens = self._lease = None

    def build_accelerator_graph_buffers(self, buckets: Sequence[BucketKey], max_bs: int, max_seq_len: int) -> None:
        self._columns.reserve(max_bs)
        self._batches.clear()

    def _laid_out_on_device(self, ctx: StepContext, kept: Collection[int] | None, is_low: np.ndarray) -> _Batch:
        rows, real = ctx.rows, ctx.num_real
        is_kept = self._is_live[rows]
        is_empty = not is_kept.any()
        if is_empty and ctx.slot_lease is None:
            return _Batch(is_low, is_empty, rows[:0], {})
        if kept is not None:
            is_kept[:real] &= [request_id in kept for request_id in ctx.request_ids]
        columns = self._columns.put(
            {
                "bias_at": self._bias.address[rows],
                "counts_at": self._counts.address[rows],
                "words_at": self._words.address[rows],
                "recent_at": self._recent.address[rows],
                "stops_at": self._stops.address[rows],
                "presence": self._presence[rows],
                "frequency": self._frequency[rows],
                "num_words": self._num_words[rows],
                "recent_length": self._recent_length[rows],
                "num_stops": np.where(is_low, self._num_stops[rows], 0),
                "is_kept": is_kept,
            },
            ctx.slot_lease,
        )
        return _Batch(is_low, is_empty, rows[is_kept], columns)

    def _move(self, batch: _Batch, tokens: torch.Tensor) -> None:
        of = batch.columns
        record(tokens, of["is_kept"], of["counts_at"], of["recent_at"], of["recent_length"])

    def _take(self, row: int, edits: RowEdits) -> None:
        self._presence[row], self._frequency[row] = edits.presence, edits.frequency
        self._least[row] = edits.min_tokens if edits.has_floor else 0
        self._num_stops[row], self._num_words[row] = edits.stop_ids.size, edits.word_last.size
        if edits.allowed.size or edits.barred.size or edits.bias_ids.size:
            self._bias.hold(row, self._bias_of(edits))
        else:
            self._bias.release(row)
        if edits.has_penalty:
            self._counts.lend(row)
        else:
            self._counts.release(row)
        _hold(self._stops, row, self._sent(edits.stop_ids) if edits.has_floor else None)
        _hold(self._words, row, self._sent(_encoded(edits)) if edits.word_last.size else None)
        ring = self._recent_of(row, edits.history) if edits.history else None
        _hold(self._recent, row, ring)
        self._recent_length[row] = 0 if ring is None else ring.numel() - 1

    def _drop(self, row: int) -> None:
        for memory in (self._bias, self._counts, self._words, self._recent, self._stops):
            memory.release(row)
        for column in (self._presence, self._frequency, self._num_words, self._recent_length, self._num_stops):
            column[row] = 0
        self._least[row] = 0

    def _bias_of(self, edits: RowEdits) -> torch.Tensor:
        """What is added to each logit, fp32 [vocab]: -inf where a token is barred."""
        bias = torch.zeros(self._vocab, device=self._device)
        values = torch.from_numpy(edits.bias).to(self._device, non_blocking=True)
        bias.index_copy_(0, self._sent(edits.bias_ids).long(), values)
        if edits.allowed.size:
            allowed = self._sent(edits.allowed).long()
            bias = torch.full_like(bias, -torch.inf).index_copy_(0, allowed, bias.index_select(0, allowed))
        return bias.index_fill_(0, self._sent(edits.barred).long(), -torch.inf)

    def _recent_of(self, row: int, length: int) -> torch.Tensor:
        """The row's ring for at least ``length`` tokens; a longer one than it had takes over what that held."""
        before = self._recent.of(row)
        if before is not None and before.numel() > length:
            return before
        ring = torch.full((1 + length,), _NO_TOKEN, dtype=torch.int32, device=self._device)
        ring[0] = 0
        if before is not None:
            held, pushed = before.numel() - 1, int(before[0])
            ring[1 : 1 + held] = before[1:].roll(-pushed)  # the oldest first
            ring[0] = held
        return ring

    def _sent(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(self._device, non_blocking=True)


def _hold(memory: RowMemory, row: int, tensor: torch.Tensor | None) -> None:
    if tensor is None:
        memory.release(row)
    else:
        memory.hold(row, tensor)


def _encoded(edits: RowEdits) -> np.ndarray:
    """Bad words of several ids, as :func:`~mstar.kernels.cuda.logit_edits.hold_back` reads them."""
    starts = np.cumsum(edits.word_lengths) - edits.word_lengths
    return np.concatenate((edits.word_last, edits.word_lengths, starts, edits.word_before))
