"""Combined walks are checked when a model is loaded."""

import pytest

from mstar.conductor.lanes import combined_lanes, plain_lanes
from mstar.conductor.transitions import Transitions
from mstar.graph import Loop, Node, Walk, compile_walks
from mstar.utils.errors import LoadError

WALKS = [Walk("prefill", Node("LLM")), Walk("decode", Loop(Node("LLM"), 9, "stop"))]


class Bounds:
    """The part of an engine that lanes ask."""

    def __init__(self, combined):
        self.combined = combined

    def combined_graph_walks(self):
        return self.combined

    def max_batch_size(self, node, graph_walk):
        return {"prefill": 2, "decode": 4}.get(graph_walk)

    def max_packed_tokens(self, node, graph_walk):
        return None if graph_walk == "decode" else 64


def transitions() -> Transitions:
    return Transitions(compile_walks(WALKS), {None: "prefill", "prefill": "decode", "decode": None}.get)


def test_every_state_has_a_lane_with_its_bounds():
    prefill, decode = plain_lanes(transitions(), Bounds({}))
    assert (prefill.walk, prefill.states, prefill.max_rows, prefill.max_tokens) == ("prefill", (0,), 2, 64)
    assert (decode.walk, decode.states, decode.max_rows, decode.max_tokens) == ("decode", (1,), 4, None)


def test_a_combined_lane_takes_its_states_in_the_declared_order():
    (lane,) = combined_lanes(transitions(), Bounds({"LLM": {"mixed": ("decode", "prefill")}}))
    assert (lane.node, lane.walk, lane.states, lane.walks) == ("LLM", "mixed", (1, 0), ("decode", "prefill"))
    assert (lane.max_rows, lane.max_tokens) == (None, 64)


@pytest.mark.parametrize(
    ("combined", "message"),
    [
        ({"LLM": {"mixed": ("decode", "fill")}}, "'mixed': 'LLM' has no walk 'fill'"),
        ({"codec": {"mixed": ("decode", "prefill")}}, "'mixed': 'codec' has no walk 'decode'"),
        ({"LLM": {"mixed": ("prefill", "decode")}}, "last part must be the walk requests start in"),
        ({"LLM": {"mixed": ("prefill", "prefill")}}, "last part must be the walk requests start in"),
        ({"LLM": {"mixed": ("prefill",)}}, "last part must be the walk requests start in"),
    ],
)
def test_a_combined_walk_that_cannot_be_batched_is_refused_at_load(combined, message):
    with pytest.raises(LoadError, match=message):
        combined_lanes(transitions(), Bounds(combined))
