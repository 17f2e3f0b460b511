"""A real conductor over a virtual engine, put together from an engine's options and measured steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from mstar.conductor.conductor import Conductor
from mstar.engine.accelerator_graph_config import AcceleratorGraphConfig, PackedAcceleratorGraphConfig
from mstar.engine.resources.base import EngineResourceInfo
from mstar.engine.resources.kv.config import NUM_RESERVED_PAGES, PagedKVConfig, PagedKVSpec
from mstar.engine.resources.kv.manager import PagedKVManager
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.graph import Walk
from mstar.model.captures import text_graph_configs
from mstar.model.registry import host_pages_within, pages_within, text_walks
from mstar.model.text_llm import DECODE, MIXED, NODE, PREFILL
from mstar.runtime.core import limits_of, with_overrides
from mstar.runtime.options import EngineOptions
from mstar.simulate.buckets import Buckets
from mstar.simulate.clock import VirtualClock
from mstar.simulate.engine import KV, StepBounds, VirtualEngine
from mstar.simulate.measured import MeasuredSteps
from mstar.simulate.summary import Played
from mstar.simulate.tokens import EOS, VOCABULARY
from mstar.simulate.trace import Trace

_AFTER: dict[str | None, str | None] = {None: PREFILL, PREFILL: DECODE, DECODE: None}


@dataclass(frozen=True)
class VirtualModel:
    """A text model as the conductor sees it."""

    walks: Sequence[Walk]
    resource_specs: Sequence[NodeResourceSpec]
    eos_ids: Iterable[int] = (EOS,)

    def next_walk(self, finished: str | None) -> str | None:
        return _AFTER[finished]


@dataclass(frozen=True)
class Rig:
    """What a simulation runs, for one trace."""

    conductor: Conductor
    model: VirtualModel
    engine: VirtualEngine
    clock: VirtualClock
    trace: Trace
    request_ns: int  # that the host spends on taking a request in

    def played(self) -> Played:
        """After the simulation."""
        conductor = self.conductor
        return Played(self.trace, conductor.counters, conductor.max_running_requests, self.clock.busy_ns)


def build_rig(options: EngineOptions, measured: MeasuredSteps, trace: Trace) -> Rig:
    """Puts the parts together as :class:`mstar.runtime.core.EngineCore` does.

    Args:
        options: those of scheduling and of the cache are heeded; the model is ``measured``'s.

    Raises:
        LoadError: an option does not go with the others, or the cache has no room for a page.
    """
    context = options.max_seq_len or measured.max_seq_len
    specs = with_overrides([PagedKVSpec(KV, {NODE}, _cache(options, measured, context, trace))], options.resources)
    spec = specs[0]
    assert isinstance(spec, PagedKVSpec)
    max_rows = options.max_running_requests
    cpu = torch.device("cpu")
    kv = PagedKVManager(spec.config, EngineResourceInfo(cpu, torch.float32, torch.float32, max_rows, padding_rows=0))
    clock = VirtualClock()
    device = torch.device(measured.device)
    bounds = step_bounds(options, device, context)
    costs = replace(measured.cost_model(), buckets=buckets_of(options, device, context))
    engine = VirtualEngine(kv, max_rows, bounds, costs, measured.host, clock, trace)
    limits = limits_of(options, context, VOCABULARY, device)
    model = VirtualModel(text_walks(context), specs)
    conductor = Conductor(engine, model, limits, clock=clock)
    return Rig(conductor, model, engine, clock, trace, int(1e3 * measured.host.request_us))


def step_bounds(options: EngineOptions, device: torch.device, context: int) -> StepBounds:
    """What captured steps of a text model hold under these options, on a device of this kind."""
    max_rows, captured = options.max_running_requests, _captured(options, device, context)
    of_prompts = min(captured.packed_rows[-1], max_rows)
    rows = {DECODE: min(captured.decode_rows[-1], max_rows), PREFILL: of_prompts, MIXED: of_prompts}
    return StepBounds(rows, captured.packed_tokens, queues_steps=device.type != "cpu")


def buckets_of(options: EngineOptions, device: torch.device, context: int) -> Buckets:
    """To which sizes an engine with these options pads its steps: on a CPU, packed ones to none."""
    captured = _captured(options, device, context)
    return Buckets(captured.decode_rows) if device.type == "cpu" else captured


def _captured(options: EngineOptions, device: torch.device, context: int) -> Buckets:
    """Sizes of captured steps."""
    max_rows = options.max_running_requests
    max_tokens = min(options.max_batch_tokens, max_rows * context)
    configs = text_graph_configs(device, max_rows, max_tokens, options.capture_batch_sizes)
    packed = [config for config in configs if isinstance(config, PackedAcceleratorGraphConfig)]
    batched = [config for config in configs if not isinstance(config, PackedAcceleratorGraphConfig)]
    lengths = {length for config in packed for length in config.capture_token_lengths}
    return Buckets(_rows(batched, max_rows), _rows(packed, max_rows), tuple(sorted(lengths)))


def _rows(configs: Sequence[AcceleratorGraphConfig], max_rows: int) -> tuple[int, ...]:
    return tuple(sorted({size for config in configs for size in config.capture_batch_sizes or [max_rows]}))


def _cache(options: EngineOptions, measured: MeasuredSteps, context: int, trace: Trace) -> PagedKVConfig:
    """The model's cache with as many pages as it would have, of one number a token.

    Without a prefix index where nobody would find anything in it: pages that it alone holds count as free, so nothing
    else depends on it, and a quarter of the simulation's time is spent on it.
    """
    size = options.page_size
    page_bytes = size * measured.kv_token_bytes
    useful = -(-context // size) * options.max_running_requests + NUM_RESERVED_PAGES
    pages = pages_within(options.kv_memory_bytes or measured.kv_memory_bytes, page_bytes, useful)
    return PagedKVConfig(
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        max_seq_len=context,
        max_num_pages=pages,
        page_size=size,
        prefix_cache=options.prefix_cache and trace.shares_streams,
        admission_fit="sum" if options.admission_policy == "reserve" else "none",
        cpu_offload_pages=host_pages_within(options.kv_host_memory_bytes, page_bytes, useful - NUM_RESERVED_PAGES),
    )
