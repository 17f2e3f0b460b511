"""A model, its engine and its conductor in this process."""

from __future__ import annotations

import dataclasses
import json
import logging
import time

import torch

from mstar.conductor.conductor import Conductor
from mstar.conductor.queue import Limits
from mstar.conductor.report import StepReport
from mstar.conductor.request import EngineRequest
from mstar.engine.engine import Engine
from mstar.engine.phase_clock import PhaseClock
from mstar.engine.resources.kv.offload import NoHostMemory
from mstar.engine.resources.spec import NodeResourceSpec, apply_overrides
from mstar.model.options import ModelLoadOptions
from mstar.model.registry import EngineModel, load_model
from mstar.runtime.messages import Welcome
from mstar.runtime.options import EngineOptions
from mstar.utils import knobs
from mstar.utils.errors import LoadError, shorten

log = logging.getLogger(__name__)

# What a loop around a core takes in between two steps.  A request costs tens of microseconds: a flood of them must not
# stop the rows that run, and the first ones' prompts can be computed while the next come in.
MESSAGES_PER_STEP = 64


class EngineCore:
    """Loads a model and runs requests through it, a step at a time.  One thread uses it.

    Raises:
        LoadError: the model cannot be loaded; names the option, file or tensor.
    """

    def __init__(self, options: EngineOptions, clock: PhaseClock | None = None) -> None:
        """``clock`` is told where the time of a step goes."""
        started = time.monotonic()
        self.options = options
        if options.num_threads:
            torch.set_num_threads(options.num_threads)
        device = _device(options.device)
        try:
            knobs.check_all()
            self.model = self._load(device)
            self.engine, self.conductor = self._build(device, clock)
        except ValueError as error:  # an environment variable, or settings that do not go together
            raise LoadError(str(error)) from error
        except NoHostMemory as error:
            raise LoadError(f"kv_host_memory_bytes: memory that the host has free, got {error}") from error
        self.info = Welcome(
            model=self.model.name,
            vocab_size=self.model.vocab_size,
            max_seq_len=self.model.max_seq_len,
            max_running_requests=self.conductor.max_running_requests,
            max_queued_requests=options.max_queued_requests,
            max_queued_tokens=options.max_queued_tokens,
            num_parameters=self.model.num_parameters,
            weight_bytes=self.model.weight_bytes,
            device=str(device),
            dtype=str(self.model.dtype).removeprefix("torch."),
            load_seconds=time.monotonic() - started,
        )
        log.info("loaded %s", self.info)

    def _load(self, device: torch.device) -> EngineModel:
        options = self.options
        model = load_model(
            options.model,
            device=device,
            dtype=dtype_of(options.dtype),
            options=load_options(options),
        )
        return dataclasses.replace(model, resource_specs=with_overrides(model.resource_specs, options.resources))

    def _build(self, device: torch.device, clock: PhaseClock | None) -> tuple[Engine, Conductor]:
        options = self.options
        engine = Engine(
            self.model.submodules,
            self.model.resource_specs,
            device=device,
            dtype=self.model.dtype,
            kv_dtype=self.model.kv_dtype,
            capacity=options.max_running_requests,
            clock=clock,
        )
        engine.warm_up()
        limits = limits_of(options, self.model.max_seq_len, self.model.vocab_size, device)
        return engine, Conductor(engine, self.model, limits)

    def submit(self, request: EngineRequest, client: int = 0, ticket: int = -1) -> int:
        """See :meth:`Conductor.submit`."""
        return self.conductor.submit(request, client, ticket)

    def check(self, request: EngineRequest) -> None:
        """See :meth:`Conductor.check`."""
        self.conductor.check(request)

    def cancel(self, request_id: int) -> None:
        """See :meth:`Conductor.cancel`."""
        self.conductor.cancel(request_id)

    def finish(self, request_id: int, kept_tokens: int) -> None:
        """See :meth:`Conductor.finish`."""
        self.conductor.finish(request_id, kept_tokens)

    def has_work(self) -> bool:
        """Whether :meth:`step` would do or report anything."""
        return self.conductor.has_work()

    def step(self) -> StepReport:
        """See :meth:`Conductor.step`."""
        return self.conductor.step()


def limits_of(options: EngineOptions, max_seq_len: int, vocab_size: int, device: torch.device) -> Limits:
    """What of an engine's options concerns the conductor; the rest is the model's and the device's."""
    return Limits(
        max_running_requests=options.max_running_requests,
        max_queued_requests=options.max_queued_requests,
        max_queued_tokens=options.max_queued_tokens,
        max_queued_requests_per_tenant=options.max_queued_requests_per_tenant,
        max_batch_tokens=options.max_batch_tokens,
        max_seq_len=max_seq_len,
        vocab_size=vocab_size,
        run_ahead=_run_ahead(options.run_ahead, device),
        max_steps_ahead=options.max_steps_ahead,
        mixed_steps=options.mixed_steps,
        chunked_prefill=options.chunked_prefill,
        target_inter_token_ns=round(options.target_inter_token_ms * 1e6),
        priority_ageing_s=options.priority_ageing_s,
        output_token_weight=options.output_token_weight,
        prefix_passes=options.prefix_passes if options.prefix_cache else 0,
        preemption=options.preemption,
    )


def load_options(options: EngineOptions) -> ModelLoadOptions:
    """What of an engine's options concerns the model."""
    return ModelLoadOptions(
        max_seq_len=options.max_seq_len,
        kv_memory_bytes=options.kv_memory_bytes,
        kv_host_memory_bytes=options.kv_host_memory_bytes,
        reserves_pages=options.admission_policy == "reserve",
        kv_dtype=dtype_of(options.kv_dtype),
        page_size=options.page_size,
        max_running_requests=options.max_running_requests,
        max_batch_tokens=options.max_batch_tokens,
        capture_batch_sizes=options.capture_batch_sizes,
        keep_blocks=options.quantised_weights == "auto",
        load_format=options.load_format,
        prefix_cache=options.prefix_cache,
        deterministic=options.deterministic,
    )


def with_overrides(specs: list[NodeResourceSpec], text: str | None) -> list[NodeResourceSpec]:
    """``specs`` with the settings of option ``resources``.  LoadError for what is wrong with them."""
    if text is None:
        return specs
    try:
        block = json.loads(text)
    except json.JSONDecodeError as error:
        raise LoadError(f"option resources: not JSON: {error}") from None
    if not isinstance(block, dict) or not all(isinstance(settings, dict) for settings in block.values()):
        raise LoadError(f"option resources: a JSON object of objects, by resource, got {shorten(text)}")
    try:
        return apply_overrides(specs, block)
    except ValueError as error:
        raise LoadError(f"option resources: {error}") from None


def _device(name: str) -> torch.device:
    """The device that option ``device`` names, with its index: threads have current devices of their own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise LoadError(f"option device: auto, cpu or cuda:N, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise LoadError(f"option device: {name} asked for, but torch finds no GPU")
    if device.type not in ("cpu", "cuda"):
        raise LoadError(f"option device: auto, cpu or cuda:N, got {name!r}")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _run_ahead(choice: str, device: torch.device) -> bool:
    """A CPU computes on the cores that the host's work needs: there, nothing would run beside it."""
    return device.type != "cpu" if choice == "auto" else choice == "on"


def dtype_of(name: str) -> torch.dtype | None:
    """The dtype that an option names; None for auto."""
    return None if name == "auto" else getattr(torch, name)
