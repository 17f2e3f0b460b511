"""The CPU's paged decode kernel: equal to plain attention over each row alone, and to the bit whatever the batch."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.kernels.attention import attention_reference
from mstar.kernels.cpu import jit
from mstar.kernels.cpu.paged_decode import PagedDecode, PagedDecodeKernel, paged_decode_kernel


def host_lanes():
    try:
        return jit.vector_lanes() if jit.llvm is not None else 0
    except OSError:
        return 0


pytestmark = pytest.mark.skipif(not host_lanes(), reason="needs llvmlite and AVX2")
kernel_of = functools.cache(PagedDecodeKernel)
GROUPS, DIMS, PAGE_SIZES = [1, 3, 8], [64, 128], [1, 4, 16]


class Rows:
    """Rows of ``lens`` tokens whose last one is new.  Whatever no row has stored in the cache is NaN."""

    def __init__(self, lens, *, kv_heads=2, group=3, dim=64, page_size=16, seed=0):
        torch.manual_seed(seed)
        heads = kv_heads * group
        self.shape = (heads, kv_heads, dim, page_size)
        self.lens = np.array(lens, np.int64)
        pages = -(-self.lens // page_size)
        order = np.random.default_rng(seed).permutation(int(pages.sum())) + 1
        self.table = np.zeros((self.lens.size, int(pages.max())), np.int32)
        self.table[np.arange(self.table.shape[1]) < pages[:, None]] = order
        self.layer = torch.full((order.size + 1, 2, page_size, kv_heads, dim), torch.nan)
        self.k = [torch.randn(n, kv_heads, dim) for n in lens]
        self.v = [torch.randn(n, kv_heads, dim) for n in lens]
        self.q = torch.randn(len(lens), heads, dim)
        for row, n in enumerate(lens):
            page, offset = self.places(row, np.arange(n - 1))
            self.layer[page, 0, offset], self.layer[page, 1, offset] = self.k[row][:-1], self.v[row][:-1]

    def places(self, row, positions):
        page, offset = np.divmod(positions, self.shape[3])
        return self.table[row, page].astype(np.int64), offset

    def run(self, rows=None, window=None, lanes=None):
        """``rows`` as one batch, all by default; q, k and v are views of one tensor, as a model hands them over."""
        rows = range(self.lens.size) if rows is None else rows
        new = [torch.cat((self.q[r], self.k[r][-1], self.v[r][-1])) for r in rows]
        heads, kv_heads = self.shape[:2]
        q, k, v = torch.stack(new).split((heads, kv_heads, kv_heads), dim=1)
        index = np.array(rows)
        step = PagedDecode(kernel_of(*self.shape, lanes=lanes), self.lens[index], self.table[index], window)
        return step.attend(self.layer, q, k, v)

    def expected(self, window=None):
        rows = zip(self.q, self.k, self.v, self.lens.tolist(), strict=True)
        return torch.cat([attention_reference(q[None], k, v, n - 1, window) for q, k, v, n in rows])


lengths = st.lists(st.integers(1, 90) | st.integers(1, 1000), min_size=1, max_size=6)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("group", GROUPS)
@settings(max_examples=6, deadline=None)
@given(lens=lengths, window=st.none() | st.integers(1, 200), seed=st.integers(0, 99))
def test_ragged_batch_equals_each_row_alone(group, dim, page_size, lens, window, seed):
    rows = Rows(lens, group=group, dim=dim, page_size=page_size, seed=seed)
    torch.testing.assert_close(rows.run(window=window), rows.expected(window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("page_size", [4, 10, 16])
@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize("window", [None, 1, 20])
def test_every_width_of_vector_gives_the_same(page_size, lanes, window):
    if lanes > host_lanes():
        pytest.skip("needs AVX-512")
    rows = Rows([1, 7, 16, 33, 250], page_size=page_size)
    torch.testing.assert_close(rows.run(window=window, lanes=lanes), rows.expected(window), rtol=1e-5, atol=1e-5)


def test_the_new_token_is_stored_in_its_page():
    rows = Rows([1, 16, 17, 40])
    rows.run()
    for row, n in enumerate(rows.lens):
        page, offset = rows.places(row, np.arange(n))
        assert torch.equal(rows.layer[page, 0, offset], rows.k[row])
        assert torch.equal(rows.layer[page, 1, offset], rows.v[row])
    stored = int(rows.lens.sum()) * rows.layer[0, 0, 0].numel()
    assert int(rows.layer.isfinite().sum()) == 2 * stored  # and nowhere else


@settings(max_examples=25, deadline=None)
@given(lens=lengths, data=st.data())
def test_a_row_does_not_depend_on_its_neighbours(lens, data):
    rows = Rows(lens)
    together = rows.run()
    some = data.draw(st.permutations(range(len(lens))))[: data.draw(st.integers(1, len(lens)))]
    assert torch.equal(rows.run(some), together[some])


@pytest.mark.parametrize("lens", [[1], [700, 3, 3], [5] * 9, [1000, 900, 1, 64]])
def test_a_row_does_not_depend_on_the_number_of_threads(lens):
    rows, before, outputs = Rows(lens), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outputs.append(rows.run())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_weights_are_exact_for_scores_far_apart():
    rows = Rows([60, 200], group=1)
    rows.q *= 40
    torch.testing.assert_close(rows.run(), rows.expected(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_query_that_is_not_finite_spoils_its_own_row_only(bad):
    rows = Rows([20, 30, 40])
    wanted = rows.run()
    rows.q[1, :, 5] = bad
    out = rows.run()
    assert not out[1].isfinite().any()
    assert torch.equal(out[[0, 2]], wanted[[0, 2]])


def test_heads_that_do_not_fill_vectors_have_no_kernel(caplog):
    assert paged_decode_kernel(2, 2, 20, 16) is None
    assert "head_dim 20" in caplog.text
