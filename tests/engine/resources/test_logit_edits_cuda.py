"""Edits of logits in real graphs: a replay runs none of their Python, and edits as the CPU does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mstar.engine.resources.base import EngineResourceInfo
from mstar.engine.resources.logit_edits.config import LogitEditsReqConfig, LogitEditsSpec, LogitEditsStep
from mstar.engine.resources.runner import build_resources
from mstar.engine.resources.step import BucketKey, SlotLease, StepContext

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
ROWS, VOCAB = 6, 1000
CONFIGS = [
    LogitEditsReqConfig(),
    LogitEditsReqConfig(allowed_ids=np.arange(40), bad_words=((3,), (1, 2), (2, 1, 2))),
    LogitEditsReqConfig(stop_ids=np.array([0, 9]), min_tokens=5, bias_ids=np.array([4]), bias=np.float32([3.5])),
    LogitEditsReqConfig(allowed_ids=np.array([0, 9]), stop_ids=np.array([0, 9]), min_tokens=5),
    LogitEditsReqConfig(presence_penalty=1.5, frequency_penalty=-0.25),
    LogitEditsReqConfig(allowed_ids=np.arange(900), bad_words=((2, 2),), frequency_penalty=0.5),
]


def built(device):
    info = EngineResourceInfo(torch.device(device), torch.float32, torch.float32, ROWS, ROWS, num_slots=2)
    edits = build_resources([LogitEditsSpec("edits", {"LLM"}, VOCAB)], info)["edits"]
    edits.build_accelerator_graph_buffers([], ROWS, ROWS)
    return edits


def context(rids, slot, capture=False):
    padded = (*rids, *(-2 - i for i in range(ROWS - len(rids))))
    rows = np.array([rid if rid >= 0 else ROWS - 2 - rid for rid in padded])
    lease = None if slot is None else SlotLease(slot, BucketKey("decode", ROWS, ROWS))
    return StepContext("decode", tuple(rids), rows, np.ones(ROWS), padded, slot or 0, capture, slot_lease=lease)


class Captured:
    """One graph per slot, of a forward that edits static logits and takes static tokens."""

    def __init__(self, edits):
        self.edits = edits
        self.logits = torch.zeros(ROWS, VOCAB, dtype=torch.bfloat16, device="cuda")
        self.tokens = torch.zeros(ROWS, dtype=torch.int64, device="cuda")
        self.graphs = [self._capture(slot) for slot in (0, 1)]

    def _forward(self):
        edited = self.edits.hold_back(self.edits.apply(self.logits))
        self.edits.record(self.tokens)
        return edited

    def _capture(self, slot):
        ctx, step, stream = context((), slot, capture=True), LogitEditsStep(), torch.cuda.Stream()
        for _ in range(2):
            self.edits.plan(step, ctx)
            with torch.cuda.stream(stream):
                self._forward()
            stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        self.edits.plan(step, ctx)
        with torch.cuda.graph(graph):
            edited = self._forward()
        self.edits.abandon(step, ctx)
        return graph, edited

    def run(self, slot, logits, tokens):
        self.logits.copy_(logits)
        self.tokens.copy_(tokens)
        graph, edited = self.graphs[slot]
        graph.replay()
        return edited.clone()


@pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "captured"])
def test_the_device_edits_as_the_cpu_does(is_captured):
    on_cpu, on_device = built("cpu"), built("cuda")
    captured = Captured(on_device) if is_captured else None
    for row, config in enumerate(CONFIGS):
        for edits in (on_cpu, on_device):
            edits.ingest_request(row, row, config)
    generator = torch.Generator().manual_seed(0)
    for number in range(80):
        logits = torch.randn(ROWS, VOCAB, generator=generator).bfloat16()
        tokens = torch.randint(0, 4 if number % 2 else VOCAB, (ROWS,), generator=generator)
        rids = [rid for rid in range(ROWS) if (number + rid) % 5]
        step = LogitEditsStep(None, frozenset(rids[number % 3 :]))
        ctx = context(rids, number % 2 if is_captured else None)
        for edits in (on_cpu, on_device):
            edits.plan(step, ctx)
        wanted = on_cpu.hold_back(on_cpu.apply(logits))
        if captured is None:
            edited = on_device.hold_back(on_device.apply(logits.cuda()))
        else:
            edited = captured.run(number % 2, logits, tokens)
        assert torch.equal(edited.cpu(), wanted)
        on_cpu.record(tokens)
        if captured is None:
            on_device.record(tokens.cuda())
        for edits in (on_cpu, on_device):
            edits.commit(step, ctx)
        if number % 20 == 19:
            for edits in (on_cpu, on_device):
                edits.remove_request(number % ROWS, number % ROWS)
                edits.ingest_request(number % ROWS, number % ROWS, CONFIGS[number % 7 % ROWS])
