from __future__ import annotations

import numpy as np
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

    x = {"x": torch.ones(2)}
    graph = CpuGraphBackend(strict=True).capture(forward, x, 2)
    graph.replay(x, 2)
    state["scale"] = False
    with pytest.raises(StrictModeError, match="captured aten::mul"):
        graph.replay(x, 2)


def test_the_real_head_of_a_packed_bucket_may_vary_in_length():
    def forward(tensors):
        table = torch.zeros(10, 3)
        return BatchedModelOutput(row_outputs={"y": table[tensors["ids"]].reshape(-1)})

    graph = CpuGraphBackend(strict=True).capture(forward, {}, 4)
    ids = torch.zeros(16, dtype=torch.int64)
    for n in (7, 3, 16, 7):
        assert graph.replay({"ids": ids[:n]}, 2).row_outputs["y"].numel() == 3 * n


def test_a_replay_over_other_tensors_than_the_static_ones_is_caught():
    graph = CpuGraphBackend(strict=True, capture_at_load=True).capture(double, {"x": torch.ones(2)}, 2)
    with pytest.raises(StrictModeError, match="not where the capture read it"):
        graph.replay({"x": torch.ones(2)}, 2)


@pytest.mark.parametrize("value", ["", "0", "1"])
def test_the_environment_says_whether_the_cpu_is_strict(monkeypatch, value):
    monkeypatch.setenv("MSTAR_GRAPH_STRICT", value)
    assert CpuGraphBackend().strict == (value == "1")
    assert CpuGraphBackend(strict=True).strict
    assert not CpuGraphBackend(strict=False).strict


def test_these_tests_are_strict_wherever_they_do_not_say_otherwise():
    assert CpuGraphBackend().strict


def test_a_host_copy_is_of_its_own():
    source = {"a": torch.arange(3), "b": torch.tensor([1.5, 2.0], dtype=torch.bfloat16)}
    copy = CpuGraphBackend().copy_to_host(source)
    for tensor in source.values():
        tensor.fill_(9)
    host = copy.wait()
    assert host["a"].tolist() == [0, 1, 2]
    assert host["b"].tolist() == [1.5, 2.0]
    assert host["b"].dtype == np.float32


def test_the_cpu_asks_no_driver_about_memory():
    backend = CpuGraphBackend()
    assert not backend.budgets_memory
    with pytest.raises(NotImplementedError):
        backend.free_memory()


@pytest.mark.parametrize(("mode", "options"), [("default", {}), ("max-autotune", {"mode": "max-autotune"})])
def test_a_compiled_method_has_static_shapes_and_its_mode(monkeypatch, mode, options):
    calls = []
    monkeypatch.setattr(torch, "compile", lambda fn, **kwargs: calls.append((fn, kwargs)) or "compiled")
    assert CpuGraphBackend(compiles=True).compile(double, mode) == "compiled"
    assert calls == [(double, {"fullgraph": False, "dynamic": False, **options})]


def test_nothing_is_compiled_on_the_cpu_unless_asked():
    assert CpuGraphBackend().compile(double, "default") is double


def test_a_device_without_graphs_captures_nothing():
    backend = EagerBackend()
    assert not backend.captures
    with pytest.raises(RuntimeError, match="captures nothing"):
        backend.capture(double, {}, 1)
