from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mstar.engine.accelerator_graph_config import (
    AcceleratorGraphConfig,
    AcceleratorGraphConfigType,
    BatchedAcceleratorGraphConfig,
    PackedAcceleratorGraphConfig,
    PiecewiseAcceleratorGraphConfig,
    PiecewiseBatchedConfig,
    PiecewiseCallInputs,
    PiecewiseCaptureShape,
    PiecewiseConfigType,
    PiecewisePackedConfig,
    check_compile_mode,
    decode_rows_then_prompt,
    distribute_tokens,
)
from mstar.engine.inputs import ARNodeInputs, ModelInputsFromEngine, NodeInputs


def batched(length=1, **options):
    return BatchedAcceleratorGraphConfig("decode", NodeInputs(input_seq_len=length), **options)


def packed(lengths=(32, 64), **options):
    return PackedAcceleratorGraphConfig("prefill", list(lengths), lambda n: NodeInputs(input_seq_len=n), **options)


def region(cls=PiecewiseBatchedConfig, **options):
    return cls(capture_fn=lambda call: {}, make_static_inputs=lambda shape: {}, **options)


# Layouts


@pytest.mark.parametrize(
    ("total", "bs", "split"),
    [
        (10, 3, [4, 3, 3]),
        (8, 4, [2, 2, 2, 2]),
        (7, 4, [4, 1, 1, 1]),
        (3, 4, [3, 0, 0, 0]),
        (0, 3, [0, 0, 0]),
        (5, 1, [5]),
        (0, 0, []),
    ],
)
def test_distribute_tokens_puts_the_remainder_on_row_0(total, bs, split):
    assert distribute_tokens(total, bs) == split


@pytest.mark.parametrize(
    ("total", "bs", "split"),
    [
        (10, 3, [1, 1, 8]),
        (4, 4, [1, 1, 1, 1]),
        (5, 4, [1, 1, 1, 2]),
        (3, 4, [3, 0, 0, 0]),
        (0, 2, [0, 0]),
        (9, 1, [9]),
        (0, 0, []),
    ],
)
def test_decode_rows_then_prompt(total, bs, split):
    assert decode_rows_then_prompt(total, bs) == split


@pytest.mark.parametrize("layout", [distribute_tokens, decode_rows_then_prompt])
@pytest.mark.parametrize(("total", "bs"), [(-1, 2), (1, 0), (3, -1), (0, -1)])
def test_a_layout_refuses_what_it_cannot_split(layout, total, bs):
    with pytest.raises(ValueError, match=r"total_tokens must be|bs must be"):
        layout(total, bs)


@pytest.mark.parametrize("layout", [distribute_tokens, decode_rows_then_prompt])
@given(total=st.integers(0, 10_000), bs=st.integers(1, 300))
def test_a_layout_has_bs_rows_of_the_total_and_none_negative(layout, total, bs):
    lengths = layout(total, bs)
    assert len(lengths) == bs
    assert sum(lengths) == total
    assert min(lengths) >= 0


# Compile modes


@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_known_compile_modes_come_back_as_given(mode):
    assert check_compile_mode(mode) is mode


@pytest.mark.parametrize(
    "make",
    [
        check_compile_mode,
        lambda mode: batched(compile_mode=mode),
        lambda mode: packed(compile_mode=mode),
        lambda mode: region(seq_len=1, compile_mode=mode),
        lambda mode: region(PiecewisePackedConfig, total_tokens=[1], compile_mode=mode),
    ],
)
def test_an_unknown_compile_mode_is_refused_when_a_config_is_built(make):
    with pytest.raises(ValueError, match="compile_mode='fastest'"):
        make("fastest")


@pytest.mark.parametrize("make", [batched, packed, lambda **o: region(seq_len=1, **o)])
@pytest.mark.parametrize("sizes", [[0], [1, -2]])
def test_batch_sizes_below_1_are_refused(make, sizes):
    with pytest.raises(ValueError, match="capture_batch_sizes must be >= 1"):
        make(capture_batch_sizes=sizes)


# Signatures


BASE = (
    "replay_graph_walks=None, additional_key_info=None, compile=True, {mode}capture_batch_sizes=None, "
    "capture_forward_method='forward_batched', caps_eager_batch_size=True"
)
CONCRETE = f"{BASE.format(mode='')}, total_tokens_multiplier=1, compile_mode=None, input_seq_dims=None"
REGION = (
    "*, capture_fn, make_static_inputs, declare_step=None, lease_before_step=False, can_lease=None, "
    "forward_kwargs=<factory>, capture_batch_sizes=None, compile=False, compile_mode=None"
)


