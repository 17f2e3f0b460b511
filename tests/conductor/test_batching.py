"""Which rows a step has: turns between walks, mixed steps, and the bounds of both."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.conductor.batching import Batcher
from mstar.conductor.lanes import Lane
from mstar.conductor.queue import Waiting
from mstar.conductor.request import EngineRequest
from mstar.conductor.rows import RowTable
from mstar.engine.inputs import RequestInfo

from .toy import Bench

PREFILL, DECODE, VISION = 0, 1, 2


def table_of(*rows: tuple[int, int]) -> RowTable:
    """Rows of (state, prompt tokens); request ids are 10 more than rows."""
    table = RowTable(len(rows))
    for row, (state, prompt) in enumerate(rows):
        request = EngineRequest(prompt_ids=bytes(4 * prompt), max_tokens=9, temperature=0.0)
        table.join(Waiting(row + 10, 0, row, request, 9, RequestInfo(row + 10, row)), state)
    return table


def batcher(
    *,
    mixed_rows=None,
    mixed_sizes=(),
    rows=None,
    prefill_sizes=(),
    batch_tokens=100,
    mixed=True,
    splits=False,
    pace=None,
):
    plain = [
        Lane("LLM", "prefill", (PREFILL,), ("prefill",), rows, prefill_sizes, splits),
        Lane("LLM", "decode", (DECODE,), ("decode",), rows),
        Lane("encoder", "vision", (VISION,), ("vision",), rows),
    ]
    combined = [Lane("LLM", "mixed", (DECODE, PREFILL), ("decode", "prefill"), mixed_rows, mixed_sizes, splits)]
    return Batcher(plain, combined if mixed else [], PREFILL, batch_tokens, pace)


def run(batcher: Batcher, table: RowTable, steps: int = 1) -> list[tuple[str, list[int]]]:
    """(walk, rows) of each step; no row's state changes."""
    picked = []
    for _ in range(steps):
        pick = batcher.pick(table)
        batcher.ran(table, pick)
        picked.append((pick.batch.graph_walk, pick.rows.tolist()))
    return picked


def test_nobody_ready_is_no_step():
    assert batcher().pick(RowTable(4)) is None
    table = table_of((DECODE, 3))
    table.hold(np.array([0]))
    assert batcher().pick(table) is None


def test_a_mixed_step_has_all_rows_of_one_token_first_then_whole_prompts_as_they_joined():
    table = table_of((PREFILL, 30), (DECODE, 5), (PREFILL, 60), (DECODE, 5), (PREFILL, 20))
    table.joined[0] = 99  # came first, joined last
    pick = batcher().pick(table)
    assert pick.batch.graph_walk == "mixed"
    assert pick.rows.tolist() == [1, 3, 2, 4]
    assert pick.request_ids.tolist() == list(pick.batch.request_ids) == [11, 13, 12, 14]
    assert pick.batch.row_walks == ("decode", "decode", "prefill", "prefill")
    assert [info.row for info in pick.batch.infos] == [1, 3, 2, 4]


@pytest.mark.parametrize(
    ("bounds", "rows"),
    [
        ({}, [0, 1, 2, 3]),
        ({"mixed_rows": 3}, [0, 1, 2]),
        ({"batch_tokens": 40}, [0, 1, 2]),
        ({"batch_tokens": 39}, None),
        ({"mixed_sizes": (42,)}, [0, 1, 2]),  # two rows of one token, and the first prompt
        ({"mixed_sizes": (41,)}, None),
        ({"mixed_rows": 2}, None),
        ({"mixed_rows": 1}, None),
    ],
)
def test_prompts_join_a_mixed_step_as_far_as_its_rows_and_tokens_go(bounds, rows):
    table = table_of((DECODE, 5), (DECODE, 5), (PREFILL, 40), (PREFILL, 50))
    walk, picked = run(batcher(**bounds), table)[0]
    assert (walk, picked) == (("mixed", rows) if rows else ("prefill", picked))


def test_a_prompt_too_long_to_be_mixed_takes_turns_with_those_that_generate():
    table = table_of((DECODE, 5), (PREFILL, 500), (PREFILL, 5))
    assert run(batcher(), table, 4) == [("prefill", [1]), ("decode", [0])] * 2


def test_without_a_combined_walk_prompts_and_decode_take_turns():
    table = table_of((DECODE, 5), (PREFILL, 5))
    assert run(batcher(mixed=False), table, 4) == [("prefill", [1]), ("decode", [0])] * 2


def test_other_nodes_get_their_turn_beside_mixed_steps():
    table = table_of((DECODE, 5), (PREFILL, 5), (VISION, 5))
    assert [walk for walk, _ in run(batcher(), table, 4)] == ["mixed", "vision"] * 2


