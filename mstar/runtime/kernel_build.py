"""Compiling a model's kernels without a GPU: its engine warms up on paper, and every launch compiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from mstar.engine.accelerator_graph_backend import CapturedGraph, Forward, GraphBackend
from mstar.engine.engine import Engine
from mstar.engine.resources.attention.flashinfer_kernels import DECODE_GROUPS
from mstar.kernels.cuda.ahead import CompiledKernel, compiling_ahead
from mstar.kernels.cuda.paper import DEVICE
from mstar.model.checkpoint import open_checkpoint
from mstar.model.registry import model_of
from mstar.runtime.core import dtype_of, load_options, with_overrides
from mstar.runtime.options import EngineOptions
from mstar.utils import knobs
from mstar.utils.errors import LoadError

HOPPER = 90  # has FlashInfer's "fa3"
LAYERS = 2  # the last differs from the others, which are alike


class BuiltKernels(NamedTuple):
    """``dropped``: captured steps by node that could not be carried out on paper, so that kernels are missing."""

    kernels: list[CompiledKernel]
    dropped: dict[str, int]


def build_kernels(options: EngineOptions, capability: int) -> BuiltKernels:
    """Compiles what an engine of these options, and of this environment, launches in its captured steps on a GPU of
    compute capability ``capability`` (90 is 9.0), into Triton's cache.

    Raises:
        LoadError: the model cannot be opened, or options do not go together.
        MstarError: as :func:`~mstar.kernels.cuda.ahead.compiling_ahead`.
    """
    checkpoint = open_checkpoint(options.model)
    few_layers = dataclasses.replace(checkpoint.config, num_layers=min(checkpoint.config.num_layers, LAYERS))
    with compiling_ahead(capability) as kernels:
        try:
            knobs.check_all()
            model = model_of(
                dataclasses.replace(checkpoint, config=few_layers),
                device=DEVICE,
                dtype=dtype_of(options.dtype),
                options=dataclasses.replace(load_options(options), load_format="dummy"),
            )
            engine = Engine(
                model.submodules,
                with_overrides(model.resource_specs, options.resources),
                device=DEVICE,
                dtype=model.dtype,
                kv_dtype=model.kv_dtype,
                capacity=options.max_running_requests,
                backend=_PaperBackend(),
            )
        except ValueError as error:
            raise LoadError(str(error)) from error
        engine.warm_up()
    return BuiltKernels(kernels, {node: count for node, count in engine.dropped_buckets().items() if count})


class _PaperBackend(GraphBackend):
    """Runs each forward once where a device would capture it."""

    warmup_forwards = 0

    def capture(self, forward: Forward, tensors: Mapping[str, Any], bs: int, pool: Any | None = None) -> CapturedGraph:
        forward(tensors)
        return _PaperGraph()


class _PaperGraph(CapturedGraph):
    def replay(self, tensors: Mapping[str, Any], bs: int) -> Any:
        return None  # what a replay launches, the warm-up's forwards have compiled


def flashinfer_modules(options: EngineOptions, capability: int) -> list[Any]:
    """FlashInfer's modules that a model's attention loads, each with a ``name``, whether it ``is_compiled``, and a
    method ``build``, which takes minutes and nvcc.

    Raises:
        LoadError: the model cannot be opened.
        ImportError: FlashInfer is not installed.
    """
    from flashinfer.jit import gen_batch_decode_module, gen_batch_prefill_module

    config = open_checkpoint(options.model).config
    dtype = dtype_of(options.dtype) or torch.bfloat16
    heads = (config.head_dim, config.head_dim)
    built_for = (dtype, dtype, dtype, torch.int32, *heads, 0, config.sliding_window is not None, False)
    generations = ("fa2", "fa3") if capability == HOPPER else ("fa2",)
    modules = [gen_batch_prefill_module(generation, *built_for, False) for generation in generations]
    if config.num_heads // config.num_kv_heads in DECODE_GROUPS:
        modules.append(gen_batch_decode_module(*built_for))
    return modules