@pytest.mark.parametrize(
    ("published", "parameters"),
    [
        (check_compile_mode, "mode"),
        (distribute_tokens, "total_tokens, bs"),
        (decode_rows_then_prompt, "total_tokens, bs"),
        (
            AcceleratorGraphConfig,
            f"capture_graph_walk, {BASE.format(mode='compile_mode=None, ')}, input_seq_dims=None",
        ),
        (BatchedAcceleratorGraphConfig, f"capture_graph_walk, single_request_inputs, {CONCRETE}"),
        (
            PackedAcceleratorGraphConfig,
            f"capture_graph_walk, capture_token_lengths, make_node_input, {CONCRETE}, token_layout=None",
        ),
        (PiecewiseAcceleratorGraphConfig, REGION),
        (PiecewiseBatchedConfig, f"{REGION}, seq_len"),
        (PiecewisePackedConfig, f"{REGION}, total_tokens"),
        (PiecewiseCaptureShape, "bs, seq_lens, total_tokens"),
        (PiecewiseCallInputs, "static_inputs, engine_inputs, kwargs=<factory>"),
    ],
)
def test_parameters_and_defaults_are_as_published(published, parameters):
    signature = inspect.signature(published)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    stripped = signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)
    assert str(stripped) == f"({parameters})"


def test_enumerations_are_as_published():
    assert [(m.name, m.value) for m in AcceleratorGraphConfigType] == [
        ("BASIC_BATCHED", "basic_batched"),
        ("FLASH_INFER_PACKED", "flash_infer_packed"),
    ]
    assert [(m.name, m.value) for m in PiecewiseConfigType] == [("BATCHED", "batched"), ("PACKED", "packed")]


def test_walks_are_kept_as_they_were_given():
    assert batched(replay_graph_walks=[]).replay_graph_walks == []
    assert batched().replay_graph_walks is None


