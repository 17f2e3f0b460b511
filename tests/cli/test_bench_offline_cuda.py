"""``mstar bench offline`` on a GPU: a step is told apart into its parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runtime.tiny import write_checkpoint

from mstar.cli.bench.offline_run import OfflineSettings, run_offline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_on_a_gpu_a_step_is_told_apart_into_replay_gap_and_kernels(tmp_path: Path) -> None:
    model, trace = write_checkpoint(tmp_path / "tiny"), tmp_path / "trace.json.gz"
    options = {"device": "cuda:0", "dtype": "bfloat16", "load_format": "dummy"}
    sizes = {"batch_sizes": (1, 4), "input_len": 16, "output_len": 64, "repeats": 2}
    record = run_offline(OfflineSettings(str(model), **sizes, trace=trace, options=options))
    for result in record.results:
        assert result.gap_us is not None
        assert result.replay_ms is not None
        assert result.event_step_ms == pytest.approx(result.replay_ms + result.gap_us / 1e3, rel=0.3)
        assert 1 / 3 < result.event_step_ms / result.step_ms < 3
        assert record.kernels[result.rows].kernels_per_step >= 5
    assert trace.stat().st_size > 0
    assert "kernels and" in record.kernels_text()
    assert not record.eager_steps
