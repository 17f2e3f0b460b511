"""Requests through the conductor, over the real engine and KV cache."""

import contextlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.conductor.request import EngineRequest, FinishReason
from mstar.engine.resources.step import ADMITTED, AdmitOutcome, AllocationFailed
from mstar.utils.errors import ErrorCode, InvalidArgument, Unavailable

from .toy import BAD_INPUT, EOS, FAULT, OTHER_EOS, RAISES, VOCAB, Bench

STOP, LENGTH, CANCELLED = FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_a_budget_is_used_up_to_the_last_token(max_tokens):
    bench = Bench()
    rid = bench.submit([5, 6, 7], max_tokens)
    bench.run()
    assert bench.outcomes[rid].tokens == [5, 6, 7, 5, 6, 7, 5][:max_tokens]
    assert bench.outcomes[rid].finishes == [LENGTH]
    bench.assert_idle()


def test_a_budget_of_zero_ends_without_a_step():
    bench = Bench()
    rid = bench.submit([5], 0)
    bench.run()
    assert bench.outcomes[rid].tokens == []
    assert bench.outcomes[rid].finishes == [LENGTH]
    assert not bench.echo.steps


def test_one_token_frees_its_pages_in_the_same_step():
    bench = Bench()
    bench.submit([5] * 10, 1)
    bench.step()
    bench.assert_idle()


@pytest.mark.parametrize("eos", [EOS, OTHER_EOS])
def test_any_end_token_stops_and_is_no_output(eos):
    bench = Bench()
    rid = bench.submit([5, eos, 6], 10)
    bench.run()
    assert bench.outcomes[rid].tokens == [5]
    assert bench.outcomes[rid].finishes == [STOP]


def test_ignore_eos_goes_on_and_emits_it():
    bench = Bench()
    rid = bench.submit([5, EOS, OTHER_EOS, 6], 6, ignore_eos=True)
    bench.run()
    assert bench.outcomes[rid].tokens == [5, EOS, OTHER_EOS, 6, 5, EOS]
    assert bench.outcomes[rid].finishes == [LENGTH]


def test_a_requests_own_stop_ids_end_it_alone_and_also_with_ignore_eos():
    bench = Bench()
    first = bench.submit([5, 6, 7], 9, stop_ids=(7,), ignore_eos=True)
    second = bench.submit([5, 6, 7], 5, stop_ids=())
    third = bench.submit([5, 6, 7], 9, stop_ids=(50, 51, 6))
    bench.run()
    assert bench.outcomes[first].tokens == [5, 6]
    assert bench.outcomes[second].tokens == [5, 6, 7, 5, 6]
    assert bench.outcomes[third].tokens == [5]


def test_an_end_token_in_the_last_step_of_the_budget_is_a_stop():
    bench = Bench()
    rid = bench.submit([EOS], 1)
    bench.run()
    assert (bench.outcomes[rid].tokens, bench.outcomes[rid].finishes) == ([], [STOP])


@pytest.mark.parametrize(("prompt", "max_tokens", "expected"), [(62, 1, 1), (62, 5, 2), (63, 1, 1), (63, 5, 1)])
def test_the_context_limit_ends_generation(prompt, max_tokens, expected):
    bench = Bench(context=64)
    rid = bench.submit([5] * prompt, max_tokens)
    bench.run()
    assert len(bench.outcomes[rid].tokens) == expected
    assert bench.outcomes[rid].finishes == [LENGTH]


@pytest.mark.parametrize("prompt", [64, 65])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(prompt):
    with pytest.raises(InvalidArgument, match=rf"63 tokens \(context limit 64\), got {prompt}"):
        Bench(context=64).submit([5] * prompt, 1)


@pytest.mark.parametrize("prompt", [[], [-1], [VOCAB], [5, 2**31 - 1]])
def test_ids_outside_the_vocabulary_never_reach_the_engine(prompt):
    bench = Bench()
    with pytest.raises(InvalidArgument, match="prompt"):
        bench.submit(prompt)
    assert not bench.conductor.has_work()


def test_no_budget_is_what_context_and_cache_leave():
    bench = Bench(context=64)
    rid = bench.submit([5] * 10, None)
    small = Bench(context=1000, pages=8)
    other = small.submit([5] * 10, None)
    bench.run()
    small.run()
    assert len(bench.outcomes[rid].tokens) == 54
    assert len(small.outcomes[other].tokens) == 8 * 16 - 10