def test_declaring_imports_no_kernels():
    code = (
        "import sys, mstar.engine.accelerator_graph_config\n"
        "print([m for m in sys.modules if m.startswith(('mstar.kernels', 'flashinfer'))])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


# Batched and packed


@pytest.mark.parametrize(("length", "bs", "multiplier", "total"), [(1, 8, 1, 8), (1, 8, 2, 16), (4, 2, 3, 24)])
def test_a_batched_bucket_s_tokens(length, bs, multiplier, total):
    assert batched(length, total_tokens_multiplier=multiplier).get_total_tokens(bs) == [total]


def test_batched_padding_claims_full_length():
    rows = batched().get_node_inputs(2, 0)
    assert [row.input_seq_len for row in rows] == [1, 1]
    assert batched().get_config_type() is AcceleratorGraphConfigType.BASIC_BATCHED


def test_batched_rows_are_independent_clones_of_the_template_s_class():
    @dataclass
    class Special(ARNodeInputs):
        note: str = ""

    template = Special(
        tensors={"a": torch.zeros(2)}, kwargs={"nested": [torch.zeros(1), {"deep": torch.zeros(1)}]}, note="kept"
    )
    config = BatchedAcceleratorGraphConfig("decode", template)
    first, second = config.get_node_inputs(2, 2)
    assert type(first) is Special
    assert first.note == "kept"
    first.tensors["a"].fill_(1)
    first.kwargs["nested"][1]["deep"].fill_(1)
    first.kwargs["nested"].append(3)
    for other in (second, template):
        assert other.tensors["a"].tolist() == [0, 0]
        assert other.kwargs["nested"][1]["deep"].item() == 0
        assert len(other.kwargs["nested"]) == 2


def test_packed_buckets_count_static_buffer_tokens():
    assert packed((64, 256)).get_total_tokens(4) == [64, 256]
    assert packed((64, 256), total_tokens_multiplier=2).get_total_tokens(1) == [128, 512]
    assert packed().get_config_type() is AcceleratorGraphConfigType.FLASH_INFER_PACKED


@pytest.mark.parametrize(
    ("options", "bs", "num_tokens", "lengths"),
    [
        ({}, 3, 10, [4, 3, 3]),
        ({"total_tokens_multiplier": 2}, 3, 20, [4, 3, 3]),
        ({"token_layout": decode_rows_then_prompt}, 3, 10, [1, 1, 8]),
        ({}, 3, 0, [0, 0, 0]),
        ({"token_layout": decode_rows_then_prompt}, 2, 0, [0, 0]),
        ({}, 0, 0, []),
    ],
)
def test_packed_rows_follow_the_layout(options, bs, num_tokens, lengths):
    assert [row.input_seq_len for row in packed(**options).get_node_inputs(bs, num_tokens)] == lengths


@pytest.mark.parametrize("lengths", [[5, 5, 0], [4, 5], [12, -2]])
def test_a_wrong_token_layout_is_refused(lengths):
    with pytest.raises(ValueError, match="token_layout"):
        packed(token_layout=lambda total, bs: lengths).get_node_inputs(2, 10)


# Piecewise


def test_a_batched_region_s_padding_rows_do_real_compute():
    config = region(seq_len=4)
    shapes = config.get_capture_shapes([1, 2])
    assert shapes == [PiecewiseCaptureShape(1, [4], 4), PiecewiseCaptureShape(2, [4, 4], 8)]
    assert config.replay_seq_lens(shapes[1], [1], 1) == [4, 4]
    assert config.get_config_type() is PiecewiseConfigType.BATCHED


def test_a_packed_region_s_shapes_and_replay_lengths():
    config = region(PiecewisePackedConfig, total_tokens=[16, 32])
    shapes = config.get_capture_shapes([1, 2])
    assert [(s.bs, s.seq_lens) for s in shapes] == [(1, [16]), (1, [32]), (2, [8, 8]), (2, [16, 16])]
    assert config.replay_seq_lens(shapes[2], [5], 1) == [5, 0]
    assert config.get_config_type() is PiecewiseConfigType.PACKED


@pytest.mark.parametrize(
    ("seq_lens", "real_bs", "message"),
    [
        (None, 1, "needs seq_lens"),
        ([5], 2, "must have 2 entries"),
        ([1, 1, 1], 3, "real_bs must be <= 2"),
        ([10, 7], 2, "must sum to <= 16"),
    ],
)
def test_a_packed_region_refuses_a_replay_that_does_not_fit(seq_lens, real_bs, message):
    config = region(PiecewisePackedConfig, total_tokens=[16])
    with pytest.raises(ValueError, match=message):
        config.replay_seq_lens(PiecewiseCaptureShape(2, [8, 8], 16), seq_lens, real_bs)


def test_a_region_s_call_reaches_the_engine_s_resources():
    engine_inputs = ModelInputsFromEngine((), {"attn": 1}, None)
    assert PiecewiseCallInputs({}, engine_inputs).resources == {"attn": 1}
    assert PiecewiseCallInputs({}, engine_inputs).kwargs == {}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: batched(capture_batch_sizes=4), "capture_batch_sizes must be a list of integers, got 4"),
        (lambda: batched(capture_batch_sizes=["1"]), "capture_batch_sizes must be >= 1 and an integer, got '1'"),
        (lambda: batched(capture_batch_sizes=[1.5]), "capture_batch_sizes must be >= 1 and an integer, got 1.5"),
        (lambda: batched(total_tokens_multiplier=0), "total_tokens_multiplier must be >= 1"),
        (lambda: batched(replay_graph_walks="pq"), "replay_graph_walks must be a list of walks, got 'pq'"),
        (lambda: batched(additional_key_info=[1]), "additional_key_info must be hashable"),
        (lambda: packed(lengths=[-4]), "capture_token_lengths must be >= 1"),
        (lambda: packed(total_tokens_multiplier=-1), "total_tokens_multiplier must be >= 1"),
        (lambda: region(PiecewiseBatchedConfig, seq_len=0), "seq_len must be >= 1"),
        (lambda: region(PiecewiseBatchedConfig, seq_len="3"), "seq_len must be >= 1 and an integer, got '3'"),
        (lambda: region(PiecewisePackedConfig, total_tokens=[-3]), "total_tokens must be >= 1"),
    ],
)
def test_a_value_of_no_use_is_refused_by_name_when_the_config_is_built(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_repeated_token_bucket_of_a_region_is_one():
    config = region(PiecewisePackedConfig, total_tokens=[8, 8, 4])
    assert [(s.bs, s.total_tokens) for s in config.get_capture_shapes([1, 2])] == [(1, 8), (1, 4), (2, 8), (2, 4)]


def test_a_negative_length_is_refused_at_replay():
    config = region(PiecewisePackedConfig, total_tokens=[8])
    with pytest.raises(ValueError, match="seq_lens must be >= 0"):
        config.replay_seq_lens(config.get_capture_shapes([2])[0], [-1, 2], 2)
