"""More is asked for than there are pages: who gives his up, who comes back, and that nobody's tokens change."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.conductor.request import FinishReason

from .toy import Bench


def overcommitted(**fields) -> Bench:
    return Bench(**{"rows": 4, "pages": 8, "page_size": 4, "context": 32, "admission_fit": "none", **fields})


def solo(prompt, max_tokens) -> list[int]:
    return [prompt[i % len(prompt)] for i in range(max_tokens)]


def away(bench) -> list[int]:
    return list(bench.conductor._pressure._away)


def run_until_somebody_is_away(bench) -> None:
    for _ in range(200):
        if away(bench):
            return
        bench.step()
    raise AssertionError("nobody gave anything up")


@pytest.mark.parametrize("host_pages", [0, 16])
@pytest.mark.parametrize("steps_ahead", [0, 1, 4])
@pytest.mark.parametrize("chunked", [False, True])
def test_the_newest_gives_its_pages_up_and_goes_on_where_it_was(chunked, steps_ahead, host_pages):
    bench = overcommitted(
        chunked=chunked, batch_tokens=6, mixed=True, steps_ahead=steps_ahead, cpu_offload_pages=host_pages
    )
    prompts = [[10 + i, 20 + i, 30 + i] for i in range(3)]
    ids = [bench.submit(prompt, 18) for prompt in prompts]
    run_until_somebody_is_away(bench)
    assert away(bench) == ids[-1:]
    bench.run()
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert bench.outcomes[request_id].tokens == solo(prompt, 18)
        assert bench.outcomes[request_id].finishes == [FinishReason.LENGTH]
    counters = bench.conductor.counters
    assert 0 < counters.preemptions <= 4
    assert counters.offloads == (counters.preemptions if host_pages else 0)
    assert (counters.recomputed_tokens > 0) is (host_pages == 0)
    bench.assert_idle()


def test_pages_for_which_the_host_has_no_room_are_computed_again():
    bench = overcommitted(mixed=True, cpu_offload_pages=4)
    ids = [bench.submit([10 + i, 20], 24) for i in range(3)]
    bench.run()
    assert [bench.outcomes[each].tokens for each in ids] == [solo([10 + i, 20], 24) for i in range(3)]
    counters = bench.conductor.counters
    assert 0 <= counters.offloads < counters.preemptions
    bench.assert_idle()


@pytest.mark.parametrize("where", ["copy to the host", "wait for it", "copy back"])
def test_an_error_while_pages_move_ends_that_request_alone_and_loses_no_page(where, monkeypatch):
    bench = overcommitted(mixed=True, cpu_offload_pages=40)
    pool, errors = bench.kv._offloading.pool, []

    def breaks_once(applies, real):
        def broken(*args):
            if applies(*args) and not errors:
                errors.append(RuntimeError("the copy failed"))
                raise errors[0]
            return real(*args)

        return broken

    if where == "wait for it":
        monkeypatch.setattr(pool, "settle", breaks_once(lambda *_: True, pool.settle))
    else:
        to_host = where == "copy to the host"
        monkeypatch.setattr(pool, "_copy_pages", breaks_once(lambda *args: args[2] == to_host, pool._copy_pages))
    ids = [bench.submit([10 + i, 20], 24) for i in range(3)]
    bench.run()
    outcomes = [bench.outcomes[each] for each in ids]
    assert [outcome.num_ends for outcome in outcomes] == [1, 1, 1]
    failed = [outcome for outcome in outcomes if outcome.failures]
    assert len(failed) == len(errors) == 1
    assert "the copy failed" in failed[0].failures[0].message
    for i, outcome in enumerate(outcomes):
        assert outcome.failures or outcome.tokens == solo([10 + i, 20], 24)
    pool.check()
    assert pool.num_free == 40
    bench.assert_idle()
    again = [bench.submit([10 + i, 20], 24) for i in range(3)]
    bench.run()
    assert [bench.outcomes[each].tokens for each in again] == [solo([10 + i, 20], 24) for i in range(3)]


def test_where_pages_are_reserved_nobody_gives_any_up():
    bench = overcommitted(admission_fit="sum", mixed=True)
    ids = [bench.submit([10 + i, 20], 18) for i in range(4)]
    bench.run()
    assert all(bench.outcomes[request_id].tokens == solo([10 + i, 20], 18) for i, request_id in enumerate(ids))
    assert bench.conductor.counters.preemptions == 0
    assert bench.conductor._table.history is None


def test_the_lowest_priority_goes_first_however_old_it_is():
    bench = overcommitted(mixed=True, rows=3)
    low = bench.submit([10, 11], 20, request_priority=-1)
    high = bench.submit([12, 13], 20, request_priority=5)
    middle = bench.submit([14, 15], 20)
    run_until_somebody_is_away(bench)
    assert away(bench) == [low]
    bench.run()
    assert all(len(bench.outcomes[each].tokens) == 20 for each in (low, high, middle))
    bench.assert_idle()


def test_the_oldest_of_the_highest_priority_comes_back_first():
    bench = overcommitted(mixed=True, rows=4, pages=9)
    ids = [bench.submit([10 + i, 20], 28) for i in range(3)]
    back, seen = [], set()
    while bench.conductor.has_work():
        bench.step()
        back += sorted(seen - set(away(bench)))
        seen = set(away(bench))
        assert ids[0] not in seen
        assert len(seen) < 2 or bench.conductor._table.row_of
    assert back[0] == min(back)
    assert [bench.outcomes[each].tokens for each in ids] == [solo([10 + i, 20], 28) for i in range(3)]


@pytest.mark.parametrize("host_pages", [0, 40])
@pytest.mark.parametrize("chunked", [False, True])
def test_nobody_comes_back_only_to_go_again(chunked, host_pages):
    """Pages that one who came back will take are not another's."""
    bench = overcommitted(
        pages=12, context=48, mixed=True, chunked=chunked, batch_tokens=8, cpu_offload_pages=host_pages
    )
    ids = [bench.submit([10 + i] * 10, 30) for i in range(4)]
    had, seen = {}, set()
    while bench.conductor.has_work():
        bench.step()
        gone = set(away(bench))
        for each in gone - seen:
            assert len(bench.outcomes[each].tokens) > had.get(each, -1)
            had[each] = len(bench.outcomes[each].tokens)
        seen = gone
    assert bench.conductor.counters.preemptions >= 2
    assert [bench.outcomes[each].tokens for each in ids] == [[10 + i] * 30 for i in range(4)]
    bench.assert_idle()


