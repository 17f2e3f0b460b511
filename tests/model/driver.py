"""Runs a loaded model through the engine, keeping every step's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from mstar.engine.accelerator_graph_backend import CpuGraphBackend, GraphBackend
from mstar.engine.engine import Batch, Engine
from mstar.engine.inputs import RequestInfo
from mstar.engine.resources.sampler.config import SamplingReqConfig
from mstar.model.engine_model import EngineModel
from mstar.model.options import ModelLoadOptions
from mstar.model.registry import load_model

CPU = torch.device("cpu")
GREEDY = SamplingReqConfig(temperature=0.0)
SMALL = ModelLoadOptions(kv_memory_bytes=1 << 22, max_running_requests=4, max_batch_tokens=256)


@dataclass
class Run:
    """``tokens`` int64 [rows, steps], ``logits`` [steps, rows, vocabulary], ``faults`` bool [rows, steps]."""

    tokens: np.ndarray
    logits: torch.Tensor
    faults: np.ndarray


def load_small(
    name: Path | str, dtype: torch.dtype | None = torch.float32, options: ModelLoadOptions = SMALL
) -> EngineModel:
    return load_model(str(name), device=CPU, dtype=dtype, options=options)


def build_engine(model: EngineModel, rows: int, backend: GraphBackend | None = None) -> Engine:
    """An engine for ``rows`` requests over the model's weights, warmed up; its backend is strict by default."""
    engine = Engine(
        model.submodules,
        model.resource_specs,
        device=CPU,
        dtype=model.dtype,
        kv_dtype=model.kv_dtype,
        capacity=rows,
        backend=backend or CpuGraphBackend(strict=True),
    )
    engine.warm_up()
    return engine


def request(
    request_id: int, prompt: Sequence[int], max_tokens: int, sampling: SamplingReqConfig = GREEDY
) -> RequestInfo:
    ids = np.asarray(prompt, np.int64)
    return RequestInfo(request_id, prompt_ids=ids, max_tokens=max_tokens, resource_configs={"sampler": sampling})


def step(engine: Engine, batch: Batch) -> dict[str, np.ndarray]:
    """One step in which every row runs; its host values by name."""
    result = engine.exec(batch)
    assert not result.errors, result.errors
    assert result.refused is None, result.refused
    assert result.request_ids == batch.request_ids
    return result.host


def generate(model: EngineModel, prompts: Sequence[Sequence[int]], steps: int, strict: bool = True) -> Run:
    """Greedy tokens of all prompts in one batch: a prefill step, then ``steps - 1`` decode steps."""
    rows = len(prompts)
    engine = build_engine(model, rows, CpuGraphBackend(strict=strict))
    infos = [request(request_id, prompt, steps) for request_id, prompt in enumerate(prompts)]
    for info in infos:
        engine.ingest(info)
    logits: list[torch.Tensor] = []
    hook = model.submodules["LLM"].decoder.register_forward_hook(lambda *call: logits.append(call[-1].clone()))
    results = [step(engine, Batch("LLM", walk, infos)) for walk in ["prefill"] + ["decode"] * (steps - 1)]
    hook.remove()
    assert not engine.eager_steps
    return Run(
        np.stack([host["new_token"] for host in results], axis=1),
        torch.stack([row[:rows] for row in logits]),
        np.stack([host["fault"] for host in results], axis=1),
    )
