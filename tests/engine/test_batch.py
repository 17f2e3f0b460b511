"""What a step is asked for."""

import numpy as np
import pytest

from mstar.engine.batch import Batch
from mstar.engine.inputs import RequestInfo


def test_a_batch_keeps_its_rows_order_and_is_not_changed_by_its_maker():
    infos = [RequestInfo(3), RequestInfo(1)]
    batch = Batch("LLM", "decode", infos)
    infos.reverse()
    assert batch.request_ids == (3, 1)
    assert [info.request_id for info in batch.infos] == [3, 1]


def test_batches_are_told_apart_by_identity():
    infos = [RequestInfo(3)]
    assert Batch("LLM", "decode", infos) != Batch("LLM", "decode", infos)


@pytest.mark.parametrize("sizes", [(), (2, 1)])
def test_rows_of_one_walk_in_a_row_are_a_run(sizes):
    walks = ("decode", "decode", "prefill")
    batch = Batch("LLM", "mixed", [RequestInfo(i) for i in range(3)], walks, walk_sizes=sizes)
    assert batch.runs == (("decode", slice(0, 2)), ("prefill", slice(2, 3)))


def test_rows_without_walks_of_their_own_are_one_run():
    assert Batch("LLM", "decode", [RequestInfo(3), RequestInfo(1)]).runs == (("decode", slice(0, 2)),)


def test_ids_that_are_there_already_name_the_rows():
    assert Batch("LLM", "decode", [RequestInfo(3), RequestInfo(1)], ids=np.array([3, 1])).request_ids == (3, 1)
