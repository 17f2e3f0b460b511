"""What ends a row and how it is told: stop ids, end tokens, grammars, faults of a step; with and without run-ahead."""

from __future__ import annotations

import itertools

import pytest

from mstar.conductor.request import (
    NO_TOKEN,
    EngineRequest,
    FinishReason,
    Guide,
    LogitEdits,
    stop_code,
    stop_id_of,
)
from mstar.utils.errors import ErrorCode

from .toy import BREAKS, COMPLETES, EOS, FAULT, NO_CHOICE, OTHER_EOS, Bench

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
GUIDE = Guide("regex", "quick")


@pytest.fixture(params=[0, 1, 4], ids=["plain", "ahead", "queued"])
def bench(request):
    return Bench(steps_ahead=request.param)


@pytest.mark.parametrize(
    ("prompt", "fields", "tokens", "ends_with"),
    [
        ([5, EOS, 6], {}, [5], NO_TOKEN),
        ([5, 9, 6], {"stop_ids": (9,)}, [5], stop_code(9)),
        ([5, EOS, 9], {"stop_ids": (9,)}, [5], NO_TOKEN),
        ([5, EOS, 9], {"stop_ids": (9,), "ignore_eos": True}, [5, EOS], stop_code(9)),
        ([5, EOS, 9], {"stop_ids": (9, EOS), "ignore_eos": True}, [5], stop_code(EOS)),
        ([5, EOS, 9], {"stop_ids": (EOS,)}, [5], stop_code(EOS)),  # the request's own word
        ([0, 5], {"stop_ids": (0,), "ignore_eos": True}, [], stop_code(0)),
    ],
)
def test_the_last_row_names_the_stop_id_that_ended_it(bench, prompt, fields, tokens, ends_with):
    rid = bench.submit(prompt, 9, **fields)
    bench.run()
    outcome = bench.outcomes[rid]
    assert (outcome.tokens, outcome.ends_with, outcome.finishes) == (tokens, ends_with, [STOP])
    bench.assert_idle()


def test_ignored_end_tokens_are_output_to_the_last_token_and_own_stop_ids_still_stop(bench):
    ignoring = bench.submit([5, 6, OTHER_EOS, EOS], 10, ignore_eos=True)
    stopped = bench.submit([5, 6, OTHER_EOS, 7], 10, ignore_eos=True, stop_ids=(7,))
    bench.run()
    assert len(bench.outcomes[ignoring].tokens) == 10
    assert bench.outcomes[ignoring].finishes == [LENGTH]
    assert (bench.outcomes[stopped].tokens, bench.outcomes[stopped].finishes) == ([5, 6, OTHER_EOS], [STOP])


def test_a_code_is_no_token_and_gives_its_id_back():
    assert [stop_id_of(stop_code(token)) for token in (0, 1, 151_935)] == [0, 1, 151_935]
    assert stop_id_of(NO_TOKEN) is None
    assert stop_id_of(0) is None


def test_a_complete_grammar_ends_its_row_with_the_token_that_completed_it(bench):
    guided = bench.submit([5, COMPLETES, 6], 9, guide=GUIDE)
    other = bench.submit([5, COMPLETES, 6], 4)
    bench.run()
    assert (bench.outcomes[guided].tokens, bench.outcomes[guided].finishes) == ([5, COMPLETES], [STOP])
    assert bench.outcomes[other].tokens == [5, COMPLETES, 6, 5]
    bench.assert_idle()


def test_a_grammar_complete_with_the_last_token_of_the_budget_is_a_stop(bench):
    rid = bench.submit([5, COMPLETES], 2, guide=GUIDE)
    bench.run()
    assert (bench.outcomes[rid].tokens, bench.outcomes[rid].finishes) == ([5, COMPLETES], [STOP])


def test_a_row_whose_grammar_breaks_fails_alone_and_without_the_token(bench):
    broken, other = bench.submit([5, BREAKS, 6], 9, guide=GUIDE), bench.submit([7, 8], 5, guide=GUIDE)
    stopped = bench.submit([6, EOS], 9)
    bench.run()
    (failure,) = bench.outcomes[broken].failures
    assert failure.code is ErrorCode.INTERNAL
    assert "grammar" in failure.message
    assert bench.outcomes[broken].tokens == [5]
    assert bench.outcomes[other].tokens == [7, 8, 7, 8, 7]
    assert bench.outcomes[stopped].finishes == [STOP]
    assert bench.conductor.counters.row_faults == 1
    bench.assert_idle()


def test_a_grammar_that_breaks_for_a_reason_of_its_request_says_so_and_is_counted_apart(bench):
    bench.grammars.reason = "guided_decoding_guide: a grammar within the engine's limits, got 'x': too many states"
    broken = bench.submit([5, BREAKS, 6], 9, guide=GUIDE)
    bench.run()
    (failure,) = bench.outcomes[broken].failures
    assert (failure.code, failure.message) == (ErrorCode.INVALID_ARG, bench.grammars.reason)
    assert (bench.conductor.counters.constraint_faults, bench.conductor.counters.row_faults) == (1, 0)
    bench.assert_idle()


