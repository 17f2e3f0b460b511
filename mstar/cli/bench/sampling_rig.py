"""The resources behind a text model's head by themselves: random logits in, tokens out, as a decode step does it."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import torch

from mstar.cli.bench.stub_model import stub_vocabulary
from mstar.engine.resources.base import EngineResourceInfo
from mstar.engine.resources.runner import StepRunner, build_resources
from mstar.engine.resources.sampler.config import SamplerStep
from mstar.engine.resources.spec import ResourceReqConfig
from mstar.engine.resources.step import BucketKey, SlotLease, StepContext, SubmoduleStep
from mstar.model.text_sampling import FULL, NEW_TOKEN, sample, sampling_specs, sampling_steps

NODE, WALK, NUM_SLOTS = "LLM", "decode", 2


class SamplingRig:
    """``rows`` requests over ``vocab_size`` logits; token 0 ends a text."""

    def __init__(self, rows: int, vocab_size: int) -> None:
        device = torch.device("cpu")
        specs = sampling_specs({NODE}, vocab_size, (0,), lambda: stub_vocabulary(vocab_size))
        info = EngineResourceInfo(device, torch.float32, torch.float32, rows, 0, NUM_SLOTS)
        self.resources = build_resources(specs, info)
        for resource in self.resources.values():
            resource.build_accelerator_graph_buffers([BucketKey(WALK, rows, rows)], rows, rows)
        self._runner = StepRunner(self.resources, specs)
        self._rows = np.arange(rows)
        self._spans = np.ones(rows, np.int64)
        self._ids = tuple(range(rows))
        self._logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 4
        self._fresh = torch.empty_like(self._logits)
        self._steps = {
            variant: SubmoduleStep(steps=sampling_steps(SamplerStep(), variant), cg_key_info=variant)
            for variant in (None, FULL)
        }

    @torch.inference_mode()
    def step_seconds(self, configs: Mapping[str, ResourceReqConfig], steps: int) -> list[float]:
        """Seconds of each of ``steps`` steps in which every request has ``configs``, after two to warm up.

        A step is what these resources add to a decode step: plan, everything on the logits, tokens on the host,
        commit.  The logits are the same ones in every step, but newly written.
        """
        variant = FULL if any(config.needs_full_variant for config in configs.values()) else None
        for config in (config for key, config in configs.items() if config.needs_preparation):
            self.resources["grammar"].prepare_request(config)
        for i in self._ids:
            for key, resource in self.resources.items():
                resource.ingest_request(i, i, configs.get(key))
        try:
            return [self._step(variant, index % NUM_SLOTS) for index in range(steps + 2)][2:]
        finally:
            for i in self._ids:
                for resource in self.resources.values():
                    resource.remove_request(i, i)

    def _step(self, variant: str | None, slot: int) -> float:
        rows = self._rows.size
        lease = SlotLease(slot, BucketKey(WALK, rows, rows, variant))
        ctx = StepContext(WALK, self._ids, self._rows, self._spans, slot=slot, slot_lease=lease)
        self._fresh.copy_(self._logits)
        start = time.perf_counter()
        self._runner.plan(self._steps[variant], ctx)
        outputs = sample(self.resources, self._fresh, variant)
        tokens = outputs[NEW_TOKEN].numpy()
        self._runner.commit(self._steps[variant], ctx)
        if variant is not None:
            self.resources["grammar"].accept_tokens(self._rows, tokens)
        return time.perf_counter() - start
