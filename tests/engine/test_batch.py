"""What a step is asked for."""

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
