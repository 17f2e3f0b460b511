"""Padding rows: master rows and ids beyond those of all requests, the same for the life of an engine."""

import numpy as np

from mstar.engine.padding import PaddingRows


class Log:
    def __init__(self):
        self.ingested, self.resets = [], []

    def ingest_request(self, request_id, row, config):
        self.ingested.append((request_id, row, config))

    def reset_rows(self, request_ids, rows, free=False):
        self.resets.append((tuple(request_ids), list(rows), free))


def test_rows_begin_at_the_capacity_and_ids_at_minus_2():
    padding = PaddingRows(capacity=5)
    first, second = padding.pool("0_slot0", 2), padding.pool("0_slot1", 3)
    assert (first.ids, first.rows.tolist()) == ((-2, -3), [5, 6])
    assert (second.ids, second.rows.tolist()) == ((-4, -5, -6), [7, 8, 9])
    assert padding.total == 5
    assert first.rows.dtype == np.int64


def test_a_pool_is_made_once():
    padding = PaddingRows(5)
    assert padding.pool("a", 2) is padding.pool("a", 2)
    assert padding.total == 2


def test_a_pool_without_rows_is_fine():
    assert PaddingRows(5).pool("region", 0).ids == ()


def test_stand_ins_have_default_parameters_and_room_for_one_token():
    info = PaddingRows(5).pool("a", 1).infos[0]
    assert (info.request_id, info.row, info.max_tokens, info.prompt_ids) == (-2, 5, 1, None)
    assert not info.resource_configs


def test_rows_are_made_known_to_every_resource():
    pool, resources = PaddingRows(5).pool("a", 2), [Log(), Log()]
    pool.ingest(resources)
    assert [log.ingested for log in resources] == [[(-2, 5, None), (-3, 6, None)]] * 2


def test_a_tail_is_what_a_batch_leaves_of_its_bucket():
    pool, log = PaddingRows(5).pool("a", 4), Log()
    tail = pool.tail(1, 3)
    assert (tail.ids, tail.rows) == ((-3, -4), [6, 7])
    tail.reset([log])
    pool.reset([log], 2, 4, free=True)
    assert log.resets == [((-3, -4), [6, 7], False), ((-4, -5), [7, 8], True)]