def test_nobody_joins_while_somebody_is_away():
    bench = overcommitted(mixed=True, rows=4)
    ids = [bench.submit([10 + i, 20], 24) for i in range(2)]
    run_until_somebody_is_away(bench)
    late = bench.submit([50], 2)
    while away(bench):
        assert not bench.outcomes[late].tokens
        bench.step()
    bench.run()
    assert bench.outcomes[late].tokens == [50, 50]
    assert [bench.outcomes[each].tokens for each in ids] == [solo([10 + i, 20], 24) for i in range(2)]
    bench.assert_idle()


@pytest.mark.parametrize("host_pages", [0, 16])
@pytest.mark.parametrize("end", ["cancel", "finish", "deadline"])
def test_who_ends_while_away_is_gone(end, host_pages):
    bench = overcommitted(mixed=True, cpu_offload_pages=host_pages)
    other = bench.submit([10, 20], 26)
    gone = bench.submit([30, 40], 26, deadline_ns=5000)
    run_until_somebody_is_away(bench)
    assert away(bench) == [gone]
    made = list(bench.outcomes[gone].tokens)
    if end == "cancel":
        bench.conductor.cancel(gone)
    elif end == "finish":
        bench.conductor.finish(gone, len(made))
    else:
        bench.now_ns = 6000
    bench.run()
    reason = {"cancel": [FinishReason.CANCELLED], "finish": [], "deadline": [FinishReason.TIMEOUT]}[end]
    assert bench.outcomes[gone].finishes == reason
    assert bench.outcomes[gone].tokens == made
    assert bench.outcomes[other].tokens == solo([10, 20], 26)
    bench.assert_idle()


