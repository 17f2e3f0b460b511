"""Log-probabilities on their way from a step to those who asked."""

from __future__ import annotations

import numpy as np
import pytest

from mstar.conductor.report import Outbox, PromptLogprobs, named
from mstar.conductor.request import LOGPROB, Guide

from .toy import BREAKS, EOS, FAULT, Bench


@pytest.fixture(params=[0, 1, 4], ids=["plain", "ahead", "queued"])
def bench(request):
    return Bench(steps_ahead=request.param)


def top_of(record) -> tuple[list[int], list[float]]:
    return record["top_ids"].tolist(), record["top_logprobs"].tolist()


def test_each_row_is_told_of_its_own_tokens_as_far_as_it_asked(bench):
    two = bench.submit([5, 6], 3, num_logprobs=2)
    none = bench.submit([7], 3)
    itself = bench.submit([8, 9], 2, num_logprobs=0)
    all_there_are = bench.submit([3], 2, num_logprobs=20)
    bench.run()
    outcomes = bench.outcomes
    for rid in (two, itself, all_there_are):
        assert [record["logprob"] for record in outcomes[rid].logprobs] == [-token for token in outcomes[rid].tokens]
        assert [record["rank"] for record in outcomes[rid].logprobs] == outcomes[rid].tokens
    assert outcomes[none].logprobs == []
    assert top_of(outcomes[two].logprobs[0]) == ([1, 2] + [-1] * 18, [-1.0, -2.0] + [0.0] * 18)
    assert top_of(outcomes[itself].logprobs[1]) == ([-1] * 20, [0.0] * 20)
    assert top_of(outcomes[all_there_are].logprobs[1]) == (
        [1, 2, 3, 4, 5] + [-1] * 15,
        [-1.0, -2.0, -3.0, -4.0, -5.0] + [0.0] * 15,
    )


def test_only_output_is_told_of(bench):
    ids = [
        bench.submit([5, EOS], 9, num_logprobs=1),
        bench.submit([7, FAULT], 9, num_logprobs=1),
        bench.submit([8, BREAKS], 9, num_logprobs=1, guide=Guide("regex", "quick")),
    ]
    bench.run()
    for rid, token in zip(ids, (5, 7, 8), strict=True):
        assert bench.outcomes[rid].tokens == [token]
        assert [record["rank"] for record in bench.outcomes[rid].logprobs] == [token]


def test_a_stop_id_of_the_request_is_told_of_since_a_front_may_count_it_as_output(bench):
    rid = bench.submit([6, 9], 9, num_logprobs=1, stop_ids=(9,))
    bench.run()
    assert bench.outcomes[rid].tokens == [6]
    assert [record["rank"] for record in bench.outcomes[rid].logprobs] == [6, 9]


def test_rows_keep_their_records_when_others_fall_out_of_the_step(bench):
    gone, stopped = bench.submit([5], 9, num_logprobs=0), bench.submit([6, EOS], 9)
    spoilt, told = bench.submit([7, FAULT], 9), bench.submit([8, 9, 10], 6, num_logprobs=0)
    bench.step()
    bench.conductor.cancel(gone)
    bench.run()
    assert bench.outcomes[stopped].num_ends == bench.outcomes[spoilt].num_ends == 1
    assert bench.outcomes[told].tokens == [8, 9, 10, 8, 9, 10]
    assert [record["rank"] for record in bench.outcomes[told].logprobs] == [8, 9, 10, 8, 9, 10]


def test_a_prompt_is_told_of_from_its_second_token_on_with_its_first_token(bench):
    told = bench.submit([5, 6, 7, 8], 3, num_prompt_logprobs=1)
    single = bench.submit([9], 2, num_prompt_logprobs=0)
    none = bench.submit([5, 6], 2, num_logprobs=0)
    bench.run()
    (records,) = bench.outcomes[told].prompt_logprobs
    assert records.dtype == LOGPROB
    assert records["rank"].tolist() == [6, 7, 8]
    assert records["logprob"].tolist() == [-6.0, -7.0, -8.0]
    assert top_of(records[2]) == ([1] + [-1] * 19, [-1.0] + [0.0] * 19)
    assert [len(each) for each in bench.outcomes[single].prompt_logprobs] == [0]
    assert bench.outcomes[none].prompt_logprobs == []
    assert bench.outcomes[told].logprobs == []


def test_a_prompt_is_told_of_though_its_first_token_is_the_end(bench):
    rid = bench.submit([EOS, 6], 3, num_prompt_logprobs=0)
    bench.run()
    assert [each["rank"].tolist() for each in bench.outcomes[rid].prompt_logprobs] == [[6]]


def test_a_prompt_that_is_asked_about_runs_whole_though_it_is_cached():
    bench = Bench(page_size=4)
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    bench.submit(prompt, 2)
    bench.run()
    asking = bench.submit(prompt, 2, num_prompt_logprobs=0)
    bench.run()
    assert bench.echo.spans[2] == (9,)
    assert len(bench.outcomes[asking].prompt_logprobs[0]) == 8
    later = bench.submit(prompt, 2)
    bench.run()
    assert bench.conductor.counters.cached_prompt_tokens == 8
    assert bench.outcomes[later].tokens == [5, 6]


def step_of(*tickets: int):
    array = np.array(tickets, np.int64)
    return named(array, np.zeros_like(array), array), array.astype(np.int32), np.zeros(array.size, np.uint8)


def records_of(*ranks: int) -> np.ndarray:
    records = np.zeros(len(ranks), LOGPROB)
    records["rank"] = ranks
    return records


def test_records_find_their_rows_in_a_report_of_several_steps():
    outbox = Outbox()
    outbox.add_step(*step_of(1, 2, 3))
    outbox.add_logprobs(np.array([0, 2]), records_of(4, 6))
    outbox.add_step(*step_of(4, 5, 6))
    outbox.add_logprobs(np.array([1]), records_of(8))
    outbox.add_step(*step_of(7, 8))
    outbox.add_prompt_logprobs(PromptLogprobs(0, 4, records_of(1)))
    report = outbox.take()
    assert report.tickets[report.logprob_rows].tolist() == [4, 6, 8]
    assert report.logprobs["rank"].tolist() == [4, 6, 8]
    assert [prompt.ticket for prompt in report.prompt_logprobs] == [4]
    assert not report.is_empty
    report = outbox.take()
    assert (report.logprob_rows, report.logprobs, report.prompt_logprobs) == (None, None, [])
    assert report.is_empty
