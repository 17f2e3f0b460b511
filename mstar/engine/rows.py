"""A batch made ready for a step: rows' inputs and arrays, and the padded step of each leased slot, kept for reuse."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

import numpy as np

from mstar.engine.accelerator_graph_runner import check_key_info
from mstar.engine.batch import Batch
from mstar.engine.inputs import ModelInputsFromEngine, NodeInputs, RequestInfo
from mstar.engine.node import EngineNode
from mstar.engine.padding import PaddedTail
from mstar.engine.resources.step import LabelRows, SlotLease, StepContext, SubmoduleStep
from mstar.engine.submodule import NodeSubmodule

_row = attrgetter("row")


@dataclass
class PlannedStep:
    """One slot's step over padded rows; ``rows`` and ``spans`` int64 [padded rows], the first ``real`` of them real."""

    lease: SlotLease | None
    piecewise_leases: dict[str, SlotLease]
    step: SubmoduleStep | None
    request_ids: tuple[int, ...]
    padded_ids: tuple[int, ...]
    rows: np.ndarray
    spans: np.ndarray
    inputs: list[NodeInputs]
    infos: tuple[RequestInfo, ...]
    tail: PaddedTail | None
    eager_reason: str | None
    is_packed: bool = False
    pads_tokens: bool = False
    label_cache: dict[int, dict[str, LabelRows]] = field(default_factory=dict)
    engine_inputs: ModelInputsFromEngine | None = None  # of its runs, once there was one

    def inputs_from_engine(self, node: EngineNode, graph_walk: str, slot: int) -> ModelInputsFromEngine:
        """The engine's side of a run of this step, its context included; the same again in every run."""
        if self.engine_inputs is None:
            self.engine_inputs = ModelInputsFromEngine(
                self.padded_ids,
                node.resources,
                self.context(graph_walk, slot),
                self.infos,
                captured=self.lease is not None,
                piecewise=node.regions,
            )
        return self.engine_inputs

    def context(self, graph_walk: str, slot: int, is_preplan: bool = False) -> StepContext:
        """A new context of this step."""
        return StepContext(
            graph_walk=graph_walk,
            request_ids=self.request_ids,
            rows=self.rows,
            spans=self.spans,
            padded_request_ids=self.padded_ids,
            slot=slot,
            is_preplan=is_preplan,
            slot_lease=self.lease,
            is_packed=self.is_packed,
            pads_tokens=self.pads_tokens,
            piecewise_leases=self.piecewise_leases,
            label_cache=self.label_cache,
        )

    def is_same_step(self, other: PlannedStep) -> bool:
        """Whether both declare one step over one set of padded rows."""
        if self is other:
            return True
        return (
            self.padded_ids == other.padded_ids
            and self.lease == other.lease
            and np.array_equal(self.rows, other.rows)
            and np.array_equal(self.spans, other.spans)
        )


@dataclass
class PreparedBatch:
    """What stays the same while a batch's membership does.

    ``walks[i]``: row i's own walk in a combined one.  ``looped[i]``: loop-back inputs that row i takes from the
    engine.  ``is_reusable``: the rows' inputs are one shared object, so nothing here depends on the step.
    """

    batch: Batch
    infos: tuple[RequestInfo, ...]
    request_ids: tuple[int, ...]
    inputs: list[NodeInputs]
    walks: Sequence[str]
    looped: list[tuple[str, ...]]
    rows: np.ndarray
    spans: np.ndarray
    num_tokens: int
    equal_rows: bool
    key_info: Hashable | None
    eager_reason: str | None
    can_batch: bool
    is_reusable: bool
    errors: dict[int, Exception] = field(default_factory=dict)
    by_slot: dict[int, PlannedStep] = field(default_factory=dict)
    label_cache: dict[int, dict[str, LabelRows]] = field(default_factory=dict)  # of steps without padding

    def alone(self, i: int) -> PreparedBatch:
        """Row ``i`` as a batch of its own."""
        one = slice(i, i + 1)
        return replace(
            self,
            infos=self.infos[one],
            request_ids=self.request_ids[one],
            inputs=self.inputs[one],
            walks=self.walks[one],
            looped=self.looped[one],
            rows=self.rows[one],
            spans=self.spans[one],
            num_tokens=int(self.spans[i]),
            equal_rows=True,
            is_reusable=False,
            errors={},
            by_slot={},
            label_cache={},
        )


