"""From state to state, over walk ends and loops."""

import numpy as np
import pytest

from mstar.conductor.transitions import DONE, Transitions
from mstar.graph import Loop, Node, Parallel, Sequential, Walk, compile_walks
from mstar.utils.errors import LoadError


def chain(*names):
    return dict(zip((None, *names), (*names, None), strict=True)).get


def step(transitions, state, iteration=0):
    states, iterations = transitions.advance(np.array([state]), np.array([iteration]))
    return int(states[0]), int(iterations[0])


def test_a_loop_runs_its_rounds_then_the_next_walk_begins():
    walks = compile_walks(
        [
            Walk("first", Node("a")),
            Walk("loop", Loop(Node("a"), 3, "stop")),
            Walk("last", Sequential(Node("b"), Node("c"))),
        ]
    )
    transitions = Transitions(walks, chain("first", "loop", "last"))
    state, iteration, seen = transitions.entry_state, 0, []
    while state != DONE:
        seen.append(tuple(transitions.states[state]))
        state, iteration = step(transitions, state, iteration)
    assert seen == [("first", "a"), *[("loop", "a")] * 3, ("last", "b"), ("last", "c")]


def test_rounds_are_counted_at_the_end_of_a_body_of_several_nodes():
    transitions = Transitions(compile_walks([Walk("w", Loop(Sequential(Node("a"), Node("b")), 2, "stop"))]), chain("w"))
    assert step(transitions, 0, 0) == (1, 0)
    assert step(transitions, 1, 0) == (0, 1)
    assert step(transitions, 0, 1) == (1, 1)
    assert step(transitions, 1, 1) == (DONE, 0)


@pytest.mark.parametrize(
    ("body", "order", "repeats"),
    [
        (Node("a"), ("w",), [True]),
        (Node("a"), ("w", "after"), [False]),  # it is not done when the loop is
        (Sequential(Node("a"), Node("b")), ("w",), [False, False]),
    ],
)
def test_a_state_that_repeats_until_the_end_is_told_apart_and_ends_as_any_other(body, order, repeats):
    walks = compile_walks([Walk("w", Loop(body, 3, "stop")), Walk("after", Node("c"))])
    transitions = Transitions(walks, chain(*order))
    assert [transitions.repeats(state) for state in range(len(repeats))] == repeats
    assert not transitions.repeats(len(repeats))
    if repeats == [True]:
        after = transitions.advance(np.zeros(5, np.int64), np.arange(5))
        assert np.array_equal(after[0] == DONE, transitions.rounds_left(0, np.arange(5) + 1) <= 0)


@pytest.mark.parametrize(
    ("walk", "order", "message"),
    [
        (Walk("w", Node("a")), chain("v"), "unknown walk 'v'"),
        (Walk("w", Node("a")), {}.get, "no first walk"),
        (Walk("w", Parallel(Node("a"), Node("b"))), chain("w"), "parallel branches"),
        (Walk("w", Sequential(Node("a"), Parallel(Node("b"), Node("c")))), chain("w"), "parallel branches"),
    ],
)
def test_what_cannot_be_scheduled_is_refused_at_load(walk, order, message):
    with pytest.raises(LoadError, match=message):
        Transitions(compile_walks([walk]), order)