def test_all_rows_of_a_step_may_break(bench):
    ids = [bench.submit([BREAKS], 9, guide=GUIDE) for _ in range(2)]
    bench.run()
    assert all(len(bench.outcomes[rid].failures) == 1 for rid in ids)
    bench.assert_idle()


def test_a_grammar_hears_of_output_alone(bench):
    stopped = bench.submit([5, 6, EOS], 9, guide=GUIDE)
    own = bench.submit([5, 7], 9, guide=GUIDE, stop_ids=(7,))
    plain = bench.submit([8], 3)
    bench.run()
    assert bench.grammars.accepted == {stopped: [5, 6], own: [5]}
    assert plain not in bench.grammars.accepted


def test_nobody_is_asked_while_no_row_has_a_grammar(bench):
    bench.grammars.accept_tokens = None
    bench.submit([5], 3)
    bench.run()


def test_a_row_without_a_choice_fails_by_its_own_request_and_is_counted_apart(bench):
    bad, spoilt, good = (bench.submit([5, last], 5, guide=GUIDE) for last in (NO_CHOICE, FAULT, 6))
    bench.run()
    (failure,) = bench.outcomes[bad].failures
    assert failure.code is ErrorCode.INVALID_ARG
    assert failure.message == (
        "allowed_token_ids, bad_words, stop_token_ids, guided_decoding_guide: constraints that leave at least one "
        "token, got none at token 2"
    )
    assert bench.outcomes[spoilt].failures[0].code is ErrorCode.INTERNAL
    assert bench.outcomes[good].tokens == [5, 6, 5, 6, 5]
    counters = bench.conductor.counters
    assert (counters.constraint_faults, counters.row_faults, counters.failed) == (1, 1, 2)
    bench.assert_idle()


def test_a_row_without_constraints_that_has_no_choice_has_the_models_logits_to_blame(bench):
    bad, beside = bench.submit([5, NO_CHOICE], 5), bench.submit([5, NO_CHOICE], 5, guide=GUIDE)
    bench.run()
    assert [bench.outcomes[each].failures[0].code for each in (bad, beside)] == [
        ErrorCode.INTERNAL,
        ErrorCode.INVALID_ARG,
    ]
    assert (bench.conductor.counters.constraint_faults, bench.conductor.counters.row_faults) == (1, 1)


@pytest.mark.parametrize(
    ("fields", "bars"),
    [
        ({}, False),
        ({"stop_ids": (3,), "min_tokens": 5, "repetition_penalty": 2.0}, False),
        ({"edits": LogitEdits(presence_penalty=2.0, frequency_penalty=2.0, bias=((3, -100.0),))}, False),
        ({"edits": LogitEdits(bad_words=((3,),))}, True),
        ({"edits": LogitEdits(allowed_ids=b"\3\0\0\0")}, True),
        ({"guide": GUIDE}, True),
    ],
)
def test_what_may_leave_a_request_no_token(fields, bars):
    assert EngineRequest(prompt_ids=b"", max_tokens=1, temperature=0, **fields).bars_tokens is bars


# Rows under a grammar wait for their token; others run ahead of theirs.


def test_beside_others_a_row_under_a_grammar_runs_every_second_step():
    bench = Bench(steps_ahead=1)
    free, guided = bench.submit([7], 40), bench.submit([5, 6], 5, guide=GUIDE)
    while not bench.grammars.prepared:
        bench.step()
    bench.run()
    ran = [step for step, (_, rows) in enumerate(bench.echo.steps) if guided in rows]
    assert [after - before for before, after in itertools.pairwise(ran)] == [2] * 4
    assert bench.outcomes[guided].tokens == [5, 6, 5, 6, 5]
    assert sum(free in rows for _, rows in bench.echo.steps) == 40
    bench.assert_idle()


def test_alone_it_runs_in_every_call():
    bench = Bench(steps_ahead=1)
    rid = bench.submit([5, 6], 9, guide=GUIDE)
    while not bench.echo.steps:
        bench.step()
    for count in range(1, 9):
        bench.step()
        assert len(bench.outcomes[rid].tokens) == count
    bench.run()
    assert bench.outcomes[rid].tokens == [5, 6, 5, 6, 5, 6, 5, 6, 5]


def test_a_stop_of_a_row_under_a_grammar_makes_no_token_in_vain():
    bench = Bench(steps_ahead=1)
    bench.submit([5, 6, EOS], 9, guide=GUIDE)
    bench.submit([5, COMPLETES], 9, guide=GUIDE)
    bench.submit([5], 9)
    bench.run()
    assert bench.conductor.counters.discarded_tokens == 0


def test_the_two_compositions_that_take_turns_stay_the_same_batches():
    bench = Bench(steps_ahead=1)
    for _ in range(2):
        bench.submit([5], 20, guide=GUIDE)
    while bench.conductor.num_running < 2:
        bench.step()
    bench.submit([6], 30)
    bench.submit([7], 30)
    for _ in range(5):
        bench.step()
    seen = []
    launch = bench.engine.launch
    bench.engine.launch = lambda batch: (seen.append(batch), launch(batch))[1]
    for _ in range(8):
        bench.step()
    assert len({id(batch) for batch in seen}) == 2
    assert all(one is two for one, two in zip(seen, seen[2:], strict=False))
    bench.run()
    bench.assert_idle()
