"""The protocol of a node's network: what one that declares nothing answers."""

import pytest
import torch

from mstar.engine.inputs import ARNodeInputs, NodeInputs, RequestInfo
from mstar.engine.submodule import ARNodeSubmodule, NodeSubmodule

ANSWERS = [
    ("uniform_row_inputs", ("decode",), None),
    ("can_batch", ("decode", []), True),
    ("max_batch_size", ("decode",), None),
    ("cg_key_info", ("decode", []), None),
    ("declare_step", ("decode", [], []), None),
    ("filter_batched_output", ("decode", 0, {"a": [1]}), {"a": [1]}),
    ("postprocess", ("decode", RequestInfo(0), {"a": [1]}), {"a": [1]}),
    ("cleanup_request", (0,), None),
    ("get_combined_graph_walks", (), {}),
    ("get_accelerator_graph_configs", (torch.device("cpu"),), []),
    ("get_piecewise_accelerator_graph_configs", (torch.device("cpu"),), {}),
    ("device_loopback_signals", ("decode",), frozenset()),
    ("loopback_outputs", (), {}),
]
NEEDED = [
    ("prepare_inputs", ("prefill", RequestInfo(0))),
    ("split_inputs", (NodeInputs(), 1)),
    ("preprocess", ("decode", None, [])),
    ("forward_batched", ("decode", None)),
    ("unpack_packed_outputs", ({}, [], [], [], [])),
]


@pytest.mark.parametrize(("hook", "arguments", "answer"), ANSWERS, ids=[hook for hook, *_ in ANSWERS])
def test_a_hook_that_is_left_out(hook, arguments, answer):
    assert getattr(ARNodeSubmodule(), hook)(*arguments) == answer


@pytest.mark.parametrize(("hook", "arguments"), NEEDED, ids=[hook for hook, _ in NEEDED])
def test_a_hook_that_is_needed_names_itself_and_its_class(hook, arguments):
    with pytest.raises(NotImplementedError, match=f"NodeSubmodule.{hook}"):
        getattr(NodeSubmodule(), hook)(*arguments)


def test_a_row_alone_goes_through_the_batched_forward():
    class Node(NodeSubmodule):
        def forward_batched(self, graph_walk, engine_inputs, **tensors):
            return graph_walk, engine_inputs, tensors

    assert Node().forward("decode", 1, x=2) == ("decode", 1, {"x": 2})


def test_autocast_compilation_and_loop_back_are_settled_by_the_class():
    assert NodeSubmodule.autocast_dtype is None
    assert not NodeSubmodule.disable_torch_compile
    assert not NodeSubmodule.reads_device_loopback


def test_a_row_adds_one_token_and_ends_its_prompt_unless_it_says_otherwise():
    assert NodeInputs().input_seq_len == 1
    row = ARNodeInputs()
    assert (row.input_ids, row.chunk_start, row.is_final_chunk) == (None, 0, True)
