"""Which shapes of a text model's steps are captured."""

from __future__ import annotations

import pytest
import torch

from mstar.model.captures import coarse_ladder, dense_ladder, text_graph_configs, token_ladder
from mstar.model.text_rows import LOOPBACK, collate
from mstar.model.text_sampling import FULL

DEVICES = pytest.mark.parametrize("device", ["cpu", "cuda"])


def configs(device: str, **options):
    """Decode and packed captures of the plain variant; those of the other have the same shapes."""
    made = text_graph_configs(torch.device(device), max_rows=48, max_tokens=500, **options)
    assert [config.additional_key_info for config in made] == [None, None, FULL, FULL]
    for plain, full in zip(made[:2], made[2:], strict=True):
        assert plain.capture_graph_walk == full.capture_graph_walk
        assert plain.capture_batch_sizes == full.capture_batch_sizes
    return made[:2]


def test_ladders_end_with_the_largest_size() -> None:
    assert dense_ladder(5) == [1, 2, 3, 4, 5]
    assert dense_ladder(100)[-5:] == [72, 80, 88, 96, 100]
    assert dense_ladder(1000)[-2:] == [992, 1000]
    assert coarse_ladder(1) == [1]
    assert coarse_ladder(20) == [1, 2, 4, 8, 16, 20]
    assert coarse_ladder(300)[-4:] == [192, 224, 256, 300]
    assert token_ladder(64, 64) == [64]
    assert token_ladder(32, 100) == [32, 48, 64, 96, 100]


@DEVICES
def test_captures_hold_the_largest_step(device: str) -> None:
    decode, packed = configs(device)
    assert max(decode.capture_batch_sizes) == max(packed.capture_batch_sizes) == 48
    assert max(packed.get_total_tokens(48)) == 500 + 48, "all prompt tokens, and a decode row each"


def test_decode_sizes_can_be_given() -> None:
    decode, _ = configs("cpu", decode_sizes=(8, 2, 8))
    assert decode.capture_batch_sizes == [2, 8]


@DEVICES
def test_prefill_and_mixed_steps_share_their_captures(device: str) -> None:
    _, packed = configs(device)
    assert packed.capture_graph_walk == "prefill"
    assert packed.replay_graph_walks == ["prefill", "mixed"]
    assert [row.input_seq_len for row in packed.get_node_inputs(3, 10)] == [1, 1, 8]


@DEVICES
def test_padding_rows_add_no_token_to_a_packed_step_and_one_each_to_decode(device: str) -> None:
    decode, packed = configs(device)
    assert [row.input_seq_len for row in packed.get_node_inputs(3, 0)] == [0, 0, 0]
    padding = decode.get_node_inputs(3, 0)
    assert [row.input_seq_len for row in padding] == [1, 1, 1]
    assert collate(padding, None, torch.device("cpu")).tolist() == [0, 0, 0], "a valid token, where none is kept"
    assert all(LOOPBACK in row.tensors for row in padding)
