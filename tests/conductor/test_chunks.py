"""Prompts in parts: what each step takes, that no token changes, and that rows that generate never wait longer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.conductor.request import FinishReason
from mstar.engine.resources.step import ADMITTED, AdmitOutcome, AllocationFailed

from .test_batching import DECODE, PREFILL, batcher, table_of
from .toy import FAULT, RAISES, Bench


def brought(pick) -> list[tuple[int, int]]:
    """(row, prompt tokens) of the rows that bring some."""
    places = pick.prompt_tokens.nonzero()[0]
    return list(zip(pick.rows[places].tolist(), pick.prompt_tokens[places].tolist(), strict=True))


def test_the_first_prompt_that_does_not_fit_brings_what_room_is_left():
    table = table_of((DECODE, 5), (PREFILL, 30), (PREFILL, 90), (PREFILL, 5))
    pick = batcher(splits=True).pick(table)
    assert pick.rows.tolist() == [0, 1, 2]
    assert brought(pick) == [(1, 30), (2, 70)]
    assert pick.batch.prompt_parts == (None, (0, 30), (0, 70))


def test_a_prompt_that_has_begun_comes_before_older_ones():
    table = table_of((PREFILL, 150), (PREFILL, 60))
    table.joined[0] = 99
    each = batcher(splits=True)
    table.move(np.array([1]), -1)  # not there yet
    pick = each.pick(table)
    each.ran(table, pick)
    table.bring(pick.rows, pick.prompt_tokens)
    table.move(np.array([1]), PREFILL)
    pick = each.pick(table)
    assert brought(pick) == [(0, 50), (1, 50)]
    assert pick.batch.prompt_parts == ((100, 150), (0, 50))


def test_parts_of_a_prompt_are_steps_of_their_own_to_the_engine():
    table = table_of((PREFILL, 250))
    each, batches = batcher(splits=True), []
    for _ in range(3):
        assert each.pick(table).batch is each.pick(table).batch
        pick = each.pick(table)
        batches.append(pick.batch)
        each.ran(table, pick)
        table.bring(pick.rows, pick.prompt_tokens)
    assert [batch.prompt_parts for batch in batches] == [((0, 100),), ((100, 200),), ((200, 250),)]


def test_a_step_is_cut_to_the_captured_size_that_it_fills():
    table = table_of((DECODE, 5), (DECODE, 5), (PREFILL, 300))
    each = batcher(splits=True, batch_tokens=64, mixed_sizes=(32, 64, 128))
    assert brought(each.pick(table)) == [(2, 62)]
    table.bring(np.array([2]), np.array([240]))
    assert brought(each.pick(table)) == [(2, 60)]  # nothing more waits: no reason to cut


def test_prompts_whose_whole_fits_are_not_named_in_parts():
    table = table_of((DECODE, 5), (PREFILL, 30))
    assert batcher(splits=True).pick(table).batch.prompt_parts is None


def test_a_long_prompt_lets_rows_that_generate_on_at_every_step():
    bench = Bench(mixed=True, chunked=True, batch_tokens=8, context=128, steps_ahead=0)
    first = bench.submit([5, 6, 7], 40)
    bench.step()
    late = bench.submit(list(range(10, 60)), 3)
    for _ in range(7):
        bench.step()
        assert bench.echo.steps[-1] == ("mixed", (first, late))
    assert bench.echo.spans[-7:] == [(1, 8)] * 6 + [(1, 2)]
    assert bench.outcomes[late].tokens == [10]
    assert len(bench.outcomes[first].tokens) == 8
    bench.run()
    assert bench.outcomes[late].tokens == [10, 11, 12]
    bench.assert_idle()


def test_without_it_a_long_prompt_has_a_step_of_its_own():
    bench = Bench(mixed=True, chunked=False, batch_tokens=8, context=128)
    bench.submit([5, 6, 7], 40)
    bench.step()
    late = bench.submit(list(range(10, 60)), 3)
    for _ in range(2):
        bench.step()
    assert bench.echo.steps[-1] == ("prefill", (late,))
    assert bench.echo.spans[-1] == (50,)


def test_logprobs_of_a_prompt_in_parts_are_told_together_with_its_first_token():
    bench = Bench(mixed=True, chunked=True, batch_tokens=4, context=128)
    prompt = list(range(10, 25))
    asked = bench.submit(prompt, 2, num_prompt_logprobs=2)
    bench.run()
    (records,) = bench.outcomes[asked].prompt_logprobs
    assert records["rank"].tolist() == prompt[1:]
    bench.assert_idle()


def test_what_was_heard_of_a_prompt_goes_with_its_request():
    bench = Bench(rows=1, chunked=True, batch_tokens=4, context=128)
    gone = bench.submit(list(range(10, 25)), 2, num_prompt_logprobs=0)
    bench.step()
    bench.conductor.cancel(gone)
    asked = bench.submit([30, 31, 32], 2, num_prompt_logprobs=0)
    bench.run()
    (records,) = bench.outcomes[asked].prompt_logprobs
    assert records["rank"].tolist() == [31, 32]
    assert not bench.outcomes[gone].prompt_logprobs
    assert not bench.conductor._table.heard
    bench.assert_idle()


@pytest.mark.parametrize("steps_ahead", [0, 1, 4])
@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_cancel_between_parts_frees_everything(num_steps, steps_ahead):
    bench = Bench(mixed=True, chunked=True, batch_tokens=8, context=128, steps_ahead=steps_ahead)
    other = bench.submit([5, 6], 6)
    gone = bench.submit(list(range(10, 60)), 3)
    for _ in range(num_steps):
        bench.step()
    bench.conductor.cancel(gone)
    bench.conductor.cancel(gone)
    bench.run()
    assert bench.outcomes[gone].finishes == [FinishReason.CANCELLED]
    assert bench.outcomes[gone].tokens == []
    assert bench.outcomes[other].tokens == [5, 6] * 3
    assert bench.conductor.counters.discarded_tokens <= steps_ahead
    bench.assert_idle()


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_deadline_ends_a_request_between_parts(steps_ahead):
    bench = Bench(chunked=True, batch_tokens=4, context=128, steps_ahead=steps_ahead)
    late = bench.submit(list(range(10, 40)), 2, deadline_ns=2000)
    bench.step()
    bench.now_ns = 3000
    bench.run()
    assert bench.outcomes[late].finishes == [FinishReason.TIMEOUT]
    assert len(bench.echo.steps) <= 1 + steps_ahead
    bench.assert_idle()


def test_spoilt_logits_of_a_part_that_draws_nothing_end_nobody():
    bench = Bench(mixed=True, chunked=True, batch_tokens=4, context=128)
    spoilt = bench.submit([FAULT, *range(10, 20)], 3)
    for _ in range(2):
        bench.step()
    assert not bench.outcomes[spoilt].failures
    bench.run()
    assert len(bench.outcomes[spoilt].failures) == 1, "its last part draws"
    assert bench.conductor.counters.row_faults == 1
    bench.assert_idle()


def test_parts_run_alone_where_their_step_fails():
    bench = Bench(mixed=True, chunked=True, batch_tokens=4, context=128)
    good, bad = bench.submit([5, 6], 12), bench.submit([7, RAISES], 3)
    bench.step()
    late = bench.submit(list(range(10, 20)), 2)
    bench.run()
    assert bench.outcomes[good].tokens == [5, 6] * 6
    assert bench.outcomes[late].tokens == [10, 11]
    assert len(bench.outcomes[bad].failures) == 1
    bench.assert_idle()


def test_a_refused_part_is_asked_for_again():
    bench = Bench(mixed=True, chunked=True, batch_tokens=4, context=128)
    full = AdmitOutcome(ok=False, reason=AllocationFailed("no room"))
    bench.mood.moods = iter([ADMITTED, ADMITTED, full])
    first = bench.submit([5, 6], 4)
    bench.step()
    late = bench.submit(list(range(10, 20)), 2)
    bench.run()
    assert bench.outcomes[first].tokens == [5, 6] * 2
    assert bench.outcomes[late].tokens == [10, 11]
    assert bench.conductor.counters.refused_admissions == 1
    of_prompt = [span[-1] for (_, ids), span in zip(bench.echo.steps, bench.echo.spans, strict=True) if late in ids]
    assert of_prompt == [4, 4, 2, 1]
    bench.assert_idle()


def test_a_cached_prefix_is_left_out_of_the_first_part():
    bench = Bench(chunked=True, batch_tokens=8, context=128, page_size=4)
    prompt = list(range(10, 40))
    bench.submit(prompt, 2)
    bench.run()
    before = len(bench.echo.spans)
    again = bench.submit(prompt, 2)
    bench.run()
    spans = [span for (walk, _), span in zip(bench.echo.steps, bench.echo.spans, strict=True) if walk == "prefill"]
    assert sum(span for (span,) in spans) < 2 * len(prompt)
    assert len(bench.echo.spans) - before < before
    assert bench.outcomes[again].tokens == [10, 11]


@pytest.mark.parametrize("steps_ahead", [0, 1, 4, 8])
def test_what_was_generated_is_found_again_however_many_steps_were_ahead(steps_ahead):
    bench = Bench(chunked=True, prefix_cache=True, page_size=4, context=128, steps_ahead=steps_ahead)
    prompt = list(range(10, 18))
    first = bench.submit(prompt, 64)
    bench.run()
    bench.submit(prompt + bench.outcomes[first].tokens, 2)
    bench.run()
    assert bench.conductor.counters.cached_prompt_tokens == 68


@settings(max_examples=60, deadline=None)
@given(data=st.data(), mixed=st.booleans(), steps_ahead=st.sampled_from([0, 1, 4]), batch_tokens=st.integers(1, 20))
def test_any_traffic_in_parts_gives_everybody_his_solo_tokens(data, mixed, steps_ahead, batch_tokens):
    bench = Bench(
        rows=4, mixed=mixed, chunked=True, batch_tokens=batch_tokens, context=64, pages=24, page_size=8,
        steps_ahead=steps_ahead, prefix_cache=data.draw(st.booleans()),
    )  # fmt: skip
    wanted, cancelled = {}, set()
    for _ in range(data.draw(st.integers(1, 8))):
        prompt = data.draw(st.lists(st.integers(10, 39), min_size=1, max_size=50))
        max_tokens = data.draw(st.integers(1, 12))
        request_id = bench.submit(prompt, max_tokens)
        wanted[request_id] = [prompt[i % len(prompt)] for i in range(min(max_tokens, 64 - len(prompt)))]
        for _ in range(data.draw(st.integers(0, 3))):
            bench.step()
        if data.draw(st.integers(0, 5)) == 0:
            bench.conductor.cancel(request_id)
            cancelled.add(request_id)
    bench.run()
    for request_id, tokens in wanted.items():
        outcome = bench.outcomes[request_id]
        assert outcome.num_ends == 1
        if request_id in cancelled:
            assert outcome.tokens == tokens[: len(outcome.tokens)]
        else:
            assert outcome.tokens == tokens
    for (walk, ids), spans in zip(bench.echo.steps, bench.echo.spans, strict=True):
        if walk != "decode":
            assert sum(spans) <= batch_tokens + len(ids)
    bench.kv.check_pages()
