"""Combined walks are checked when a model is loaded."""

import pytest

from mstar.conductor.lanes import Lane, combined_lanes, plain_lanes
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

    def packed_sizes(self, node, graph_walk):
        return () if graph_walk == "decode" else (32, 64)

    def splits_prompts(self, node):
        return True


def transitions() -> Transitions:
    return Transitions(compile_walks(WALKS), {None: "prefill", "prefill": "decode", "decode": None}.get)


def test_every_state_has_a_lane_with_its_bounds():
    prefill, decode = plain_lanes(transitions(), Bounds({}), True)
    assert (prefill.walk, prefill.states, prefill.max_rows, prefill.token_sizes) == ("prefill", (0,), 2, (32, 64))
    assert (decode.walk, decode.states, decode.max_rows, decode.token_sizes) == ("decode", (1,), 4, ())
    assert prefill.splits_prompts
    assert not plain_lanes(transitions(), Bounds({}), False)[0].splits_prompts


def test_a_combined_lane_takes_its_states_in_the_declared_order():
    (lane,) = combined_lanes(transitions(), Bounds({"LLM": {"mixed": ("decode", "prefill")}}), True)
    assert (lane.node, lane.walk, lane.states, lane.walks) == ("LLM", "mixed", (1, 0), ("decode", "prefill"))
    assert (lane.max_rows, lane.token_sizes, lane.splits_prompts) == (None, (32, 64), True)


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
        combined_lanes(transitions(), Bounds(combined), True)


@pytest.mark.parametrize(
    ("sizes", "taken", "wanted", "left", "filling"),
    [
        ((), 3, 100, 100, 100),
        ((32, 64), 0, 100, 64, 64),
        ((32, 64), 10, 100, 54, 54),
        ((32, 64), 10, 40, 40, 22),  # 50 tokens would be padded to 64: 32 are filled
        ((32, 64), 10, 22, 22, 22),
        ((32, 64), 10, 21, 21, 21),  # no size can be filled
        ((32, 64), 40, 20, 20, 20),  # the smaller one is full without prompts
        ((32, 64), 64, 20, 0, 0),
    ],
)
def test_how_many_prompt_tokens_a_step_takes(sizes, taken, wanted, left, filling):
    lane = Lane("LLM", "mixed", (1, 0), ("decode", "prefill"), None, sizes)
    assert lane.tokens_left(taken, wanted) == left
    assert lane.tokens_that_fill(taken, wanted) == filling
