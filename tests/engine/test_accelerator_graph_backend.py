from __future__ import annotations

import pytest
import torch

from mstar.engine.accelerator_graph_backend import CpuGraphBackend, EagerBackend
from mstar.engine.outputs import BatchedModelOutput
from mstar.engine.strict_mode import StrictModeError


def double(tensors):
    return BatchedModelOutput(row_outputs={"y": tensors["x"] * 2})


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("at_load", [False, True])
def test_a_replay_reads_what_the_static_buffers_hold_now(strict, at_load):
    x = torch.tensor([1.0, 2.0])
    graph = CpuGraphBackend(strict=strict, capture_at_load=at_load).capture(double, {"x": x}, 2)
    for value in (3.0, 5.0):
        x.fill_(value)
        assert graph.replay({"x": x}, 2).row_outputs["y"].tolist() == [2 * value] * 2


def test_strict_outputs_lie_in_the_capture_s_buffers_and_are_poisoned_before_each_replay():
    x = torch.ones(2)
    seen = []

    def forward(tensors):
        if previous:
            seen.append(previous[0].clone())
        return double(tensors)

    previous = []
    graph = CpuGraphBackend(strict=True).capture(forward, {"x": x}, 2)
    first = graph.replay({"x": x}, 2).row_outputs["y"]
    second = graph.replay({"x": x}, 2).row_outputs["y"]
    assert first.data_ptr() == second.data_ptr()
    previous.append(first)
    with pytest.raises(StrictModeError):  # the clone itself is an operator that the capture did not have
        graph.replay({"x": x}, 2)
    assert seen[0].isnan().all()


def test_a_branch_on_a_python_value_that_changed_since_the_capture_is_caught():
    state = {"scale": True}

    def forward(tensors):
        y = tensors["x"] * 2 if state["scale"] else tensors["x"] + 2
        return BatchedModelOutput(row_outputs={"y": y})

    graph = CpuGraphBackend(strict=True).capture(forward, {"x": torch.ones(2)}, 2)
    graph.replay({"x": torch.ones(2)}, 2)
    state["scale"] = False
    with pytest.raises(StrictModeError, match="captured aten::mul"):
        graph.replay({"x": torch.ones(2)}, 2)


def test_the_real_head_of_a_packed_bucket_may_vary_in_length():
    def forward(tensors):
        table = torch.zeros(10, 3)
        return BatchedModelOutput(row_outputs={"y": table[tensors["ids"]].reshape(-1)})

    graph = CpuGraphBackend(strict=True).capture(forward, {}, 4)
    for n in (7, 3, 16, 7):
        assert graph.replay({"ids": torch.zeros(n, dtype=torch.int64)}, 2).row_outputs["y"].numel() == 3 * n


def test_a_device_without_graphs_captures_nothing():
    backend = EagerBackend()
    assert not backend.captures
    with pytest.raises(RuntimeError, match="captures nothing"):
        backend.capture(double, {}, 1)
