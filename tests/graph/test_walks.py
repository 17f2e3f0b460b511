from __future__ import annotations

import pytest

from mstar.graph import (
    EMIT_TO_CLIENT,
    EMPTY_DESTINATION,
    END,
    FORK,
    Edge,
    Loop,
    Node,
    Parallel,
    Sequential,
    Walk,
    compile_walks,
)

TEXT = Edge(EMIT_TO_CLIENT, "new_token", output_modality="text")


def llm(*outputs):
    return Node("LLM", ("text_inputs",), outputs)


def text_walks():
    prefill = Walk("prefill", llm(TEXT, Edge(EMPTY_DESTINATION, "text_inputs", persist=True)))
    decode = Walk("decode", Loop(llm(TEXT, Edge("LLM", "text_inputs")), 64, "decode_loop"))
    return [prefill, decode]


def node(name, *dests):
    """A node with one input ``x`` and an edge to each of ``dests``."""
    return Node(name, ("x",), tuple(Edge(dest, "x") for dest in dests))


def test_a_text_model_is_two_states_and_one_loop():
    tables = compile_walks(text_walks(), {"LLM"})
    prefill, decode = tables.state_id("prefill", "LLM"), tables.state_id("decode", "LLM")
    assert tables.states[decode] == ("decode", "LLM")
    assert tables.next_state[[prefill, decode]].tolist() == [END, decode]
    assert tables.exit_state[[prefill, decode]].tolist() == [END, END]
    assert tables.loop_of[[prefill, decode]].tolist() == [-1, 0]
    assert tables.ends_iteration[[prefill, decode]].tolist() == [False, True]
    assert tables.max_iters.tolist() == [64]
    assert tables.stop_signals == ("decode_loop",)
    assert tables.first_states("prefill") == (prefill,)
    assert tables.first_states("decode") == (decode,)


def test_sections_follow_each_other_and_a_loop_leads_on_when_it_is_over():
    walk = Walk(
        "speak",
        Sequential(
            node("encoder", "talker"),
            Loop(Sequential(node("talker", "head"), node("head", "talker")), 3, "stop"),
            node("codec"),
        ),
    )
    tables = compile_walks([walk])
    encoder, talker, head, codec = (tables.state_id("speak", n) for n in ("encoder", "talker", "head", "codec"))
    assert tables.next_state[[encoder, talker, head, codec]].tolist() == [talker, head, talker, END]
    assert tables.exit_state[[encoder, talker, head, codec]].tolist() == [talker, head, codec, END]
    assert tables.ends_iteration.tolist() == [False, False, True, False]
    assert tables.loop_of.tolist() == [-1, 0, 0, -1]


def test_parallel_sections_fork_and_join():
    walk = Walk(
        "see", Sequential(node("split", "a", "b"), Parallel(node("a", "join"), node("b", "join")), node("join"))
    )
    tables = compile_walks([walk])
    split, a, b, join = (tables.state_id("see", n) for n in ("split", "a", "b", "join"))
    assert tables.next_state[split] == FORK
    assert tables.successors[split] == (a, b)
    assert tables.next_state[[a, b]].tolist() == [join, join]
    assert tables.num_predecessors[[split, a, b, join]].tolist() == [0, 1, 1, 2]
    assert tables.first_states("see") == (split,)


def test_a_walk_may_begin_with_several_nodes():
    tables = compile_walks([Walk("w", Parallel(node("a"), node("b")))])
    assert tables.first_states("w") == (0, 1)


def test_unknown_names_are_key_errors_that_name_them():
    tables = compile_walks(text_walks())
    with pytest.raises(KeyError, match="unknown walk 'mixed'"):
        tables.first_states("mixed")
    with pytest.raises(KeyError, match="walk 'decode' has no node 'vision'"):
        tables.state_id("decode", "vision")


def loop(body, max_iters=2, stop_signal="stop", **outputs):
    return Loop(body, max_iters, stop_signal, **outputs)


@pytest.mark.parametrize(
    ("root", "message"),
    [
        (node("vision"), "unknown node 'vision', the model has"),
        (Sequential(node("a"), node("a")), "node 'a' appears twice"),
        (node("a", "b"), "edge 'a' -> 'b' .*: the walk has no such node"),
        (Sequential(Node("a", (), (Edge("b", "y"),)), node("b")), "'b' has no such input, only"),
        (node("a", "a"), "edge 'a' -> 'a' .* is a cycle outside a loop"),
        (Sequential(node("a", "b"), node("b", "a")), "edge 'b' -> 'a' .* is a cycle outside a loop"),
        (Sequential(node("a"), loop(node("b", "a"))), "edge 'b' -> 'a' .* is a cycle outside a loop"),
        (Parallel(node("a", "b"), node("b")), "edge 'a' -> 'b' .* is a cycle outside a loop"),
        (Sequential(), "an empty Sequential"),
        (Parallel(), "an empty Parallel"),
        (loop(loop(node("a"))), "loop 'stop' lies inside another loop"),
        (loop(node("a"), max_iters=0), "max_iters must be >= 1, got 0"),
        (loop(node("a"), stop_signal=""), "a loop needs a stop_signal"),
        (loop(node("a", "a"), outputs=("y",)), "no node of its body makes output 'y'"),
        (loop(node("a", "a"), outputs=("x",), accumulated_outputs=("x",)), "both outputs and accumulated_outputs"),
        (loop(Parallel(node("a"), node("b"))), "must begin and end with one node"),
        (node("a", EMPTY_DESTINATION), "goes nowhere and is not persisted"),
        (
            Sequential(Node("a", (), (Edge("b", "x", output_modality="text"),)), node("b")),
            "has an output_modality but does not go to the client",
        ),
    ],
)
def test_a_faulty_walk_is_refused_at_load_by_name(root, message):
    with pytest.raises(ValueError, match=f"walk 'w'.*{message}"):
        compile_walks([Walk("w", root)], {"a", "b"})


def test_two_walks_of_one_name_are_refused():
    with pytest.raises(ValueError, match="walk 'w' is declared twice"):
        compile_walks([Walk("w", node("a")), Walk("w", node("b"))])


def test_an_edge_forward_into_and_inside_a_loop_is_fine():
    compile_walks([Walk("w", Sequential(node("a", "b", "c"), loop(Sequential(node("b", "c"), node("c", "b")))))])


def test_the_graph_imports_no_torch():
    import subprocess
    import sys

    code = "import sys, mstar.graph; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
