"""An engine that keeps rows, pages and time, and computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mstar.engine.batch import Batch, StepResult
from mstar.engine.in_flight import InFlight
from mstar.engine.inputs import RequestInfo
from mstar.engine.phase_clock import NO_CLOCK, PhaseClock
from mstar.engine.requests import RequestTable
from mstar.engine.resources.kv.config import KVStep
from mstar.engine.resources.kv.manager import PagedKVManager
from mstar.engine.resources.spec import ResourceReqConfig
from mstar.engine.resources.step import StepContext
from mstar.model.text_llm import DECODE, MIXED, NODE, PREFILL
from mstar.simulate.clock import VirtualClock
from mstar.simulate.composition import Composition, StepRows, rows_of
from mstar.simulate.cost_model import CostModel
from mstar.simulate.host_costs import HostCosts, HostStep
from mstar.simulate.tokens import EOS, stream_tokens
from mstar.simulate.trace import Trace

KV = "kv_cache"
MOST_KEPT = 8  # batches whose rows are known: those without a prompt recur


@dataclass(frozen=True)
class StepBounds:
    """What the steps of an engine hold: ``max_rows`` by walk; ``packed_sizes``: tokens of captured steps with prompts.

    ``queues_steps``: a decode step needs nothing of the host, so further ones may be launched behind it.
    """

    max_rows: Mapping[str, int]
    packed_sizes: tuple[int, ...]
    queues_steps: bool


@dataclass
class VirtualStep(InFlight):
    """A step on the virtual device, which is done at ``ready_ns``."""

    ready_ns: int = 0


@dataclass(frozen=True)
class _Rows:
    """A batch's rows, and the context in which the cache sees them."""

    rows: np.ndarray
    step_rows: StepRows
    context: StepContext


class VirtualEngine:
    """What a conductor asks of an engine, over the real page cache and a virtual clock.

    Pages, promises and shared prefixes are those of :class:`PagedKVManager` itself, whose arrays of keys and values
    have one number a token here; only its index arrays for kernels are not made.  Tokens come from the trace: a
    request's answer is its stream's next ones, then the end-of-sequence id.

    ``ticket_of``: whoever submits a request writes its ticket here, by the conductor's id.  ``on_step`` is told of each
    step that runs: its composition, and the nanoseconds it takes.
    """

    clock: PhaseClock = NO_CLOCK

    def __init__(
        self,
        kv: PagedKVManager,
        capacity: int,
        bounds: StepBounds,
        costs: CostModel,
        host: HostCosts,
        time: VirtualClock,
        trace: Trace,
    ) -> None:
        self.resources: dict[str, PagedKVManager] = {KV: kv}
        self.capacity = capacity
        self.ticket_of: dict[int, int] = {}
        self.on_step: Callable[[Composition, int], None] = lambda composition, nanoseconds: None
        self._kv = kv
        self._bounds = bounds
        self._costs = costs
        self._host = host
        self._time = time
        self._trace = trace
        self._requests = RequestTable(capacity, self.resources)
        self._stream = np.zeros(capacity, np.int64)  # by master row, as the next
        self._end_at = np.zeros(capacity, np.int64)  # tokens in the stream when its answer is complete
        self._step = KVStep()
        self._kept: dict[Batch, _Rows] = {}
        self._last_batch: Batch | None = None
        self._uses = 0  # steps in a row that had the last batch, less one

    # Requests.

    def ingest(self, info: RequestInfo) -> None:
        self._requests.ingest(info)

    def remove(self, request_id: int) -> None:
        self._requests.remove(request_id)
        self.ticket_of.pop(request_id, None)

    def release(self, info: RequestInfo) -> None:
        self._requests.release(info)

    def offload(self, info: RequestInfo) -> bool:
        return self._requests.offload(info)

    def reload(self, info: RequestInfo) -> bool:
        return self._requests.reload(info)

    def resume(
        self,
        info: RequestInfo,
        prompt_ids: np.ndarray,
        configs: Mapping[str, ResourceReqConfig],
        has_generated: bool,
    ) -> None:
        self._requests.resume(info, prompt_ids, configs, has_generated)

    def prepare_request(self, configs: Mapping[str, ResourceReqConfig]) -> None:
        """No request of a trace needs it."""

    def extend_prefix_chains(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        self._kv.extend_prefix_chains(rows, tokens)

    def accept_tokens(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray | None:
        """No request has a grammar."""
        return None

    def reason_of(self, row: int) -> str:
        return ""

    # What the conductor asks about nodes.

    def max_batch_size(self, node: str, graph_walk: str) -> int | None:
        return self._bounds.max_rows[graph_walk]

    def packed_sizes(self, node: str, graph_walk: str) -> Sequence[int]:
        return () if graph_walk == DECODE else self._bounds.packed_sizes

    def splits_prompts(self, node: str) -> bool:
        return True

    def combined_graph_walks(self) -> Mapping[str, Mapping[str, Sequence[str]]]:
        return {NODE: {MIXED: (DECODE, PREFILL)}}

    # Steps.

    def launch(self, batch: Batch) -> InFlight:
        """Commits the step at once and queues its time on the device, as the real engine does."""
        known = self._kept.get(batch) or self._look_up(batch)
        stored = self._kv.stored_len[known.rows]
        spans, num_prompts = known.step_rows.spans, known.step_rows.num_prompts
        outcome = self._kv.admit(self._step, known.context)
        if not (outcome.ok and outcome.ready):
            return InFlight(batch, refused=outcome, failed_resource=KV)
        self._kv.commit(self._step, known.context)
        self._uses = self._uses + 1 if batch is self._last_batch else 0
        self._time.spend(int(1e3 * self._host.of(HostStep(spans.size, num_prompts, self._uses))))
        composition = StepRows(spans, stored, num_prompts).compose()
        nanoseconds = int(1e6 * self._costs.step_ms(composition))
        self.on_step(composition, nanoseconds)
        step = VirtualStep(batch, batch.request_ids, ready_ns=self._time.run_on_device(nanoseconds))
        tokens = self._tokens(known.rows, stored + spans)
        step._result = StepResult(batch.request_ids, host={"new_token": tokens})
        self._last_batch = batch
        return step

    def collect(self, in_flight: InFlight) -> StepResult:
        assert isinstance(in_flight, VirtualStep), "a step that was refused brings nothing"
        self._time.wait_until(in_flight.ready_ns)
        return in_flight.result()

    def can_queue(self, batch: Batch) -> bool:
        return self._bounds.queues_steps and batch.graph_walk == DECODE and batch is self._last_batch

    def pre_plan(self, batch: Batch) -> None:
        """There is nothing to plan."""

    def _look_up(self, batch: Batch) -> _Rows:
        rows = np.array([info.row for info in batch.infos], np.int64)
        step_rows = rows_of(batch, self._kv.stored_len[rows])
        for i in range(rows.size - step_rows.num_prompts, rows.size):
            ticket = self.ticket_of[batch.request_ids[i]]
            self._stream[rows[i]] = self._trace.streams[ticket]
            self._end_at[rows[i]] = self._trace.prompt_tokens[ticket] + self._trace.output_tokens[ticket]
        context = StepContext(batch.graph_walk, batch.request_ids, rows, step_rows.spans)
        known = _Rows(rows, step_rows, context)
        if not step_rows.num_prompts:
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[batch] = known
        return known

    def _tokens(self, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """What rows draw whose streams hold ``lengths`` int64 [n] tokens, int64 [n]."""
        tokens = stream_tokens(self._stream[rows], lengths)
        tokens[lengths >= self._end_at[rows]] = EOS
        return tokens