def test_one_that_is_too_large_for_all_pages_ends_alone_and_the_others_go_on():
    bench = overcommitted(pages=4, context=64)
    large = bench.submit([10, 11, 12], None)
    small = bench.submit([20, 21], 5)
    bench.run()
    assert bench.outcomes[small].tokens == solo([20, 21], 5)
    assert bench.outcomes[large].finishes == [FinishReason.LENGTH]
    assert bench.outcomes[large].tokens == solo([10, 11, 12], len(bench.outcomes[large].tokens))
    bench.assert_idle()


def test_a_prompt_that_gives_way_between_its_parts_is_told_of_once():
    bench = overcommitted(chunked=True, batch_tokens=4, mixed=True, pages=7)
    first = bench.submit([10, 11, 12, 13], 16)
    bench.step()
    late = bench.submit(list(range(30, 48)), 3, num_prompt_logprobs=0)
    bench.run()
    assert bench.conductor.counters.preemptions > 0
    (records,) = bench.outcomes[late].prompt_logprobs
    assert records["rank"].tolist() == list(range(31, 48))
    assert bench.outcomes[late].tokens == [30, 31, 32]
    assert bench.outcomes[first].tokens == solo([10, 11, 12, 13], 16)
    bench.assert_idle()


def test_a_resumed_request_finds_what_the_prefix_cache_still_holds():
    bench = overcommitted(mixed=True, prefix_cache=True, pages=9)
    ids = [bench.submit([10 + i, 20, 30, 40, 50], 20) for i in range(2)]
    bench.run()
    counters = bench.conductor.counters
    assert counters.preemptions > 0
    assert [bench.outcomes[i].tokens for i in ids] == [solo([10 + i, 20, 30, 40, 50], 20) for i in range(2)]
    bench.kv.check_pages()


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    steps_ahead=st.sampled_from([0, 1, 4]),
    pages=st.integers(8, 14),
    host_pages=st.sampled_from([0, 4, 20]),
    fields=st.fixed_dictionaries({"prefix_cache": st.booleans(), "chunked": st.booleans(), "mixed": st.booleans()}),
)
def test_whatever_comes_everybody_ends_once_with_his_solo_tokens(data, steps_ahead, pages, host_pages, fields):
    bench = overcommitted(steps_ahead=steps_ahead, pages=pages, batch_tokens=10, cpu_offload_pages=host_pages, **fields)
    wanted, cancelled = {}, set()
    for _ in range(data.draw(st.integers(1, 9))):
        prompt = data.draw(st.lists(st.integers(10, 39), min_size=1, max_size=20))
        max_tokens = data.draw(st.integers(1, 31 - len(prompt)))
        request_id = bench.submit(prompt, max_tokens, request_priority=data.draw(st.integers(0, 1)))
        wanted[request_id] = solo(prompt, max_tokens)
        for _ in range(data.draw(st.integers(0, 4))):
            bench.step()
        if data.draw(st.integers(0, 7)) == 0:
            bench.conductor.cancel(request_id)
            cancelled.add(request_id)
    bench.run()
    for request_id, tokens in wanted.items():
        outcome = bench.outcomes[request_id]
        assert outcome.num_ends == 1
        assert not outcome.failures
        if request_id in cancelled:
            assert outcome.tokens == tokens[: len(outcome.tokens)]
        else:
            assert outcome.tokens == tokens
    bench.kv.check_pages()
    assert bench.kv.promised_pages == 0
    assert not len(bench.conductor._pressure)
