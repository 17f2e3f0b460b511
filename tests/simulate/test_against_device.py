"""A simulation from single steps' times foretells a whole run that was measured (docs/performance.md)."""

from __future__ import annotations

import numpy as np
import pytest

from mstar.cli.bench.workloads import w3
from mstar.runtime.options import EngineOptions
from mstar.simulate.drive import simulate
from mstar.simulate.measured import load
from mstar.simulate.measures import Measures
from mstar.simulate.rig import build_rig
from mstar.simulate.summary import Slo, summarise
from mstar.simulate.trace import make_trace

VOCABULARY = 151_936
MEASURED_TOKENS_PER_S = 28_418  # of Qwen3-0.6B on one H200
MEASURED_DECODE_STEPS = 1_018


def test_the_mixed_workload_takes_as_long_as_it_did():
    workload = w3(VOCABULARY)
    prompts = np.array([prompt.size for prompt in workload.prompts])
    trace = make_trace(np.zeros(workload.rows), prompts, workload.output_lens)
    options = EngineOptions(
        model="simulated", max_running_requests=256, max_batch_tokens=8192, max_seq_len=2049, prefix_cache=False
    )
    rig, measures = build_rig(options, load("h200-qwen3-0.6b"), trace), Measures(trace, 0)
    simulate(rig, measures)
    summary = summarise(rig.played(), measures, Slo(0.0, 0.0))
    assert summary.tokens_per_s == pytest.approx(MEASURED_TOKENS_PER_S, rel=0.03)
    assert summary.steps["decode"].steps == pytest.approx(MEASURED_DECODE_STEPS, rel=0.01)
