"""The sampler: settings and draw state of every request by master row, one draw per row and step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from mstar.engine import strict_mode
from mstar.engine.resources.base import EngineResourceInfo, Resource
from mstar.engine.resources.sampler.config import SamplerSpec, SamplerStep, SamplingReqConfig
from mstar.engine.resources.sampler.history import History
from mstar.engine.resources.sampler.masters import DrawMasters
from mstar.engine.resources.sampler.planned_step import PlannedStep
from mstar.engine.resources.sampler.settings import StaticSettings
from mstar.engine.resources.spec import NodeResourceSpec, ResourceReqConfig
from mstar.engine.resources.static import StepBuffer
from mstar.engine.resources.step import BucketKey, ResourceStep, SlotLease, StepContext
from mstar.kernels.cpu.draw import draw_kernel, sample_rows
from mstar.kernels.sampling import RowSettings
from mstar.utils import knobs

if TYPE_CHECKING:
    from mstar.kernels.cuda.sampling import DeviceSampler


class SamplerManager(Resource):
    """Draws tokens.

    By master row: settings on the host, which may be staged a step ahead; draw state on the device, gathered once
    the step before has committed.  With ``MSTAR_SAMPLER_INGRAPH_SCATTER`` a leased step gathers and scatters draw
    state inside its forward and commit issues nothing; other steps gather in plan and scatter at commit.  With
    ``MSTAR_INGRAPH_DECODE_TOKENS`` a leased step's forward may read last tokens where they are kept.  Histories
    move as each draw is made, for the rows that the step keeps, and :meth:`abandon` takes that back: the next draw
    of the same step sees them, as if it were a step of its own.

    ``counters``: ``ingraph_scatter_steps``, ``host_scatter_steps``, ``loopback_steps`` (steps that read the last
    tokens), ``static_gathers`` and ``static_gather_hits``.
    """

    force_double_buffer = True
    supports_preplan = True

    def __init__(self, spec: SamplerSpec, info: EngineResourceInfo) -> None:
        self._spec = spec
        self._device_sampler: DeviceSampler | None = None
        if info.device.type == "cuda":
            from mstar.kernels.cuda.sampling import DeviceSampler

            self._device_sampler = DeviceSampler(info.device, info.total_rows)
        else:
            draw_kernel()  # compiled at load, not in the first step
        self._scatters_in_graph = knobs.sampler_ingraph_scatter()
        self._reads_in_graph = knobs.ingraph_decode_tokens() and knobs.device_loopback_enabled()
        self.has_slot_masters = knobs.device_loopback_enabled()
        self._capacity = info.capacity
        num_rows = knobs.sampler_slots() if self._scatters_in_graph else info.total_rows
        self.counters: Counter[str] = Counter()
        self._masters = DrawMasters(num_rows, info.device, info.num_slots)
        self._settings = StaticSettings(info.total_rows, info.device, info.num_slots, self.counters)
        self._history = History(spec, num_rows, info.device, info.num_slots)
        self._offsets, self._tokens = (StepBuffer(torch.int64, info.device, info.num_slots) for _ in range(2))
        self._host_tokens = self._masters.last_token.numpy() if info.device.type == "cpu" else None
        self._draws = np.zeros(num_rows + 1, np.int64)  # what the master of offsets holds behind the last commit
        self._draws_per_replay: dict[BucketKey, int] = {}
        self._row_of: dict[int, int] = {}
        self._new_rows: list[int] = []  # restarted by the next plan, behind the steps of their last owners
        self._planned: PlannedStep | None = None

    @classmethod
    def build(cls, spec: NodeResourceSpec, info: EngineResourceInfo) -> Self:
        assert isinstance(spec, SamplerSpec)
        return cls(spec, info)

    def ingest_request(self, request_id: int, row: int, config: ResourceReqConfig | None) -> None:
        """Takes a :class:`SamplingReqConfig` (None, whole or in a field: the defaults) for master row ``row``.

        A request that is already there takes new settings and keeps its draw count, and its history as far as the
        new settings go on with it.  Padding rows hold nothing.

        Raises:
            ValueError: a setting is outside its range, or more than the spec's capabilities allow.
            RuntimeError: the row lies beyond the ``MSTAR_SAMPLER_SLOTS`` rows there are.
        """
        if row >= self._capacity:
            return
        if row >= self._masters.num_rows:
            raise RuntimeError(f"master row {row} is beyond MSTAR_SAMPLER_SLOTS={self._masters.num_rows}")
        if config is None:
            config = SamplingReqConfig()
        assert isinstance(config, SamplingReqConfig)
        config.validate(self._spec)
        config, is_new = config.without_none(), self._row_of.get(request_id) != row
        self._settings.write(row, config)
        self._history.write(row, config)
        if is_new:
            self._row_of[request_id] = row
            self._new_rows.append(row)
            self._draws[row] = 0

    def remove_request(self, request_id: int, row: int) -> None:
        if self._row_of.pop(request_id, None) is not None:
            self._settings.clear(row)
            self._history.clear(row)

    def apply_cached_prefix(
        self, request_id: int, row: int, matched_len: int, matched_ids: np.ndarray | None = None
    ) -> None:
        """The presence penalty counts prompt ids that no step will bring."""
        if matched_ids is not None and request_id in self._row_of:
            self._history.meet_prompt(row, matched_ids)

    def offset_of(self, row: int) -> int:
        """Draws that the request on master row ``row`` has kept, those of launched steps included."""
        return int(self._draws[row])

    def plan(self, step: ResourceStep, ctx: StepContext) -> None:
        assert isinstance(step, SamplerStep)
        if ctx.is_preplan:  # draw state is that of the step still running: settings only
            self._settings.stage(ctx.rows, ctx.slot_lease)
            return
        lease = ctx.slot_lease
        if self._new_rows:
            self._masters.restart(self._new_rows, lease)
            self._new_rows.clear()
        if step.prefill_tracked_tokens and self._history.is_used:
            self._meet_prompts(step.prefill_tracked_tokens)
        settings = self._settings.gather(ctx.rows, lease)
        addressed, index = self._masters.target(ctx.rows, ctx.request_ids, step.kept_rids, lease)
        offset = tokens = None
        if not self._is_in_graph(ctx):
            offset = self._gathered(self._masters.offset, self._offsets, index, lease)
            if self.has_slot_masters:
                tokens = self._gathered(self._masters.last_token, self._tokens, index, lease)
        history = self._history.rows_of(addressed, lease, ctx.capture) if step.looks_back else None
        self._planned = PlannedStep(
            settings,
            addressed,
            index,
            offset,
            tokens,
            history,
            step.apply_penalty,
            step.apply_filters,
            lease,
            is_capture=ctx.capture,
        )

    def promote_preplan(self, step: ResourceStep, ctx: StepContext) -> None:
        self.plan(step, ctx)  # finds the settings staged, unless one has moved since

    def clear_preplan(self) -> None:
        """Staged settings are named by their rows and version: whoever comes next recognises what it can use."""

    def loopback_tokens(self) -> torch.Tensor:
        """Each row's last sampled token in planned order, int64 [padded bs]; valid until :meth:`sample`.

        Raises:
            RuntimeError: the sampler keeps no last tokens (``MSTAR_DEVICE_LOOPBACK=0``), or nothing is planned.
        """
        planned = self._planned
        if planned is None or not self.has_slot_masters:
            raise RuntimeError("the sampler keeps no last tokens: MSTAR_DEVICE_LOOPBACK is 0 or no step is planned")
        if not planned.is_capture:
            self.counters["loopback_steps"] += 1
        if planned.tokens is None:
            planned.tokens = self._last_tokens(planned)
        return planned.tokens

    def last_tokens_in_graph(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """For a leased step's forward, until :meth:`sample`: the last token of every master row int64 [N], and each
        row's place there int64 [padded bs], as :func:`mstar.kernels.embedding.embed_rows` takes them.  Both lie where
        every replay of the slot finds them.

        None for other steps and without ``MSTAR_INGRAPH_DECODE_TOKENS``: :meth:`loopback_tokens` serves those.
        """
        planned = self._planned
        if planned is None or planned.lease is None or not self._reads_in_graph:
            return None
        return self._masters.last_token, planned.index

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Draws one token per row of the padded batch from ``logits`` [bs, V]; int64 [bs].

        ``logits`` are the caller's to give away: they may be changed.  Every further call in a step draws at the
        next offset, from histories that hold the draws before it.

        Raises:
            ValueError: a row looks back, and the logits aren't the spec's ``vocab_size`` wide.
        """
        planned = self._planned
        assert planned is not None, "sample before plan"
        planned.draws += 1
        if planned.lease is not None:
            self._draws_per_replay[planned.lease.bucket] = planned.draws
        if self._device_sampler is None:
            return self._draw_on_host(planned, logits)
        return self._draw_on_device(planned, logits, self._device_sampler)

    def _draw_on_host(self, planned: PlannedStep, logits: torch.Tensor) -> torch.Tensor:
        masters, offset, history = self._masters, planned.offset, planned.history
        if offset is None:
            offset = masters.offset.index_select(0, planned.index)
        with strict_mode.opaque("sample"):
            if planned.offset is None and self._reads_in_graph and planned.tokens is None:
                planned.tokens = self._last_tokens(planned)
            if history is not None:
                logits = history.constrain(logits, offset, planned.apply_penalty)
            drawn, planned.faults = sample_rows(
                logits,
                RowSettings(**planned.settings, offset=offset),
                planned.apply_filters,
                is_constrained=planned.apply_penalty,
            )
            if history is not None:
                planned.overwritten += history.record(drawn, offset)
        offset.add_(1)
        if planned.offset is None:
            masters.scatter(planned.index, offset, drawn if self.has_slot_masters else None)
        elif planned.tokens is not None:
            planned.tokens.copy_(drawn)
        return drawn

    def _draw_on_device(self, planned: PlannedStep, logits: torch.Tensor, sampler: DeviceSampler) -> torch.Tensor:
        """A replay runs none of this Python: state moves through tensors alone, in the sampler's last kernel."""
        masters, history, offset, tokens = self._masters, planned.history, planned.offset, planned.tokens
        index = overwritten = None
        if offset is None:
            index, offset = planned.index, masters.offset
            overwritten = self._overwritten(planned) if planned.draws == 1 else None
            tokens = masters.last_token if self.has_slot_masters else None
        if history is not None:
            before = offset.clone() if index is None else offset.index_select(0, index)
            logits = history.constrain(logits, before, planned.apply_penalty)
        drawn, planned.faults = sampler(
            logits,
            RowSettings(**planned.settings, offset=offset),
            planned.apply_filters,
            is_constrained=planned.apply_penalty,
            index=index,
            advances=True,
            last_tokens=tokens,
            overwritten=overwritten,
        )
        if history is not None:
            planned.overwritten += history.record(drawn, before)
        return drawn

    def faults(self) -> torch.Tensor:
        """After :meth:`sample`: what is wrong with each row, int8 [bs].  Such rows were given token 0 and must end
        with an error.

        0: nothing.  1: its logits are not finite.  2: no token is left that the request's constraints allow, that
        is, every logit is -inf in a step with ``apply_penalty``, whose logits may have been edited; in another step
        they are the model's own, and that is a 1.
        """
        faults = None if self._planned is None else self._planned.faults
        assert faults is not None, "faults before sample"
        return faults

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        planned, self._planned = self._planned, None
        assert planned is not None, "commit before plan"
        draws = planned.draws
        if draws == 0 and planned.lease is not None:  # replayed on a device
            draws = self._draws_per_replay.get(planned.lease.bucket, 0)
        self._draws[planned.addressed] += draws
        if planned.offset is None:
            self.counters["ingraph_scatter_steps"] += 1
            return
        self.counters["host_scatter_steps"] += 1
        self._masters.scatter(planned.index, planned.offset, planned.tokens)

    def abandon(self, step: ResourceStep, ctx: StepContext) -> None:
        """Puts masters and histories back where the last commit left them, where the forward had moved them."""
        planned, self._planned = self._planned, None
        if planned is None:
            return
        for change in reversed(planned.overwritten):
            change.put_back()
        if planned.offset is None:
            before = torch.from_numpy(self._draws[planned.addressed]).to(self._masters.offset.device)
            tokens = self._overwritten(planned) if planned.tokens is None else planned.tokens
            self._masters.put_back(planned.index, before, tokens)

    def repeats_in_graph(self, step: ResourceStep, ctx: StepContext) -> bool:
        assert isinstance(step, SamplerStep)
        lease = ctx.slot_lease
        if lease is None or self._new_rows or not (self._scatters_in_graph and self._reads_in_graph):
            return False
        if step.looks_back and self._history.is_used:
            return False
        is_sent = self._masters.holds(ctx.rows, ctx.request_ids, step.kept_rids, lease)
        return is_sent and self._settings.holds(ctx.rows, lease)

    def build_accelerator_graph_buffers(self, buckets: Sequence[BucketKey], max_bs: int, max_seq_len: int) -> None:
        self._settings.reserve(max_bs)
        self._masters.reserve(max_bs)
        self._offsets.reserve(max_bs)
        self._tokens.reserve(max_bs)
        self._history.reserve(max_bs)

    def _meet_prompts(self, prompts: Mapping[Any, torch.Tensor]) -> None:
        for request_id, ids in prompts.items():
            row = self._row_of.get(request_id)
            if row is not None:
                self._history.meet_prompt(row, ids.numpy(force=True))

    def _is_in_graph(self, ctx: StepContext) -> bool:
        return self._scatters_in_graph and ctx.slot_lease is not None

    def _overwritten(self, planned: PlannedStep) -> torch.Tensor | None:
        """Where the first draw of a forward that reads last tokens itself keeps those that it writes over."""
        if not self._reads_in_graph or planned.lease is None or self._device_sampler is None:
            return None
        return self._tokens.view(planned.addressed.size, planned.lease)

    def _last_tokens(self, planned: PlannedStep) -> torch.Tensor:
        if self._host_tokens is None or planned.lease is None:
            return self._gathered(self._masters.last_token, self._tokens, planned.index, planned.lease)
        view = self._tokens.static(planned.addressed.size, planned.lease)
        self._host_tokens.take(planned.addressed, out=view.host, mode="clip")  # a quarter of torch's time
        return view.device

    @staticmethod
    def _gathered(
        master: torch.Tensor, buffer: StepBuffer, index: torch.Tensor, lease: SlotLease | None
    ) -> torch.Tensor:
        return torch.index_select(master, 0, index, out=buffer.view(index.numel(), lease))
