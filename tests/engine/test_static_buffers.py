from __future__ import annotations

import pytest
import torch

from mstar.engine.static_buffers import StaticBuffers


def test_the_dim_of_the_token_count_varies_and_smaller_buckets_share_the_address():
    buffers = StaticBuffers()
    large = buffers.intern(0, "x", torch.ones(1, 512), 512, 512)
    small = buffers.intern(0, "x", torch.full((1, 256), 2.0), 256, 512)
    assert large.shape == (1, 512)
    assert small.shape == (1, 256)
    assert large.data_ptr() == small.data_ptr()
    assert large[0, :256].eq(2).all()
    assert large[0, 256:].eq(1).all()


def test_rotary_ids_vary_along_dim_1():
    buffers = StaticBuffers()
    large = buffers.intern(0, "positions", torch.arange(24).reshape(3, 8), 8, 8)
    small = buffers.intern(0, "positions", torch.zeros(3, 4, dtype=torch.int64), 4, 8)
    assert small.shape == (3, 4)
    assert large[:, 4:].tolist() == [[4, 5, 6, 7], [12, 13, 14, 15], [20, 21, 22, 23]]


def test_an_override_corrects_a_wrong_guess():
    wrong, right = StaticBuffers(), StaticBuffers()
    wrong.intern(0, "x", torch.zeros(4, 1, 256), 256, 256)
    with pytest.raises(RuntimeError, match="largest-first with matching trailing dims"):
        wrong.intern(0, "x", torch.zeros(2, 1, 256), 128, 256)
    large = right.intern(0, "x", torch.zeros(4, 1, 256), 256, 256, {"x": 0})
    small = right.intern(0, "x", torch.zeros(2, 1, 256), 128, 256, {"x": 0})
    assert large.data_ptr() == small.data_ptr()


def test_a_longer_later_capture_is_refused():
    buffers = StaticBuffers()
    buffers.intern(0, "x", torch.zeros(8), 8, 8)
    with pytest.raises(RuntimeError, match="largest-first"):
        buffers.intern(0, "x", torch.zeros(9), 9, 9)


def test_the_length_is_that_of_the_configuration_s_largest_bucket():
    buffers = StaticBuffers()
    buffers.intern(0, "x", torch.zeros(2 * 8), 8, 32)
    assert buffers.intern(0, "x", torch.ones(2 * 32), 32, 32).eq(1).all()


def test_configurations_and_names_do_not_share():
    buffers = StaticBuffers()
    pointers = {buffers.intern(idx, name, torch.zeros(4), 4, 4).data_ptr() for idx in (0, 1) for name in ("x", "y")}
    assert len(pointers) == 4
    assert buffers.resident_bytes == 4 * 16


def test_staging_fills_the_head_and_keeps_the_tail():
    buffers = StaticBuffers()
    view = buffers.intern(0, "x", torch.arange(6).reshape(1, 6), 6, 6)
    buffers.stage(0, "x", view, torch.tensor([[9, 9]]))
    assert view.tolist() == [[9, 9, 2, 3, 4, 5]]


def test_the_real_head_is_a_view_of_the_buffer():
    buffers = StaticBuffers()
    view = buffers.intern(0, "x", torch.zeros(6), 6, 6)
    head = buffers.narrowed(0, "x", torch.ones(4))
    assert head.tolist() == [1.0] * 4
    assert head.data_ptr() == view.data_ptr()


def test_a_scalar_tensor_is_static_too():
    buffers = StaticBuffers()
    view = buffers.intern(0, "s", torch.tensor(3.0), 8, 8)
    buffers.stage(0, "s", view, torch.tensor(4.0))
    assert view.item() == 4.0
    assert buffers.narrowed(0, "s", torch.tensor(5.0)).item() == 5.0
    assert view.item() == 5.0


def test_sharing_is_accounted_for_in_bytes():
    buffers = StaticBuffers()
    for tokens in (64, 16, 4):
        buffers.intern(0, "ids", torch.zeros(tokens, dtype=torch.int64), tokens, 64)
    assert buffers.resident_bytes == 64 * 8
    assert buffers.per_capture_bytes == (64 + 16 + 4) * 8
