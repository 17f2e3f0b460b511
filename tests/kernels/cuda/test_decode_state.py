"""A decode step's lengths, addresses, positions and tables from the device's state, against their references."""

import pytest
import torch

pytest.importorskip("triton")

from mstar.kernels.attention import write_kv
from mstar.kernels.cuda.decode_state import next_positions, next_tokens
from mstar.kernels.cuda.store_kv import store_kv
from mstar.kernels.decode_state import next_positions_reference, next_tokens_reference

STREAMS, WIDTH, PAGE_SIZE = 200, 7, 4


def state(device, rows, seed=0):
    """Distinct streams in any order, the last third of them padding; lengths that leave room for a token."""
    generator = torch.Generator().manual_seed(seed)
    streams = torch.randperm(STREAMS, generator=generator)[:rows].int()
    advances = (torch.arange(rows) < rows - rows // 3).int()
    counters = torch.randint(0, WIDTH * PAGE_SIZE, (STREAMS,), generator=generator, dtype=torch.int32)
    table = torch.randint(0, 1000, (STREAMS, WIDTH), generator=generator, dtype=torch.int32)
    return [x.to(device) for x in (streams, advances, counters, table)]


@pytest.mark.parametrize("rows", [1, 3, 64, 130])
def test_steps_in_a_row_give_lengths_and_addresses_and_leave_padding_where_it_is(device, rows):
    streams, advances, lengths, table = state(device, rows)
    lengths.clamp_(max=WIDTH * PAGE_SIZE - 3)
    start = lengths.clone()
    for step in range(3):
        found, expected = (
            (
                torch.empty(rows, dtype=torch.int32, device=device),
                *torch.empty(2, rows, dtype=torch.int64, device=device),
            )
            for _ in range(2)
        )
        before = lengths.clone()
        next_tokens_reference(streams, advances, before, table, *expected, PAGE_SIZE)
        next_tokens(streams, advances, lengths, table, *found, PAGE_SIZE)
        for x, y in zip((*found, lengths), (*expected, before), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)
        assert torch.equal(found[2] - found[1], torch.full_like(found[1], PAGE_SIZE))
        of_rows = lengths[streams.long()] - start[streams.long()]
        assert torch.equal(of_rows, advances * (step + 1))


@pytest.mark.parametrize(
    ("dim", "interleave", "factor", "dtype"),
    [
        (64, False, 1.0, torch.bfloat16),
        (64, True, 1.0, torch.float32),
        (24, False, 1.25, torch.float32),
        (20, True, 1.0, torch.float16),
        (128, False, 1.0, torch.float32),
    ],
)
def test_positions_and_tables_equal_the_reference_far_out_too(device, dim, interleave, factor, dtype):
    rows = 5
    streams, advances, positions, _ = state(device, rows)
    positions[streams[1].long()] = 131072
    frequencies = (10000.0 ** -(torch.arange(dim // 2) * 2 / dim)).to(device)
    found, expected = (
        (torch.empty(rows, dtype=torch.int64, device=device), *torch.empty(2, rows, 1, dim, dtype=dtype, device=device))
        for _ in range(2)
    )
    before = positions.clone()
    options = {"factor": factor, "interleave": interleave}
    next_positions_reference(streams, advances, before, frequencies, *expected, **options)
    next_positions(streams, advances, positions, frequencies, *found, **options)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(positions, before)
    tolerance = 1e-6 if dtype is torch.float32 else 1e-2
    for x, y in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_land_where_the_reference_puts_them(device, dtype):
    torch.manual_seed(0)
    n, heads, dim, page_size = 9, 3, 20, 4
    packed = torch.randn(n, 8, dim, device=device, dtype=dtype)  # q, k and v of a token side by side
    k, v = packed[:, 2:5], packed[:, 5:8]
    found, expected = torch.zeros(2, 6, 2, page_size, heads, dim, device=device, dtype=dtype)
    token = torch.randperm(6 * page_size, device=device)[:n]
    key_index = token // page_size * 2 * page_size + token % page_size
    write_kv(expected, key_index, key_index + page_size, k, v)
    store_kv(found, key_index, k, v)
    assert torch.equal(found, expected)