@pytest.mark.parametrize(("prompt", "max_tokens", "needed"), [(130, 10, 9), (100, 60, 10)])
def test_what_can_never_fit_is_refused_at_once_and_blocks_nobody(prompt, max_tokens, needed):
    bench = Bench(pages=8, context=8192, batch_tokens=2048)
    with pytest.raises(InvalidArgument, match=rf"8 pages of 16 tokens, got .*{needed} pages"):
        bench.submit([5] * prompt, max_tokens)
    rid = bench.submit([5] * 5, 3)
    bench.run(3)
    assert len(bench.outcomes[rid].tokens) == 3


def test_requests_wait_for_pages_in_order_of_arrival():
    bench = Bench(pages=4, page_size=16, context=64)
    first = bench.submit([5] * 30, 30)  # all four pages
    second = bench.submit([6] * 20, 20)
    third = bench.submit([7], 1)  # would fit sooner, but it came later
    assert (bench.conductor.num_running, bench.conductor.num_queued, bench.conductor.num_queued_tokens) == (1, 2, 21)
    while not bench.outcomes[first].finishes:
        bench.step()
        assert not bench.outcomes[third].tokens
    bench.run()
    assert [len(bench.outcomes[rid].tokens) for rid in (first, second, third)] == [30, 20, 1]
    bench.assert_idle()


def test_the_queue_holds_only_what_cannot_run_and_refuses_beyond_its_bound():
    bench = Bench(rows=2, queued=3)
    accepted = [bench.submit([5], 3) for _ in range(5)]
    for _ in range(4):
        with pytest.raises(Unavailable, match="max_queued_requests: at most 3"):
            bench.submit([5], 3)
    bench.run()
    assert all(bench.outcomes[rid].finishes == [LENGTH] for rid in accepted)
    assert bench.conductor.counters.refused["queue"] == 4
    bench.submit([5], 1)
    bench.run()


def test_a_tenant_that_fills_its_part_of_the_queue_shuts_out_nobody_else():
    bench = Bench(rows=2, queued=10, queued_per_tenant=3)
    greedy = [bench.submit([5], 3, tenant="greedy") for _ in range(5)]  # two of them run
    for _ in range(4):
        with pytest.raises(Unavailable, match=r"^max_queued_requests_per_tenant: at most 3 .* so many of 'greedy' do"):
            bench.submit([5], 3, tenant="greedy")
    unnamed = [bench.submit([5], 3) for _ in range(3)]  # all of no name are a tenant too
    with pytest.raises(Unavailable, match=r"^max_queued_requests_per_tenant: .* ''"):
        bench.submit([5], 3)
    other = bench.submit([5], 3, tenant="other")
    assert bench.conductor.counters.refused["queue"] == 5
    bench.conductor.cancel(greedy[-1])
    greedy[-1] = bench.submit([5], 3, tenant="greedy")
    bench.run()
    assert all(bench.outcomes[rid].finishes == [LENGTH] for rid in (*greedy, *unnamed, other))
    bench.assert_idle()


def test_queued_tokens_are_bounded_too():
    bench = Bench(rows=1, queued_tokens=20)
    bench.submit([5] * 30, 2)
    bench.submit([5] * 15, 2)
    with pytest.raises(Unavailable, match="max_queued_tokens: at most 20"):
        bench.submit([5] * 6, 2)
    bench.submit([5] * 5, 2)
    bench.run()


def test_a_draining_conductor_refuses_and_ends_what_it_has():
    bench = Bench()
    rid = bench.submit([5], 3)
    bench.conductor.drain()
    with pytest.raises(Unavailable, match="draining"):
        bench.submit([5], 3)
    bench.run()
    assert bench.outcomes[rid].finishes == [LENGTH]


def test_prefill_and_decode_take_turns():
    bench = Bench(rows=8, batch_tokens=8)
    bench.submit([5] * 8, 20)
    bench.step()
    for _ in range(4):
        bench.submit([6] * 8, 2)
    for _ in range(8):
        bench.step()
    assert [walk for walk, _ in bench.echo.steps] == ["prefill"] + ["decode", "prefill"] * 4


