"""The order of a warm-up over nodes that share resources, and its account."""

from __future__ import annotations

import logging

import pytest
import torch

from mstar.engine.accelerator_graph_backend import CpuGraphBackend, EagerBackend
from mstar.engine.engine import Engine
from mstar.engine.graph_warm_up import capture_graphs

from .toy import ToyOptions, ToySpec, ToySubmodule, make_engine
from .toy_regions import RegionOptions, RegionSubmodule


class Runner:
    """Two buckets, of which ``lost`` cannot be captured."""

    def __init__(self, name, log, lost=(), buckets=("b8", "b1")):
        self.name, self.log, self.buckets, self._lost = name, log, list(buckets), list(lost)
        self.dropped_buckets = []

    def measure(self, budget):
        self.log.append(("measure", self.name))

    def capture_all(self, budget):
        self.log.append(("capture", self.name))
        self.dropped_buckets = self._lost


def test_everything_is_measured_before_anything_is_captured():
    log = []
    capture_graphs([Runner("a", log), Runner("b", log)], CpuGraphBackend())
    assert log == [("measure", "a"), ("measure", "b"), ("capture", "a"), ("capture", "b")]


def test_one_summary_names_all_that_was_lost(caplog):
    with caplog.at_level(logging.ERROR):
        capture_graphs([Runner("a", [], lost=["b8"]), Runner("b", [], lost=["b1"])], CpuGraphBackend())
    (record,) = caplog.records
    assert record.getMessage() == "captured 2 of 4 buckets, dropped a: b8, b: b1"
    assert record.levelno == logging.ERROR


@pytest.mark.parametrize("backend", [CpuGraphBackend, EagerBackend])
def test_where_graphs_are_required_a_lost_one_fails_the_start(monkeypatch, backend):
    monkeypatch.setenv("MSTAR_REQUIRE_ACCELERATOR_GRAPHS", "1")
    with pytest.raises(RuntimeError, match="captured 1 of 2 buckets, dropped a: b8"):
        capture_graphs([Runner("a", [], lost=["b8"])], backend())


def test_a_model_without_captures_says_nothing(caplog):
    capture_graphs([Runner("a", [], buckets=())], EagerBackend())
    assert not caplog.records


def test_buffers_of_all_nodes_are_sized_before_any_of_them_captures():
    nodes = {
        "First": ToySubmodule(ToyOptions(decode_sizes=(1,), prefill_sizes=(1,), prefill_tokens=(16,))),
        "Second": ToySubmodule(ToyOptions(decode_sizes=(4,), prefill_sizes=(2,), prefill_tokens=(64,))),
        "Third": RegionSubmodule(RegionOptions()),
    }
    engine = Engine(
        nodes,
        [ToySpec("toy", set(nodes))],
        device="cpu",
        dtype=torch.float32,
        kv_dtype=torch.float32,
        capacity=8,
        backend=CpuGraphBackend(warmup_forwards=1, capture_at_load=True, replays_real_head=False, strict=True),
    )
    engine.warm_up()
    hooks = [hook for hook, _ in engine.resources["toy"].calls]
    sizes = [size for hook, size in engine.resources["toy"].calls if hook == "buffers"]
    assert sizes == [(1, 16), (4, 64), (1, 16), (4, 32)]  # the last one is a region's
    assert hooks[: len(sizes)] == ["buffers"] * len(sizes)
    assert engine.dropped_buckets() == {"First": 0, "Second": 0, "Third": 0}
    assert not engine.resources["toy"].length.any()


def test_whatever_a_resource_finds_left_behind_fails_the_start(monkeypatch):
    engine, _, toy = make_engine(warm=False)

    def validate():
        assert toy.hooks().count("plan"), "asked before there was anything to leave behind"
        raise RuntimeError("warm-up left 3 pages taken")

    monkeypatch.setattr(toy, "post_warmup_validate", validate)
    with pytest.raises(RuntimeError, match="left 3 pages taken"):
        engine.warm_up()