def prepare_batch(node: EngineNode, batch: Batch, cached: Mapping[int, int]) -> PreparedBatch:
    """Collects the rows' inputs; a row whose ``prepare_inputs`` raises lands in ``errors``, None skips it.

    ``cached``: tokens to leave out at the front, for requests that take their first step.
    """
    walk, submodule = batch.graph_walk, node.submodule
    template = submodule.uniform_row_inputs(walk) if batch.row_walks is None else None
    errors: dict[int, Exception] = {}
    infos: tuple[RequestInfo, ...] = tuple(batch.infos)
    if template is not None:
        count = len(infos)
        request_ids, inputs, walks = batch.request_ids, [template] * count, [walk] * count
        looped = [node.loopback_inputs(walk)] * count
        spans = np.full(count, template.input_seq_len, dtype=np.int64)
    else:
        infos, inputs, walks, spans = _prepare_each(node, batch, cached, errors)
        request_ids = batch.request_ids if len(infos) == len(batch.infos) else tuple(info.request_id for info in infos)
        loops = {walk: node.loopback_inputs(walk) for walk, _ in batch.runs}
        looped = [loops[walk] for walk in walks] if any(loops.values()) else [()] * len(walks)
    rows = batch.rows
    if rows is None or len(infos) < len(batch.infos):
        rows = np.fromiter(map(_row, infos), np.int64, len(infos))
    choosing = infos
    if not (chooses := node.chooses_capture[rows]).all():
        choosing = tuple(infos[i] for i in chooses.nonzero()[0].tolist())
    return PreparedBatch(
        batch=batch,
        infos=infos,
        request_ids=request_ids,
        inputs=inputs,
        walks=walks,
        looped=looped,
        rows=rows,
        spans=spans,
        num_tokens=int(spans.sum()),
        equal_rows=template is not None or bool((spans == spans[:1]).all()),
        key_info=submodule.cg_key_info(walk, choosing) if infos else None,
        eager_reason=submodule.eager_reason(walk, choosing),
        can_batch=submodule.can_batch(walk, inputs),
        is_reusable=template is not None,
        errors=errors,
    )


def _prepare_each(
    node: EngineNode, batch: Batch, cached: Mapping[int, int], errors: dict[int, Exception]
) -> tuple[tuple[RequestInfo, ...], list[NodeInputs], list[str], np.ndarray]:
    """Row by row, each under its own walk, but for runs of uniform rows; those that fail land in ``errors``."""
    submodule = node.submodule
    inputs: list[NodeInputs] = []
    walks: list[str] = []
    spans: list[np.ndarray] = []
    skipped: set[int] = set()
    for walk, run in batch.runs:
        template = submodule.uniform_row_inputs(walk)
        if template is not None:
            inputs += [template] * (run.stop - run.start)
            spans.append(np.full(run.stop - run.start, template.input_seq_len, np.int64))
        for i in range(run.start, run.stop) if template is None else ():
            info = batch.infos[i]
            try:
                row = submodule.prepare_inputs(walk, info)
                if row is not None:
                    part = _part(batch, i, row, cached.get(info.request_id, 0))
                    row = _cut(submodule, row, *part)
            except Exception as error:
                errors[info.request_id], row = error, None
            if row is not None:
                inputs.append(row)
            else:
                skipped.add(i)
        if template is None:
            spans.append(np.array([row.input_seq_len for row in inputs[len(walks) :]], np.int64))
        walks += [walk] * (len(inputs) - len(walks))
    infos = batch.infos
    if skipped:
        infos = [info for i, info in enumerate(batch.infos) if i not in skipped]
    return tuple(infos), inputs, walks, np.concatenate(spans) if spans else np.empty(0, np.int64)


def _part(batch: Batch, i: int, row: NodeInputs, cached: int) -> tuple[int, int]:
    """Begin and end of row ``i``'s tokens that run."""
    part = None if batch.prompt_parts is None else batch.prompt_parts[i]
    return (cached, row.input_seq_len) if part is None else part


def _cut(submodule: NodeSubmodule, row: NodeInputs, begin: int, end: int) -> NodeInputs:
    if end < row.input_seq_len:
        row = submodule.split_inputs(row, end)[0]
    return submodule.split_inputs(row, begin)[1] if begin else row


def plan_rows(prepared: PreparedBatch, node: EngineNode, slot: int, eager_reason: str | None = None) -> PlannedStep:
    """The step on ``slot``: leased and padded where a bucket fits, eager with its reason otherwise.

    ``eager_reason``: leases nothing, for this reason.

    Raises:
        RuntimeError: the declared step is another capture variant than the leased bucket.
    """
    walk, runner, real = prepared.batch.graph_walk, node.runner, len(prepared.infos)
    eager_reason = eager_reason or prepared.eager_reason
    shape = (prepared.num_tokens, prepared.key_info, prepared.equal_rows)
    lease = None if eager_reason else runner.lease_slot(walk, real, slot, *shape)
    ids, rows, spans = prepared.request_ids, prepared.rows, prepared.spans
    inputs, infos, tail = prepared.inputs, prepared.infos, None
    regions: dict[str, SlotLease] = {}
    if lease is None:
        eager_reason = eager_reason or runner.eager_reason(walk, real, *shape)
        regions = node.early_leases(inputs, prepared.num_tokens, slot)
    else:
        pool, bs = runner.padding_for(lease, real)
        if bs > real:
            tail = pool.tail(real, bs)
            padding, padding_spans = runner.padding_inputs(lease, bs - real)
            ids = ids + tail.ids
            rows = np.concatenate([rows, pool.rows[real:bs]])
            spans = np.concatenate([spans, padding_spans])
            inputs = [*inputs, *padding]
            infos += pool.infos[real:bs]
    step = node.submodule.declare_step(walk, ids, inputs, slot_lease=lease, piecewise_leases=regions)
    planned = PlannedStep(
        lease, regions, step, prepared.request_ids, ids, rows, spans, inputs, infos, tail, eager_reason
    )
    if tail is None:
        planned.label_cache = prepared.label_cache
    if lease is not None:
        check_key_info(lease, step)
        planned.is_packed, planned.pads_tokens = runner.context_flags(lease)
    return planned
