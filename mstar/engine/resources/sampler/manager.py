"""The sampler: settings and draw state of every request by master row, one draw per row and step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch

from mstar.engine import strict_mode
from mstar.engine.resources.base import EngineResourceInfo, Resource
from mstar.engine.resources.sampler.config import SamplerSpec, SamplerStep, SamplingReqConfig
from mstar.engine.resources.spec import NodeResourceSpec, ResourceReqConfig
from mstar.engine.resources.static import StepBuffer
from mstar.engine.resources.step import BucketKey, ResourceStep, StepContext
from mstar.kernels.cpu.draw import draw_kernel, sample_rows
from mstar.kernels.sampling import RowSettings
from mstar.utils import knobs

# Settings that stay as they are while a request runs: host master dtype, value of a row in nobody's use.
_SETTINGS: dict[str, tuple[Any, torch.dtype, Any]] = {
    "temperature": (np.float32, torch.float32, 1.0),
    "top_k": (np.int64, torch.int64, 0),
    "top_p": (np.float32, torch.float32, 1.0),
    "min_p": (np.float32, torch.float32, 0.0),
    "top_p_first": (np.bool_, torch.bool, False),
    "top_p_min_keep": (np.int64, torch.int64, 1),
    "seed": (np.int64, torch.int64, 0),
}


class SamplerManager(Resource):
    """Draws tokens.

    By master row: settings in NumPy on the host (written at ingest); ``offset`` int64 (draws kept so far) and
    ``last_token`` int64 on the device, advanced at commit for the rows whose draw is kept.
    """

    def __init__(self, spec: SamplerSpec, info: EngineResourceInfo) -> None:
        # What this sampler carries out; a request that asks for more is refused, never served without it.
        self._built = dataclasses.replace(
            spec, enable_repetion_penalty=False, max_repetition_window=0, min_tokens_stop_ids=()
        )
        self._device = info.device
        draw_kernel()  # compiled at load, not in the first step
        rows = info.total_rows
        self._settings = {name: np.full(rows, idle, dtype) for name, (dtype, _, idle) in _SETTINGS.items()}
        self.offset = torch.zeros(rows, dtype=torch.int64, device=info.device)
        self.has_slot_masters = knobs.device_loopback_enabled()
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=info.device)
        self._row_of: dict[int, int] = {}
        self._new_rows: list[int] = []  # their draw state is zeroed by the next plan, in step order
        self._version = 0  # moves whenever a setting does
        self._buffers = {
            name: StepBuffer(dtype, info.device, info.num_slots) for name, (_, dtype, _) in _SETTINGS.items()
        }
        self._row_buffer, self._offset_buffer, self._token_buffer = (
            StepBuffer(torch.int64, info.device, info.num_slots) for _ in range(3)
        )
        self._planned_key: dict[int, tuple[int, bytes]] = {}  # slot -> what its static settings hold
        self._step_settings: dict[int, tuple[torch.Tensor, dict[str, torch.Tensor]]] = {}
        self._planned: RowSettings | None = None
        self._apply_filters = True
        self._loopback: torch.Tensor | None = None
        self._drawn: torch.Tensor | None = None
        self._faults: torch.Tensor | None = None

    @classmethod
    def build(cls, spec: NodeResourceSpec, info: EngineResourceInfo) -> Self:
        assert isinstance(spec, SamplerSpec)
        return cls(spec, info)

    def ingest_request(self, request_id: int, row: int, config: ResourceReqConfig | None) -> None:
        """Takes a :class:`SamplingReqConfig` (None, whole or in a field: the defaults) for master row ``row``."""
        if config is None:
            config = SamplingReqConfig()
        assert isinstance(config, SamplingReqConfig)
        config.validate(self._built)
        given = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        config = SamplingReqConfig(**{name: value for name, value in given.items() if value is not None})
        for name, master in self._settings.items():
            master[row] = _stored(name, getattr(config, name))
        self._version += 1
        if self._row_of.get(request_id) != row:
            self._row_of[request_id] = row
            self._new_rows.append(row)

    def remove_request(self, request_id: int, row: int) -> None:
        if self._row_of.pop(request_id, None) is not None:
            for name, (_, _, idle) in _SETTINGS.items():
                self._settings[name][row] = idle

    def plan(self, step: ResourceStep, ctx: StepContext) -> None:
        assert isinstance(step, SamplerStep)
        if self._new_rows:
            fresh = torch.tensor(self._new_rows, device=self._device)
            self.offset[fresh] = 0
            self.last_token[fresh] = 0
            self._new_rows.clear()
        rows, settings = self._gather_settings(ctx)
        offset = self._offset_buffer.view(rows.numel(), ctx.slot_lease)
        torch.index_select(self.offset, 0, rows, out=offset)
        self._planned = RowSettings(**settings, offset=offset)
        if self.has_slot_masters:
            self._loopback = self._token_buffer.view(rows.numel(), ctx.slot_lease)
            torch.index_select(self.last_token, 0, rows, out=self._loopback)
        self._apply_filters = step.apply_filters
        self._drawn = self._faults = None

    def _gather_settings(self, ctx: StepContext) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Row index and settings of the step's rows; kept while neither the batch nor any setting changes."""
        slot = -1 if ctx.slot_lease is None else ctx.slot_lease.slot
        key = (self._version, ctx.rows.tobytes())
        if self._planned_key.get(slot) != key:
            self._step_settings[slot] = (
                self._row_buffer.put(ctx.rows, ctx.slot_lease),
                {
                    name: self._buffers[name].put(master[ctx.rows], ctx.slot_lease)
                    for name, master in self._settings.items()
                },
            )
            self._planned_key[slot] = key
        return self._step_settings[slot]

    def loopback_tokens(self) -> torch.Tensor:
        """Each row's last sampled token in planned order, int64 [padded bs].

        Raises:
            RuntimeError: the sampler keeps no last tokens (``MSTAR_DEVICE_LOOPBACK=0``), or nothing is planned.
        """
        if self._loopback is None:
            raise RuntimeError("the sampler keeps no last tokens: MSTAR_DEVICE_LOOPBACK is 0 or no step is planned")
        return self._loopback

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Draws one token per row of the padded batch from ``logits`` [bs, V]; int64 [bs]."""
        assert self._planned is not None, "sample before plan"
        with strict_mode.opaque("sample"):
            self._drawn, self._faults = sample_rows(logits, self._planned, self._apply_filters)
        return self._drawn

    def faults(self) -> torch.Tensor:
        """After :meth:`sample`: rows without usable logits (a NaN, a +inf or nothing finite), bool [bs].  Such rows
        were given token 0 and must end with an error."""
        assert self._faults is not None, "faults before sample"
        return self._faults

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        assert isinstance(step, SamplerStep)
        if self._drawn is None:  # the forward drew nothing
            return
        rows, tokens = ctx.rows[: ctx.num_real], self._drawn[: ctx.num_real]
        if step.kept_rids is not None:
            kept = np.flatnonzero(np.isin(ctx.request_ids, list(step.kept_rids)))
            rows, tokens = rows[kept], tokens[torch.from_numpy(kept).to(self._device)]
        index = torch.from_numpy(rows).to(self._device)
        self.offset[index] += 1
        if self.has_slot_masters:
            self.last_token[index] = tokens

    def build_accelerator_graph_buffers(self, buckets: Sequence[BucketKey], max_bs: int, max_seq_len: int) -> None:
        for buffer in (*self._buffers.values(), self._row_buffer, self._offset_buffer, self._token_buffer):
            buffer.reserve(max_bs)
        self._planned_key.clear()


def _stored(name: str, value: Any) -> Any:
    """A validated setting within its master's range."""
    if name == "seed":
        return (value + 2**63) % 2**64 - 2**63
    if name == "temperature":
        return min(value, np.finfo(np.float32).max)
    return min(value, 2**62) if name in ("top_k", "top_p_min_keep") else value
