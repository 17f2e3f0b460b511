"""One step from admission to the way of its outputs."""

from __future__ import annotations

import logging

import pytest
import torch

from mstar.engine.accelerator_graph_backend import CpuGraphBackend, EagerBackend
from mstar.engine.batch import Batch

from .toy import ToyOptions, ToySubmodule, make_engine, request

BACKENDS = {
    "eager": EagerBackend,
    "service": lambda: CpuGraphBackend(strict=False),
    "captured at load": lambda: CpuGraphBackend(warmup_forwards=1, capture_at_load=True, strict=False),
}


class Casting(ToySubmodule):
    """Notes the autocast it runs under, by hook."""

    def __init__(self, dtype):
        super().__init__(ToyOptions(decode_sizes=(1,), prefill_sizes=(1,), prefill_tokens=(16,)))
        self.autocast_dtype = dtype
        self.seen: dict[str, set] = {"preprocess": set(), "forward": set()}
        self.hook = lambda walk, ids: self.note("forward")

    def note(self, hook):
        on = torch.is_autocast_enabled("cpu")
        self.seen[hook].add(torch.get_autocast_dtype("cpu") if on else None)

    def preprocess(self, graph_walk, engine_inputs, inputs):
        self.note("preprocess")
        return super().preprocess(graph_walk, engine_inputs, inputs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_node_runs_under_its_own_autocast_whatever_the_caller_s(dtype, backend):
    submodule = Casting(dtype)
    engine, _, _ = make_engine(submodule=submodule, backend=BACKENDS[backend]())
    info = request(0, [1])
    engine.ingest(info)
    for seen in submodule.seen.values():
        seen.clear()
    with torch.autocast("cpu", dtype=torch.float16):
        for walk in ("prefill", "decode"):
            assert not engine.exec(Batch("LLM", walk, [info])).errors
        assert torch.get_autocast_dtype("cpu") is torch.float16
    assert submodule.seen["preprocess"] == {dtype}
    assert submodule.seen["forward"] == {dtype}


def test_a_capture_sees_the_autocast_of_its_replays():
    submodule = Casting(torch.bfloat16)
    make_engine(submodule=submodule, backend=CpuGraphBackend(warmup_forwards=1, capture_at_load=True, strict=True))
    assert submodule.seen["forward"] == {torch.bfloat16}


def test_steps_run_without_gradients():
    engine, submodule, _ = make_engine(backend=EagerBackend())
    seen = []
    submodule.hook = lambda walk, ids: seen.append(torch.is_grad_enabled())
    info = request(0)
    engine.ingest(info)
    engine.exec(Batch("LLM", "prefill", [info]))
    assert seen == [False]
    assert torch.is_grad_enabled()


def test_the_stop_check_s_rows_are_stamped_with_the_forward_s_own_order():
    engine, submodule, _ = make_engine(backend=EagerBackend())
    made, forward = [], submodule.forward_batched
    submodule.forward_batched = lambda *args, **tensors: made.append(forward(*args, **tensors)) or made[-1]
    infos = [request(i, [i + 1]) for i in (5, 1, 3)]
    for info in infos:
        engine.ingest(info)
    result = engine.exec(Batch("LLM", "prefill", infos))
    assert made[0].row_request_ids == result.request_ids == (5, 1, 3)


def test_a_node_without_a_step_runs_its_forward_and_touches_no_resource():
    class Plain(ToySubmodule):
        def declare_step(self, graph_walk, request_ids, inputs, slot_lease=None, **_):
            return None

        def preprocess(self, graph_walk, engine_inputs, inputs):
            return {"input_ids": torch.cat([row.input_ids for row in inputs])}

        def forward_batched(self, graph_walk, engine_inputs, **tensors):
            return {0: {"sum": [tensors["input_ids"].sum()]}}

        def get_accelerator_graph_configs(self, device):
            return []

    engine, _, toy = make_engine(submodule=Plain())
    info = request(0, [1, 2])
    engine.ingest(info)
    result = engine.exec(Batch("LLM", "prefill", [info]))
    assert int(result.outputs[0]["sum"][0]) == 3
    assert toy.hooks() == []


def test_falling_back_to_eager_is_logged_once_per_reason(caplog):
    engine, _, _ = make_engine(ToyOptions(decode_sizes=(1,), caps=False))
    infos = [request(i) for i in range(3)]
    for info in infos:
        engine.ingest(info)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            engine.exec(Batch("LLM", "decode", infos))
    assert caplog.text.count("LLM/decode: steps run eager: batch_size") == 1
    assert engine.eager_steps == {("LLM", "decode", "batch_size"): 3}
