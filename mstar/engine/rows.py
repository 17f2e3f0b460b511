"""A batch made ready for a step: rows' inputs and arrays, and the padded step of each leased slot, kept for reuse."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mstar.engine.accelerator_graph_runner import AcceleratorGraphRunner, check_key_info
from mstar.engine.batch import Batch
from mstar.engine.inputs import NodeInputs, RequestInfo
from mstar.engine.padding import PaddingPool
from mstar.engine.resources.step import SlotLease, SubmoduleStep
from mstar.engine.submodule import NodeSubmodule


@dataclass
class PlannedStep:
    """One slot's step over padded rows; ``rows`` and ``spans`` int64 [padded rows], the first ``real`` of them real."""

    lease: SlotLease | None
    step: SubmoduleStep | None
    padded_ids: tuple[int, ...]
    rows: np.ndarray
    spans: np.ndarray
    inputs: Sequence[NodeInputs]
    infos: list[RequestInfo]
    pool: PaddingPool | None
    eager_reason: str | None


@dataclass
class PreparedBatch:
    """What stays the same while a batch's membership does.

    ``is_reusable``: the rows' inputs are one shared object, so nothing here depends on the step.
    """

    batch: Batch
    infos: tuple[RequestInfo, ...]
    request_ids: tuple[int, ...]
    inputs: list[NodeInputs]
    rows: np.ndarray
    spans: np.ndarray
    num_tokens: int
    equal_rows: bool
    key_info: Hashable | None
    is_reusable: bool
    errors: dict[int, Exception] = field(default_factory=dict)
    by_slot: dict[int, PlannedStep] = field(default_factory=dict)


def prepare_batch(submodule: NodeSubmodule, batch: Batch) -> PreparedBatch:
    """Collects the rows' inputs; a row whose ``prepare_inputs`` raises lands in ``errors``, None skips it."""
    walk, infos, errors = batch.graph_walk, tuple(batch.infos), {}
    template = submodule.uniform_row_inputs(walk)
    if template is not None:
        inputs = [template] * len(infos)
        spans = np.full(len(infos), template.input_seq_len, dtype=np.int64)
    else:
        kept: list[RequestInfo] = []
        inputs = []
        for info in infos:
            try:
                row = submodule.prepare_inputs(walk, info)
            except Exception as error:
                errors[info.request_id] = error
                continue
            if row is not None:
                kept.append(info)
                inputs.append(row)
        infos = tuple(kept)
        spans = np.array([row.input_seq_len for row in inputs], dtype=np.int64)
    return PreparedBatch(
        batch=batch,
        infos=infos,
        request_ids=tuple(info.request_id for info in infos),
        inputs=inputs,
        rows=np.array([info.row for info in infos], dtype=np.int64),
        spans=spans,
        num_tokens=int(spans.sum()),
        equal_rows=bool((spans == spans[:1]).all()),
        key_info=submodule.cg_key_info(walk, infos) if infos else None,
        is_reusable=template is not None,
        errors=errors,
    )


def plan_rows(
    prepared: PreparedBatch, submodule: NodeSubmodule, runner: AcceleratorGraphRunner, slot: int
) -> PlannedStep:
    """The step on ``slot``: leased and padded where a bucket fits, eager with its reason otherwise.

    Raises:
        RuntimeError: the declared step is another capture variant than the leased bucket.
    """
    walk, real = prepared.batch.graph_walk, len(prepared.infos)
    lease = runner.lease_slot(walk, real, slot, prepared.num_tokens, prepared.key_info, prepared.equal_rows)
    ids, rows, spans = prepared.request_ids, prepared.rows, prepared.spans
    inputs, infos, pool, reason = prepared.inputs, list(prepared.infos), None, None
    if lease is None:
        reason = runner.eager_reason(walk, real, prepared.num_tokens, prepared.key_info, prepared.equal_rows)
    else:
        padding, bs = runner.padding_for(lease, real)
        if bs > real:
            pool = padding
            tail = runner.padding_inputs(lease, bs - real)
            ids = ids + padding.ids[real:bs]
            rows = np.concatenate([rows, padding.rows[real:bs]])
            spans = np.concatenate([spans, np.array([row.input_seq_len for row in tail], dtype=np.int64)])
            inputs = [*inputs, *tail]
            infos += padding.infos[real:bs]
    step = submodule.declare_step(walk, ids, inputs, slot_lease=lease)
    if lease is not None:
        check_key_info(lease, step)
    return PlannedStep(lease, step, ids, rows, spans, inputs, infos, pool, reason)
