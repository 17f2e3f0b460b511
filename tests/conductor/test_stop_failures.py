"""A stop check that raises: the rows it was about end with an error, the others and the conductor go on."""

from __future__ import annotations

import pytest

from mstar.conductor.request import Guide
from mstar.utils.errors import ErrorCode

from .toy import Bench, Panic

GUIDE = Guide("regex", "a+")
CRASHES = 42


@pytest.fixture(params=[0, 1, 4])
def bench(request, monkeypatch):
    bench = Bench(steps_ahead=request.param)
    accept = bench.grammars.accept_tokens

    def crashing(rows, tokens):
        if CRASHES in tokens:
            raise Panic("index out of bounds")
        return accept(rows, tokens)

    monkeypatch.setattr(bench.grammars, "accept_tokens", crashing)
    return bench


def test_a_grammar_that_crashes_ends_its_row_alone(bench):
    bad = bench.submit([5, CRASHES, 6], 9, guide=GUIDE)
    for _ in range(2):
        bench.step()
    plain, late = bench.submit([7, CRASHES], 6), bench.submit([8, 9], 9, guide=GUIDE)
    bench.run()
    (failure,) = bench.outcomes[bad].failures
    assert failure.code is ErrorCode.INTERNAL
    assert bench.outcomes[bad].tokens == [5]
    assert bench.outcomes[plain].tokens == [7, CRASHES] * 3
    assert bench.outcomes[late].tokens == [8, 9] * 4 + [8]
    assert bench.conductor.counters.failed == bench.conductor.counters.row_faults
    after = bench.submit([5, 6], 4, guide=GUIDE)
    bench.run()
    assert bench.outcomes[after].tokens == [5, 6, 5, 6]
    bench.assert_idle()


def test_rows_that_were_told_with_it_end_too_since_nobody_knows_how_far_they_came(bench):
    bad, beside = bench.submit([CRASHES], 4, guide=GUIDE), bench.submit([5], 4, guide=GUIDE)
    plain = bench.submit([7], 4)
    bench.run()
    assert [len(bench.outcomes[each].failures) for each in (bad, beside, plain)] == [1, 1, 0]
    assert bench.outcomes[plain].tokens == [7] * 4
    bench.assert_idle()


def test_who_interrupts_the_process_is_heard(bench, monkeypatch):
    def interrupted(rows, tokens):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.grammars, "accept_tokens", interrupted)
    bench.submit([5], 4, guide=GUIDE)
    with pytest.raises(KeyboardInterrupt):
        bench.run()