def test_a_mixed_step_counts_as_a_turn_of_both_its_walks():
    table = table_of((DECODE, 5), (PREFILL, 5), (VISION, 5))
    each = batcher()
    run(each, table)
    table.move(np.array([1]), DECODE)
    assert [walk for walk, _ in run(each, table, 3)] == ["vision", "decode", "vision"]


def test_a_prefill_step_keeps_to_its_captures():
    table = table_of((PREFILL, 30), (PREFILL, 30), (PREFILL, 30))
    assert run(batcher(prefill_sizes=(64,)), table) == [("prefill", [0, 1])]
    assert run(batcher(prefill_sizes=(8,)), table) == [("prefill", [0])]  # a longer one goes alone


def test_asking_again_gives_the_same_pick_until_it_ran():
    table = table_of((DECODE, 5), (PREFILL, 5))
    each = batcher()
    first = each.pick(table)
    assert each.pick(table) is first


def test_the_batch_is_the_same_object_while_its_members_are():
    table = table_of((DECODE, 5), (DECODE, 5), (DECODE, 5))
    each = batcher()
    first = each.pick(table).batch
    each.ran(table, each.pick(table))
    assert each.pick(table).batch is first
    table.leave(1)
    assert each.pick(table).batch is not first


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.tuples(st.sampled_from([PREFILL, DECODE, DECODE, VISION]), st.integers(1, 120)), min_size=1),
    bound=st.one_of(st.none(), st.integers(1, 6)),
    sizes=st.lists(st.integers(1, 150), max_size=3, unique=True).map(sorted).map(tuple),
    splits=st.booleans(),
)
def test_nobody_starves_and_no_bound_is_passed(rows, bound, sizes, splits):
    table = table_of(*rows)
    each = batcher(rows=bound, mixed_rows=bound, mixed_sizes=sizes, prefill_sizes=sizes, splits=splits)
    prompts = {row for row, (state, _) in enumerate(rows) if state == PREFILL}
    ran: Counter[int] = Counter()
    for _ in range(200 * len(rows)):
        pick = each.pick(table)
        each.ran(table, pick)
        ran.update(pick.rows.tolist())
        own = np.array([row for row in pick.rows.tolist() if row in prompts], np.int64)
        assert bound is None or pick.rows.size <= bound
        brought = np.empty(0, np.int64)
        if own.size:
            brought = pick.prompt_tokens[pick.prompt_tokens > 0]
            assert brought.size == own.size
            assert (brought <= table.prompt_left[own]).all()
            assert (brought == table.prompt_left[own])[: own.size - splits].all(), "only the last one is split"
            assert (own.size == 1 and not splits) or brought.sum() <= min([100, *sizes[-1:]])
        if pick.batch.graph_walk == "mixed":
            assert own.size
            assert not sizes or brought.sum() + pick.rows.size - own.size <= sizes[-1]
        table.bring(own, brought)
        whole = own[table.prompt_left[own] == 0]
        table.move(whole, DECODE)
        prompts -= set(whole.tolist())
        if not prompts and len(ran) == len(rows):
            break
    assert len(ran) == len(rows)
    assert not prompts


def test_mixed_steps_give_each_row_its_solo_tokens_and_route_it_by_its_own_walk():
    bench = Bench(mixed=True)
    first = bench.submit([5, 6, 7], 8)
    bench.step()
    later = [bench.submit([8, 9], 4), bench.submit([10], 3)]
    bench.step()
    assert bench.echo.steps[-1] == ("mixed", (first, *later))
    assert bench.echo.spans[-1] == (1, 2, 1)
    bench.run()
    assert bench.outcomes[first].tokens == [5, 6, 7, 5, 6, 7, 5, 6]
    assert [bench.outcomes[rid].tokens for rid in later] == [[8, 9, 8, 9], [10, 10, 10]]
    assert [walk for walk, _ in bench.echo.steps][:3] == ["prefill", "mixed", "decode"]
    bench.assert_idle()


def test_no_prompt_waits_for_a_turn_where_it_can_be_mixed():
    bench = Bench(rows=8, mixed=True, batch_tokens=8)
    bench.submit([5] * 8, 20)
    bench.step()
    for _ in range(4):
        bench.submit([6] * 8, 2)
    for _ in range(5):
        bench.step()
    assert [walk for walk, _ in bench.echo.steps] == ["prefill", *["mixed"] * 4, "decode"]
    assert np.all([len(rows) >= 2 for walk, rows in bench.echo.steps if walk == "mixed"])
