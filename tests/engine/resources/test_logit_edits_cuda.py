"""Edits of logits on a device, in eager steps: what they are on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mstar.engine.resources.base import EngineResourceInfo
from mstar.engine.resources.logit_edits.config import LogitEditsReqConfig, LogitEditsSpec, LogitEditsStep
from mstar.engine.resources.runner import build_resources
from mstar.engine.resources.step import StepContext

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


def test_the_device_edits_as_the_cpu_does():
    edits = {}
    for device in ("cpu", "cuda"):
        info = EngineResourceInfo(torch.device(device), torch.float32, torch.float32, ROWS, 0)
        edits[device] = build_resources([LogitEditsSpec("edits", {"LLM"}, VOCAB)], info)["edits"]
        for row, config in enumerate(CONFIGS):
            edits[device].ingest_request(row, row, config)
    generator, rows = torch.Generator().manual_seed(0), np.arange(ROWS)
    for number in range(80):
        raw = torch.randn(ROWS, VOCAB, generator=generator)
        tokens = torch.randint(0, 4 if number % 2 else VOCAB, (ROWS,), generator=generator)
        kept = frozenset(range(number % 3, ROWS))
        ctx, step, edited = (
            StepContext("decode", tuple(range(ROWS)), rows, np.ones(ROWS)),
            LogitEditsStep(None, kept),
            {},
        )
        for device, own in edits.items():
            own.plan(step, ctx)
            edited[device] = own.hold_back(own.apply(raw.to(device, copy=True))).cpu()
            own.record(tokens.to(device))
            own.commit(step, ctx)
        torch.testing.assert_close(edited["cuda"], edited["cpu"], rtol=1e-6, atol=1e-6)
