"""Steps over batches of rows: declare, admit, plan, preprocess, forward, commit, outputs; launched, then collected."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import torch

from mstar.engine.accelerator_graph_backend import CpuGraphBackend, EagerBackend, GraphBackend
from mstar.engine.accelerator_graph_runner import AcceleratorGraphRunner
from mstar.engine.batch import Batch, StepResult
from mstar.engine.cuda_graph_backend import CudaGraphBackend
from mstar.engine.executor import StepExecutor
from mstar.engine.graph_warm_up import capture_graphs
from mstar.engine.in_flight import InFlight
from mstar.engine.inputs import RequestInfo
from mstar.engine.kept_tokens import KeptTokens
from mstar.engine.launcher import Launcher
from mstar.engine.node import EngineNode
from mstar.engine.node_questions import NodeQuestions
from mstar.engine.padding import PaddingRows
from mstar.engine.phase_clock import NO_CLOCK, PhaseClock
from mstar.engine.piecewise_graph_runner import build_region_runners
from mstar.engine.pre_plan import PrePlanner
from mstar.engine.requests import RequestTable
from mstar.engine.resources.base import EngineResourceInfo, Resource
from mstar.engine.resources.runner import StepRunner, build_resources
from mstar.engine.resources.spec import NodeResourceSpec, ResourceReqConfig
from mstar.engine.submodule import NodeSubmodule
from mstar.utils import knobs

log = logging.getLogger(__name__)

__all__ = ["Batch", "Engine", "InFlight", "StepResult"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _in_inference_mode(method: _Method) -> _Method:
    """:func:`torch.inference_mode` at a third of its price: one guard per engine, entered unless it is on already."""

    @wraps(method)
    def guarded(self: Engine, *args: Any, **kwargs: Any) -> Any:
        if torch.is_inference_mode_enabled():
            return method(self, *args, **kwargs)
        with self._inference_mode:
            return method(self, *args, **kwargs)

    return guarded  # type: ignore[return-value]


class Engine(NodeQuestions):
    """Runs steps of (node, walk) over the requests it was given.

    One thread calls it.  ``resources`` hold all per-request state; a request's master row is its index into them.

    A step is launched (:meth:`launch`) and its host values collected later (:meth:`collect`); a launched step has
    committed, so the next one may be launched or planned ahead (:meth:`pre_plan`) before the first is collected.  A
    slot that recurs is waited for, so with two slots two steps of a node are in flight, or more where they leave the
    slots' buffers as they are (:meth:`can_queue`).

    ``steps`` counts steps by (node, walk), ``eager_steps`` those that no captured bucket served by
    (node, walk, reason); ``counters``: ``staged``, ``promoted`` and ``cleared`` plans, ``retried_steps``, and
    ``host_loopback_rows``, whose token the engine itself kept for their next step.
    """

    def __init__(
        self,
        submodules: Mapping[str, NodeSubmodule],
        specs: Sequence[NodeResourceSpec],
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        capacity: int,
        backend: GraphBackend | None = None,
        num_slots: int | None = None,
        clock: PhaseClock | None = None,
    ) -> None:
        """``capacity``: most requests at one time; a resource may have room for fewer.  ``backend`` None chooses by
        device.  ``num_slots`` None is MSTAR_NUM_SLOTS; resources that stage through reused buffers get two at
        least.  MSTAR_PRE_PLAN_SPEC is read here.

        Raises:
            ValueError: a spec is declared twice, depends on what is missing, names an unknown node, or plans ahead
                over one that does not; or two graph configurations capture one bucket.
        """
        self.device = torch.device(device)
        self._inference_mode = torch.inference_mode()
        self.capacity = min([capacity, *(n for spec in specs if (n := spec.max_requests()) is not None)])
        self.steps: Counter[tuple[str, str]] = Counter()
        self.eager_steps: Counter[tuple[str, str, str]] = Counter()
        self.counters: Counter[str] = Counter()
        backend = backend or _backend_for(self.device)
        for spec in specs:
            for name in sorted(spec.nodes - submodules.keys()):
                raise ValueError(f"resource {spec.resource_key!r} names node {name!r}, which the model does not have")
        num_slots = _double_buffered(knobs.num_slots() if num_slots is None else num_slots, specs)
        padding = PaddingRows(self.capacity)
        runners = {
            name: AcceleratorGraphRunner(
                name,
                submodule,
                submodule.get_accelerator_graph_configs(self.device),
                backend,
                num_slots,
                padding,
                self.device,
            )
            for name, submodule in submodules.items()
        }
        regions = {
            name: build_region_runners(name, submodule, backend, num_slots, padding, self.device, self._rows_of)
            for name, submodule in submodules.items()
        }
        info = EngineResourceInfo(self.device, dtype, kv_dtype, self.capacity, padding.total, num_slots)
        self.resources: dict[str, Resource] = build_resources(specs, info)
        self._nodes = {
            name: EngineNode(
                name,
                submodule,
                runners[name],
                {s.resource_key: self.resources[s.resource_key] for s in specs if name in s.nodes},
                num_slots,
                np.ones(self.capacity, bool),
                regions[name],
            )
            for name, submodule in submodules.items()
        }
        self._backend = backend
        self._dropped = dict.fromkeys(submodules, 0)
        self._requests = RequestTable(self.capacity, self.resources, self._forget)
        self.clock = clock or NO_CLOCK
        self._step_runner = StepRunner(self.resources, specs)
        self._planner = PrePlanner(self._step_runner, self.device, self.counters, threaded=knobs.pre_plan_spec())
        self._kept_tokens = KeptTokens(self.resources.values(), self._planner.settle)
        self._executor = StepExecutor(self._step_runner, backend, self.device, self.clock, self.counters)
        self._launcher = Launcher(
            self._nodes,
            self._requests,
            self._executor,
            self._planner,
            self.steps,
            self.eager_steps,
        )

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Sizes the static buffers of every node, then captures or registers the buckets of each.

        Raises:
            RuntimeError: warm-up left state in a resource, or a bucket was dropped and
                MSTAR_REQUIRE_ACCELERATOR_GRAPHS is set.
        """
        self._planner.clear()
        for node in self._nodes.values():  # all before any capture: a later growth would move a recorded buffer
            for captures in node.captures:
                captures.prepare_for_capture(node.resources, self._step_runner)
        capture_graphs([captures for node in self._nodes.values() for captures in node.captures], self._backend)
        for node in self._nodes.values():
            self._dropped[node.name] = sum(len(captures.dropped_buckets) for captures in node.captures)
            node.regions = {label: region for label, region in node.regions.items() if region.has_graphs}
            node.prepared.clear()  # prepared before there were buckets
        for resource in self.resources.values():
            resource.post_warmup_validate()

    @property
    def device_failure(self) -> str | None:
        """Why the device can run nothing more, in its own words; None as long as no step has shown that.  Every step
        fails from then on, and its rows run no second time: only a new process helps."""
        return self._executor.device_failure

    # Requests.

    @_in_inference_mode
    def ingest(self, info: RequestInfo) -> None:
        """Takes a request: gives it a master row (``info.row``), its state in every resource, and the prefix of its
        prompt that is cached (``info.cached_tokens``); its first step begins behind that.

        Idempotent.  What a resource raises leaves nothing behind.

        Raises:
            ValueError: the id is negative (those belong to padding), or a resource refuses its parameters.
            Unavailable: all ``capacity`` rows are taken.
        """
        self._planner.settle()
        self._requests.ingest(info)
        self._note_captures(info)

    @_in_inference_mode
    def remove(self, request_id: int) -> None:
        """Frees a request's row and all its state; unknown ids are no error, and nothing is freed on a device that has
        failed."""
        if self.device_failure is not None:
            return
        staged = self._planner.prepared
        if staged is not None and request_id in staged.request_ids:
            self._planner.clear()  # before its row and pages go to another request
        self._requests.remove(request_id)

    @_in_inference_mode
    def release(self, info: RequestInfo) -> None:
        """Frees the pages of a request that no step in flight has; it keeps its row until :meth:`resume`."""
        self._drop_plans()
        self._requests.release(info)

    @_in_inference_mode
    def offload(self, info: RequestInfo) -> bool:
        """Moves the pages of a request that no step in flight has to the host; False, and no effect, where a resource
        has no room there."""
        self._drop_plans()
        return self._requests.offload(info)

    @_in_inference_mode
    def reload(self, info: RequestInfo) -> bool:
        """The inverse; False, and no effect, where there is no room now."""
        self._planner.settle()
        return self._requests.reload(info)

    @_in_inference_mode
    def resume(
        self,
        info: RequestInfo,
        prompt_ids: np.ndarray,
        configs: Mapping[str, ResourceReqConfig],
        has_generated: bool,
    ) -> None:
        """A released request comes back: ``prompt_ids`` int64 [tokens] are all tokens it has, to be run as a prompt
        behind ``info.cached_tokens``; their last draw is its next token.  ``has_generated``: some of them are drawn.

        Raises:
            ValueError: a resource refuses; the request is released still.
        """
        self._planner.settle()
        self._requests.resume(info, prompt_ids, configs, has_generated)
        self._note_captures(info)

    def _note_captures(self, info: RequestInfo) -> None:
        for node in self._nodes.values():
            node.chooses_capture[info.row] = node.submodule.chooses_capture(info)

    def _drop_plans(self) -> None:
        """Nothing prepared or planned of any row holds any more."""
        self._planner.clear()
        for node in self._nodes.values():
            node.prepared.clear()

    def _forget(self, request_id: int) -> None:
        for node in self._nodes.values():
            node.submodule.cleanup_request(request_id)
            node.prepared.clear()  # its row may go to another request
            if node.kept is not None:
                node.kept.forget(request_id)

    def extend_prefix_chains(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Sampled tokens int64 [n] that were kept by the requests on master rows ``rows`` int64 [n]."""
        self._kept_tokens.extend_prefix_chains(rows, tokens)

    def accept_tokens(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray | None:
        """As :meth:`mstar.engine.kept_tokens.KeptTokens.accept`."""
        return self._kept_tokens.accept(rows, tokens)

    def reason_of(self, row: int) -> str:
        """As :meth:`mstar.engine.kept_tokens.KeptTokens.reason_of`."""
        return self._kept_tokens.reason_of(row)

    def prepare_request(self, configs: Mapping[str, ResourceReqConfig]) -> None:
        """Does the slow work on a request's configs; called on any thread, before :meth:`ingest`.

        Raises:
            ValueError: a resource cannot honour its config.
        """
        for key, config in configs.items():
            if config.needs_preparation:
                self.resources[key].prepare_request(config)

    def _rows_of(self, request_ids: Sequence[int]) -> np.ndarray:
        return self._requests.rows_of(request_ids)

    # Steps.

    def exec(self, batch: Batch) -> StepResult:
        """One step, launched and collected.  KeyError as :meth:`launch`."""
        return self.collect(self.launch(batch))

    @_in_inference_mode
    def launch(self, batch: Batch) -> InFlight:
        """Submits one step over the batch's rows, in its order, and commits it.

        A row whose inputs or ``postprocess`` fail is left out and named in ``errors``.  An admission that is refused
        (or not ready) runs nothing and is reported.  When plan or forward of several rows raise, nothing was committed
        and the rows run once more, one by one and eager; those that fail again are named in ``errors``.  Whatever
        happens, the engine stays usable, unless the device has failed (:attr:`device_failure`).

        Raises:
            KeyError: an unknown node, or a row that was not ingested.
        """
        self._planner.settle()
        return self._launcher.launch(batch)

    def can_queue(self, batch: Batch) -> bool:
        """Whether a further step of this batch, whose last launch was of the same rows, needs nothing of the host: it
        may be launched however many are in flight."""
        return self._launcher.can_queue(batch)

    def collect(self, in_flight: InFlight) -> StepResult:
        """Waits for a launched step's host values, padding cut off.  Asked again, it answers the same.

        An error that the device reports only now fails all rows of the step.
        """
        self._planner.settle()
        result = in_flight.result()
        if result.errors is not in_flight.errors:  # the device had more to say
            self._executor.has_device_failed()
        self.clock.mark("collect")
        return result

    @_in_inference_mode
    def pre_plan(self, batch: Batch) -> None:
        """Admits and plans a batch for its node's next slot, while launched steps still run.

        The next launch takes the plan over when it is of the very same step, else undoes it.  Nothing is staged when
        some row has no inputs yet, the step would run eager, or a resource refuses.  With MSTAR_PRE_PLAN_SPEC it
        happens on a thread; every other call of the engine waits for it.

        Raises:
            KeyError: an unknown node, or a row that was not ingested.
        """
        self._planner.clear()
        self._launcher.pre_plan(batch)


def _backend_for(device: torch.device) -> GraphBackend:
    if device.type == "cpu":
        return CpuGraphBackend()
    return CudaGraphBackend(device) if device.type == "cuda" else EagerBackend()


def _double_buffered(num_slots: int, specs: Sequence[NodeResourceSpec]) -> int:
    """At least two slots where a resource rewrites buffers that a step in flight may still be read from."""
    needing = [spec.resource_key for spec in specs if spec.resource_class.force_double_buffer]
    if num_slots < 2 and needing:
        log.warning("MSTAR_NUM_SLOTS=%d: raised to 2, %s needs double buffers", num_slots, ", ".join(needing))
        return 2
    return num_slots
