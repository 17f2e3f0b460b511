"""The index arrays equal a plain per-row pass over the streams, and have the types FlashInfer takes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.engine.resources.kv.pages import SINK_PAGE
from mstar.engine.resources.kv.plan import host_plan
from mstar.engine.resources.kv.step_rows import step_rows
from mstar.engine.resources.kv.streams import Streams
from mstar.engine.resources.step import LabelRows

WIDTH = 6


def planned_rows(rows, spans, capacity=8):
    labels = {"main": LabelRows("main", tuple(rows), np.array(rows, np.int64), np.array(spans, np.int64), len(rows))}
    (planned,) = step_rows(labels, {}, Streams(None, 4, WIDTH, 16), capacity).planned
    return planned


def row_by_row(rows, spans, stored, table, page_size):
    qo_indptr, kv_indptr, indices, last, addresses = [0], [0], [], [], []
    for row, span in zip(rows, spans, strict=True):
        length = stored[row] + span
        pages = [int(table[row, p]) if p < WIDTH else SINK_PAGE for p in range(-(-length // page_size))]
        indices += pages
        qo_indptr.append(qo_indptr[-1] + span)
        kv_indptr.append(kv_indptr[-1] + len(pages))
        last.append((length - 1) % page_size + 1 if length else 0)
        addresses += [
            pages[p // page_size] * 2 * page_size + p % page_size for p in range(int(stored[row]), int(length))
        ]
    return qo_indptr, kv_indptr, indices, last, addresses


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 15), st.integers(0, 12), st.integers(0, 12)), unique_by=lambda r: r[0]),
    page_size=st.sampled_from([1, 4, 16]),
    is_decode=st.booleans(),
)
def test_a_plan_equals_the_pass_row_by_row(rows, page_size, is_decode):
    table = np.arange(1, 1 + 16 * WIDTH, dtype=np.int32).reshape(16, WIDTH)
    table[8:] = SINK_PAGE
    stored = np.zeros(16, np.int64)
    spans = []
    for row, start, span in rows:
        # Real streams fit their table; a padding row starts empty and may be longer than any stream.
        stored[row] = min(start, WIDTH * page_size) if row < 8 else 0
        spans.append(1 if is_decode else min(span, WIDTH * page_size - stored[row]) if row < 8 else 9 * span)
        stored[row] -= stored[row] + spans[-1] > WIDTH * page_size and row < 8
    rows = [row for row, _, _ in rows]
    plan = host_plan(planned_rows(rows, spans), stored, table, page_size)
    qo_indptr, kv_indptr, indices, last, addresses = row_by_row(rows, spans, stored, table, page_size)
    arrays = plan.indptrs
    assert arrays.qo_indptr.tolist() == qo_indptr
    assert arrays.paged_kv_indptr.tolist() == kv_indptr
    assert arrays.paged_kv_indices.tolist() == indices
    assert arrays.paged_kv_last_page_len.tolist() == last
    pages = np.diff(kv_indptr)
    assert arrays.kv_lens.tolist() == (np.maximum(pages - 1, 0) * page_size + last).tolist() == plan.kv_lens.tolist()
    assert plan.addresses.tolist() == addresses
    assert all(array.dtype == np.int32 for array in vars(arrays).values())
    assert plan.addresses.dtype == plan.starts.dtype == plan.kv_lens.dtype == np.int64


@pytest.mark.parametrize(
    ("length", "pages", "last"), [(0, 0, 0), (1, 1, 1), (3, 1, 3), (4, 1, 4), (5, 2, 1), (8, 2, 4)]
)
def test_a_full_last_page_counts_page_size_and_an_empty_stream_has_no_page(length, pages, last):
    table = np.arange(16 * WIDTH, dtype=np.int32).reshape(16, WIDTH)
    plan = host_plan(planned_rows([2], [0]), np.full(16, length, np.int64), table, 4)
    assert plan.indptrs.paged_kv_indptr.tolist() == [0, pages]
    assert plan.indptrs.paged_kv_last_page_len.tolist() == [last]


def test_iterating_kv_lens_gives_numpy_scalars():
    table = np.ones((16, WIDTH), np.int32)
    plan = host_plan(planned_rows([0, 1], [3, 5]), np.zeros(16, np.int64), table, 4)
    assert [type(n) for n in plan.indptrs.kv_lens] == [np.int32, np.int32]