def test_prompts_are_packed_up_to_the_token_bound_and_a_longer_one_goes_alone():
    bench = Bench(batch_tokens=20)
    ids = [bench.submit([5] * length, 1) for length in (8, 12, 1, 30, 5)]
    bench.run()
    assert [rows for _, rows in bench.echo.steps] == [(ids[0], ids[1]), (ids[2],), (ids[3],), (ids[4],)]


def test_more_rows_than_a_step_takes_run_by_turns():
    bench = Bench(rows=6, pages=64, largest_batch=4)
    ids = [bench.submit([5], 9) for _ in range(6)]
    for _ in range(8):
        bench.step()
    counts = [len(bench.outcomes[rid].tokens) for rid in ids]
    assert max(counts) - min(counts) <= 1
    assert all(len(rows) <= 4 for _, rows in bench.echo.steps)
    bench.run()
    assert all(len(bench.outcomes[rid].tokens) == 9 for rid in ids)


def test_an_unchanged_set_of_rows_is_the_same_batch_object():
    bench = Bench()
    bench.submit([5], 5)
    bench.step()
    seen = []
    launch = bench.engine.launch
    bench.engine.launch = lambda batch: (seen.append(batch), launch(batch))[1]
    bench.step()
    bench.step()
    bench.submit([6], 5)
    bench.step()
    bench.step()
    assert seen[0] is seen[1]
    assert seen[-1] is not seen[1]


def test_a_row_with_broken_logits_fails_alone():
    bench = Bench()
    bad, good = bench.submit([5, FAULT, 5], 5), bench.submit([5, 6], 5)
    bench.run()
    assert bench.outcomes[bad].tokens == [5]
    assert [failure.code for failure in bench.outcomes[bad].failures] == [ErrorCode.INTERNAL]
    assert "not finite" in bench.outcomes[bad].failures[0].message
    assert bench.outcomes[good].tokens == [5, 6, 5, 6, 5]
    assert bench.conductor.counters.row_faults == 1
    bench.assert_idle()


def test_a_row_whose_inputs_break_fails_alone():
    bench = Bench()
    bad, good = bench.submit([BAD_INPUT], 5), bench.submit([5, 6], 3)
    bench.run()
    assert "no such input" in bench.outcomes[bad].failures[0].message
    assert bench.outcomes[good].tokens == [5, 6, 5]
    bench.assert_idle()


def test_a_forward_that_raises_fails_the_row_it_raises_for_and_the_engine_goes_on():
    bench = Bench()
    bad, beside = bench.submit([5, RAISES], 5), bench.submit([5, 6], 5)
    bench.run()
    later = bench.submit([7], 2)
    bench.run()
    assert "the forward broke" in bench.outcomes[bad].failures[0].message
    assert bench.outcomes[beside].tokens == [5, 6, 5, 6, 5]
    assert bench.outcomes[later].tokens == [7, 7]
    bench.assert_idle()


def test_cancel_in_the_queue_runs_no_prefill():
    bench = Bench(rows=1)
    first, second = bench.submit([5], 3), bench.submit([6], 3)
    bench.conductor.cancel(second)
    bench.run()
    assert bench.outcomes[second].finishes == [CANCELLED]
    assert all(rows == (first,) for _, rows in bench.echo.steps)


def test_cancel_between_steps_frees_the_row_at_once_and_is_idempotent():
    bench = Bench()
    rid, other = bench.submit([5], 9), bench.submit([6], 4)
    bench.step()
    for _ in range(2):
        bench.conductor.cancel(rid)
    assert bench.conductor.num_running == 1
    bench.run()
    bench.conductor.cancel(rid)
    bench.conductor.cancel(12345)
    assert not bench.conductor.has_work()
    assert (bench.outcomes[rid].tokens, bench.outcomes[rid].finishes) == ([5], [CANCELLED])
    assert bench.outcomes[other].tokens == [6] * 4
    bench.assert_idle()


def test_finish_ends_silently_and_counts_what_was_made_in_vain():
    bench = Bench(rows=1)
    rid, queued = bench.submit([5], 9), bench.submit([6], 2)
    for _ in range(3):
        bench.step()
    bench.conductor.finish(rid, 1)
    bench.conductor.finish(rid, 1)
    bench.conductor.finish(queued, 0)
    assert not bench.conductor.has_work()
    assert bench.outcomes[rid].finishes == []
    assert bench.conductor.counters.overshoot_tokens == 2
    bench.assert_idle()


