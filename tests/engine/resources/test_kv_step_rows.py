"""A step's segments as streams: label by label, real rows apart from padding, combined where planned as one."""

import numpy as np
import pytest

from mstar.engine.resources.kv.pages import PageArena
from mstar.engine.resources.kv.step_rows import group_by_plan_label, step_rows
from mstar.engine.resources.kv.streams import Streams
from mstar.engine.resources.step import LabelRows

CAPACITY, TOTAL = 4, 6


def label_rows(label, rows, spans):
    ids = tuple(10 + row if row < CAPACITY else CAPACITY - 2 - row for row in rows)
    return LabelRows(label, ids, np.array(rows), np.array(spans), sum(row < CAPACITY for row in rows))


def resolve(*parts, combined=None):
    labels = {part.label: part for part in parts}
    return step_rows(labels, combined or {}, Streams(PageArena(9), 4, 3, TOTAL), CAPACITY)


@pytest.mark.parametrize(
    ("combined", "groups"),
    [
        ({}, {"a": "a", "b": "b", "c": "c"}),
        ({("a", "c"): "x"}, {"b": "b", "x": "ac"}),
        ({("c", "a"): "x", ("b",): "y"}, {"x": "ca", "y": "b"}),
    ],
)
def test_plan_labels(combined, groups):
    labels = {name: label_rows(name, [0], [1]) for name in "abc"}
    found = group_by_plan_label(labels, combined)
    assert {label: "".join(part.label for part in group) for label, group in found.items()} == groups
    assert list(found) == list(groups)


def test_real_segments_come_label_by_label_and_know_their_owners():
    rows = resolve(label_rows("main", [2, 0, 4], [3, 0, 1]), label_rows("b", [1, 5], [2, 2]))
    assert rows.rows.tolist() == [2, 0, 1]
    assert rows.streams.tolist() == [2, 0, TOTAL + 1]
    assert rows.spans.tolist() == [3, 0, 2]
    assert rows.growing.tolist() == [2, TOTAL + 1]
    assert rows.main.tolist() == [2]
    assert [rows.owner_of(i) for i in range(3)] == [(12, "main"), (10, "main"), (11, "b")]


def test_a_plan_has_the_padding_rows_too():
    (plan,) = resolve(label_rows("main", [2, 0, 4], [3, 0, 1])).planned
    assert plan.is_real.tolist() == [1, 1, 0]
    assert (plan.num_real, plan.num_tokens, plan.is_decode) == (2, 4, False)
    assert plan.qo_indptr.tolist() == [0, 3, 3, 4]


@pytest.mark.parametrize(("spans", "is_decode"), [([1, 1, 1], True), ([1, 1, 0], False), ([1, 2, 1], False)])
def test_a_decode_step_has_one_token_in_every_row(spans, is_decode):
    assert resolve(label_rows("main", [2, 0, 4], spans)).is_decode is is_decode
    assert resolve(label_rows("main", [1], [1]), label_rows("b", [2, 0, 4], spans)).is_decode is is_decode
