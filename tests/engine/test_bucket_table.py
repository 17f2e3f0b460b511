from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mstar.engine.accelerator_graph_config import BatchedAcceleratorGraphConfig, PackedAcceleratorGraphConfig
from mstar.engine.bucket_table import BucketTable
from mstar.engine.inputs import ARNodeInputs
from mstar.engine.resources.step import BucketKey, SlotLease


def row(length):
    return ARNodeInputs(input_ids=torch.zeros(length, dtype=torch.int64), input_seq_len=length)


def decode(sizes=(1, 2, 4, 8), **options):
    return BatchedAcceleratorGraphConfig(
        capture_graph_walk="decode", single_request_inputs=row(1), capture_batch_sizes=list(sizes), **options
    )


def prefill(sizes=(1, 2, 4), tokens=(64, 256), walk="prefill", **options):
    return PackedAcceleratorGraphConfig(
        capture_graph_walk=walk,
        capture_token_lengths=list(tokens),
        make_node_input=row,
        capture_batch_sizes=list(sizes),
        **options,
    )


def table(*configs, num_slots=2):
    """Every bucket of the configurations, all registered; decode and prefill where none are given."""
    made = BucketTable("LLM", configs or (decode(), prefill()), num_slots)
    made.registered, made.unavailable = made.buckets, None
    return made


# Choice


@pytest.mark.parametrize(("bs", "chosen"), [(1, 1), (2, 2), (3, 4), (8, 8), (9, None)])
def test_decode_takes_the_tightest_batch_size(bs, chosen):
    bucket = table().select_bucket("decode", bs, bs)
    assert bucket == (chosen and BucketKey("decode", chosen, chosen))
    assert table().select_batched_bucket("decode", bs) == bucket


@pytest.mark.parametrize(
    ("bs", "tokens", "chosen"), [(3, 100, (4, 256)), (2, 64, (2, 64)), (2, 65, (2, 256)), (1, 300, None)]
)
def test_prefill_takes_the_tightest_tokens_then_rows(bs, tokens, chosen):
    assert table().select_bucket("prefill", bs, tokens) == (chosen and BucketKey("prefill", *chosen))


def test_packed_buckets_are_not_found_from_a_batch_size_alone():
    assert table().select_batched_bucket("prefill", 1) is None


@pytest.mark.parametrize(("bs", "tokens", "equal"), [(2, 3, False), (2, 4, True), (2, 2, False)])
def test_a_batched_bucket_takes_only_rows_of_its_template_s_length(bs, tokens, equal):
    assert table().select_bucket("decode", bs, tokens, equal_rows=equal) is None


@pytest.mark.parametrize(("tokens", "chosen"), [(100, 512), (64, 128), (65, 512), (256, 512), (257, None)])
def test_packed_fit_is_compared_in_static_buffer_tokens(tokens, chosen):
    guided = table(prefill((1,), (64, 256), "guided", total_tokens_multiplier=2))
    assert guided.select_bucket("guided", 1, tokens) == (chosen and BucketKey("guided", 1, chosen))
    assert guided.packed_sizes_for("guided")[-1] == 256


@pytest.mark.parametrize(("bs", "chosen"), [(1, (1, 2)), (3, (4, 8)), (5, None)])
def test_batched_fit_counts_the_labels_of_a_row(bs, chosen):
    guided = table(decode((1, 4), total_tokens_multiplier=2))
    assert guided.select_bucket("decode", bs, bs) == (chosen and BucketKey("decode", *chosen))


@given(
    bs=st.integers(1, 6),
    tokens=st.integers(1, 300),
    sizes=st.sets(st.integers(1, 6), min_size=1),
    lengths=st.sets(st.integers(1, 300), min_size=1),
    registered=st.randoms(),
)
def test_the_chosen_bucket_dominates_and_no_smaller_registered_one_does(bs, tokens, sizes, lengths, registered):
    buckets = table(prefill(sizes, lengths))
    buckets.registered = [key for key in buckets.buckets if registered.random() < 0.7]
    fitting = [k for k in buckets.registered if k.bs >= bs and k.num_tokens >= tokens]
    chosen = buckets.select_bucket("prefill", bs, tokens)
    assert chosen == min(fitting, key=lambda k: (k.num_tokens, k.bs), default=None)