def test_reports_name_requests_by_client_and_ticket():
    bench = Bench()
    ids = np.array([5], "<i4").tobytes()
    for client, ticket in ((3, 70), (4, 71)):
        bench.conductor.submit(
            EngineRequest(prompt_ids=ids, max_tokens=1, temperature=0.0), client=client, ticket=ticket
        )
    report = bench.conductor.step()
    assert sorted(zip(report.clients.tolist(), report.tickets.tolist(), strict=True)) == [(3, 70), (4, 71)]
    assert (report.tokens.dtype, report.finish.dtype) == (np.int32, np.uint8)


@pytest.mark.parametrize("steps_ahead", [0, 1, 4])
def test_without_reservations_the_oldest_go_on_and_everybody_ends(steps_ahead):
    bench = Bench(pages=8, page_size=4, context=64, rows=8, admission_fit="none", steps_ahead=steps_ahead)
    ids = [bench.submit([5] * 4, 28) for _ in range(6)]  # eight pages each in the end, eight in all
    bench.run()
    assert bench.conductor.counters.refused_admissions > 0
    assert bench.outcomes[ids[0]].finishes == [LENGTH]
    assert len(bench.outcomes[ids[0]].tokens) == 28
    for rid in ids:
        assert bench.outcomes[rid].num_ends == 1
        for failure in bench.outcomes[rid].failures:
            assert failure.code is ErrorCode.UNAVAILABLE
    bench.assert_idle()


@pytest.mark.parametrize("steps_ahead", [0, 1, 4])
def test_a_lone_request_that_exhausts_the_cache_ends_with_length(steps_ahead):
    bench = Bench(steps_ahead=steps_ahead)
    full = AdmitOutcome(ok=False, reason=AllocationFailed("no page is free"))
    bench.mood.moods = itertools.chain([ADMITTED] * 5, itertools.repeat(full))
    rid = bench.submit([5] * 4, 30)
    bench.run()
    assert bench.outcomes[rid].finishes == [LENGTH]
    assert len(bench.outcomes[rid].tokens) == 5
    bench.assert_idle()


def test_ids_and_order_of_the_report_belong_together_when_rows_fall_out():
    bench = Bench()
    ids = [bench.submit([token, token + 1], 3) for token in (5, BAD_INPUT, 7, 9)]
    bench.run()
    assert [bench.outcomes[rid].tokens for rid in ids] == [[5, 6, 5], [], [7, 8, 7], [9, 10, 9]]


OPERATION = st.one_of(
    st.tuples(st.just("submit"), st.lists(st.integers(0, 20), min_size=1, max_size=30), st.integers(0, 30)),
    st.tuples(st.just("cancel"), st.integers(0, 40)),
    st.tuples(st.just("finish"), st.integers(0, 40)),
    st.tuples(st.just("step"), st.integers(1, 5)),
    st.tuples(st.just("poison"), st.sampled_from([FAULT, RAISES, BAD_INPUT])),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(OPERATION, max_size=60))
def test_every_accepted_request_ends_once_and_everything_it_held_comes_back(operations):
    bench = Bench(pages=12, page_size=4, context=48, rows=4, queued=6, batch_tokens=24)
    finished_outside: set[int] = set()

    def submit(prompt, max_tokens):
        with contextlib.suppress(InvalidArgument, Unavailable):
            bench.submit(prompt, max_tokens)

    for operation in operations:
        match operation:
            case ("submit", prompt, max_tokens):
                submit(prompt, max_tokens)
            case ("poison", token):
                submit([token], 3)
            case ("cancel", rid):
                bench.conductor.cancel(rid)
            case ("finish", rid):
                was_open = rid in bench.outcomes and bench.outcomes[rid].num_ends == 0
                before = bench.conductor.counters.finished[STOP]
                bench.conductor.finish(rid, 0)
                if was_open and bench.conductor.counters.finished[STOP] > before:
                    finished_outside.add(rid)
            case ("step", count):
                for _ in range(count):
                    bench.step()
                    assert bench.kv.promised_pages <= bench.kv.free_pages
    bench.run()
    for rid, outcome in bench.outcomes.items():
        assert outcome.num_ends == (0 if rid in finished_outside else 1)
    assert bench.conductor.counters.refused_admissions == 0
    bench.assert_idle()
