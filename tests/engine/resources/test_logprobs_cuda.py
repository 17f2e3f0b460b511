"""Log-probabilities in real graphs: whoever asks, the graph tells of every row, and plan writes who asked."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mstar.engine.resources.base import EngineResourceInfo
from mstar.engine.resources.logprobs.config import LogprobsReqConfig, LogprobsSpec, LogprobsStep
from mstar.engine.resources.runner import build_resources
from mstar.engine.resources.step import BucketKey, SlotLease, StepContext

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CAPACITY, BS, VOCAB, STEP = 8, 4, 1000, LogprobsStep()


def context(rows, slot, capture=False):
    rows = np.array([*rows, *range(CAPACITY, CAPACITY + BS - len(rows))], np.int64)
    lease = None if slot is None else SlotLease(slot, BucketKey("decode", BS, BS))
    real = tuple(row for row in rows.tolist() if row < CAPACITY)
    ids = tuple(rows.tolist())
    return StepContext("decode", real, rows, np.ones(BS, np.int64), ids, slot or 0, capture, slot_lease=lease)


def built(device):
    info = EngineResourceInfo(torch.device(device), torch.float32, torch.float32, CAPACITY, BS, num_slots=2)
    logprobs = build_resources([LogprobsSpec("logprobs", {"LLM"}, VOCAB)], info)["logprobs"]
    logprobs.build_accelerator_graph_buffers([], BS, BS)
    return logprobs


@pytest.mark.parametrize("is_captured", [False, True])
def test_the_device_tells_what_the_cpu_does(is_captured):
    on_device, on_cpu = built("cuda"), built("cpu")
    logits, tokens = torch.randn(BS, VOCAB), torch.arange(BS)
    logits[1, ::2], logits[2, :500] = -torch.inf, 1.0
    static = logits.cuda(), tokens.cuda()
    graph = torch.cuda.CUDAGraph()
    if is_captured:
        on_device.plan(STEP, context([], 0, capture=True))
        with torch.cuda.graph(graph):
            on_device.observe(static[0])
            told = on_device.of(static[1])
    for counts in ((20, 3, -1, 0), (-1, -1, 5, 20), (-1, -1, -1, -1)):
        for row, count in enumerate(counts):
            for logprobs in (on_device, on_cpu):
                logprobs.ingest_request(row, row, LogprobsReqConfig(num_top=count))
        for rows in ([0, 1, 2, 3], [3, 1]):
            on_cpu.plan(STEP, context(rows, 0))
            on_cpu.observe(logits)
            on_device.plan(STEP, context(rows, 0 if is_captured else None))
            if is_captured:
                graph.replay()
            else:
                on_device.observe(static[0])
                told = on_device.of(static[1])
            for name, wanted in on_cpu.of(tokens).items():
                torch.testing.assert_close(told[name].cpu(), wanted, rtol=1e-6, atol=2e-6, msg=name)