@pytest.mark.parametrize("aliases", [None, [], ["talk"], ["talk", "decode"]])
def test_an_alias_finds_the_same_slots_and_the_lease_names_the_capture_walk(aliases):
    buckets = table(decode(replay_graph_walks=aliases))
    assert buckets.lease_slot("decode", 3, 1) == SlotLease(1, BucketKey("decode", 4, 4))
    assert buckets.max_batch_size_for("decode") == 8
    found = buckets.lease_slot("talk", 3, 5, num_tokens=3)
    assert found == (SlotLease(1, BucketKey("decode", 4, 4)) if aliases else None)
    assert buckets.max_batch_size_for("talk") == (8 if aliases else None)


def test_key_info_tells_captures_apart():
    buckets = table(decode(additional_key_info="plain"), decode((4,), additional_key_info="full"))
    assert buckets.select_bucket("decode", 1, 1, "plain") == BucketKey("decode", 1, 1, "plain")
    assert buckets.select_bucket("decode", 1, 1, "full") == BucketKey("decode", 4, 4, "full")
    assert buckets.select_bucket("decode", 1, 1) is None
    assert buckets.select_batched_bucket("decode", 1, "full") == BucketKey("decode", 4, 4, "full")


# Caps and reasons


@pytest.mark.parametrize(("caps", "cap"), [(True, 8), (False, None)])
def test_the_largest_batch_size_caps_unless_the_configuration_says_not(caps, cap):
    assert table(decode(caps_eager_batch_size=caps)).max_batch_size_for("decode") == cap


def test_the_cap_is_the_largest_of_the_configurations_that_serve_the_walk_and_cap():
    shared = (decode((1, 16), replay_graph_walks=["talk"], caps_eager_batch_size=False), prefill((2,), walk="talk"))
    assert table(*shared).max_batch_size_for("talk") == 2
    assert table(decode((1, 16), replay_graph_walks=["talk"]), shared[1]).max_batch_size_for("talk") == 16


def test_a_table_that_registered_nothing_still_reports_its_cap():
    buckets = table()
    buckets.registered = ()
    assert buckets.max_batch_size_for("decode") == 8
    assert buckets.lease_slot("decode", 1, 0, 1) is None


@pytest.mark.parametrize(
    ("walk", "bs", "tokens", "key_info", "equal", "reason"),
    [
        ("other", 1, 1, None, True, "no_capture"),
        ("decode", 1, 1, "guided", True, "key_info"),
        ("decode", 9, 9, None, True, "batch_size"),
        ("decode", 2, 3, None, False, "row_length"),
        ("decode", 2, 4, None, True, "row_length"),
        ("prefill", 5, 5, None, True, "batch_size"),
        ("prefill", 2, 300, None, True, "tokens"),
    ],
)
def test_why_a_batch_runs_eager(walk, bs, tokens, key_info, equal, reason):
    buckets = table()
    assert buckets.select_bucket(walk, bs, tokens, key_info, equal) is None
    assert buckets.eager_reason(walk, bs, tokens, key_info, equal) == reason


@pytest.mark.parametrize(("unavailable", "reason"), [("device", "device"), (None, "dropped")])
def test_a_batch_whose_bucket_is_not_registered_says_so(unavailable, reason):
    buckets = table()
    buckets.registered, buckets.unavailable = (), unavailable
    assert buckets.eager_reason("decode", 1, 1, None, True) == reason


# Enumeration


def test_batch_sizes_default_sort_and_lose_duplicates():
    buckets = table(decode(()), prefill((4, 1, 4), (16,)), num_slots=1)
    assert [s.bucket.bs for s in buckets.specs if s.config_idx == 0] == [64, 32, 16, 8, 4, 2, 1]
    assert [s.bucket.bs for s in buckets.specs if s.config_idx == 1] == [4, 1]


def test_captures_are_made_largest_first_with_slots_in_order():
    order = [(s.bucket.bs, s.bucket.num_tokens, s.slot) for s in table(num_slots=3).specs]
    assert order == sorted(order, key=lambda o: (-o[0], -o[1], o[2]))
    assert len(order) == 3 * (4 + 3 * 2)


def test_two_configurations_of_one_bucket_are_refused():
    with pytest.raises(ValueError, match=r"configurations 0 and 1 both capture decode\[bs=2"):
        table(decode(), decode((2,)))
