"""Log-probabilities on a device, also in real graphs: plan writes who asks, and they are told what the CPU tells."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mstar.engine.resources.base import EngineResourceInfo
from mstar.engine.resources.logprobs.config import LogprobsReqConfig, LogprobsSpec, LogprobsStep
from mstar.engine.resources.logprobs.manager import Logprobs
from mstar.engine.resources.step import BucketKey, SlotLease, StepContext

pytest.importorskip("triton")
from mstar.engine.resources.logprobs.device import DeviceLogprobs

CAPACITY, BS, VOCAB, MAX_TOP, STEP = 8, 4, 1000, 6, LogprobsStep()
COUNTS = ((6, 3, -1, 0), (-1, -1, 5, 6), (-1, -1, -1, -1))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if torch.cuda.is_available() != (request.param == "cuda"):
        pytest.skip("kernels run on a GPU, or else in Triton's interpreter")
    return torch.device(request.param)


def context(rows, slot, capture=False, spans=None):
    rows = np.array([*rows, *range(CAPACITY, CAPACITY + BS - len(rows))], np.int64)
    lease = None if slot is None else SlotLease(slot, BucketKey("decode", BS, BS))
    real = tuple(row for row in rows.tolist() if row < CAPACITY)
    spans = np.ones(BS, np.int64) if spans is None else spans
    return StepContext("decode", real, rows, spans, tuple(rows.tolist()), slot or 0, capture, slot_lease=lease)


def built(kind, device):
    info = EngineResourceInfo(torch.device(device), torch.float32, torch.float32, CAPACITY, BS, num_slots=2)
    logprobs = kind(LogprobsSpec("logprobs", {"LLM"}, VOCAB, MAX_TOP), info)
    logprobs.build_accelerator_graph_buffers([], BS, BS)
    return logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["eager", "leased", pytest.param("captured", marks=pytest.mark.gpu)])
def test_the_device_tells_what_the_cpu_does(device, form, dtype):
    if form == "captured" and device.type == "cpu":
        pytest.skip("needs an NVIDIA GPU")
    on_device, on_cpu = built(DeviceLogprobs, device), built(Logprobs, "cpu")
    logits, tokens = torch.randn(BS, VOCAB), torch.arange(BS)
    logits[1, ::2], logits[2, :500] = -torch.inf, 1.0
    logits = logits.to(dtype)
    static, graph = (logits.to(device), tokens.to(device)), None
    if form == "captured":
        graph = torch.cuda.CUDAGraph()
        for _ in range(2):  # the first one compiles
            on_device.plan(STEP, context([], 0, capture=True))
            on_device.observe(static[0])
            on_device.of(static[1])
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            on_device.observe(static[0])
            told = on_device.of(static[1])
    for counts in COUNTS:
        for row, count in enumerate(counts):
            for logprobs in (on_device, on_cpu):
                logprobs.ingest_request(row, row, LogprobsReqConfig(num_top=count))
        for rows in ([0, 1, 2, 3], [3, 1]):
            on_cpu.plan(STEP, context(rows, 0))
            on_cpu.observe(logits)
            on_device.plan(STEP, context(rows, None if form == "eager" else 0))
            if graph is not None:
                graph.replay()
            else:
                on_device.observe(static[0])
                told = on_device.of(static[1])
            for name, wanted in on_cpu.of(tokens).items():
                torch.testing.assert_close(told[name].cpu(), wanted, rtol=1e-6, atol=2e-6, msg=name)
            for logprobs in (on_device, on_cpu):
                logprobs.commit(STEP, context(rows, 0))


def test_prompts_are_told_of_as_on_the_cpu(device):
    weight = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1)) / 4
    hidden = torch.randn(BS + 5, 5, generator=torch.Generator().manual_seed(2))
    told = []
    for logprobs, where in ((built(DeviceLogprobs, device), device), (built(Logprobs, "cpu"), torch.device("cpu"))):
        head = weight.to(where)
        for row, count in ((0, 2), (1, 0), (2, 5)):
            config = LogprobsReqConfig(num_prompt_top=count, prompt_ids=np.arange(10) * (row + 1))
            logprobs.ingest_request(row, row, config)
        logprobs.plan(STEP, context([0, 1, 2], None, spans=np.array([3, 1, 4, 1])))
        assert logprobs.wants_prompt
        told.append(logprobs.of_prompts(hidden.to(where), lambda part, head=head: part @ head))
    assert [list(each) for each in told] == [[0, 1, 2]] * 2
    for rid, wanted in told[1].items():
        for name, (column,) in wanted.items():
            torch.testing.assert_close(told[0][rid][name][0].cpu(), column, rtol=1e-5, atol=1e-5, msg=name)
