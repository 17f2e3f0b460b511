"""Requests of every kind together: each ends exactly once, the same way in every mode."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.conductor.request import FinishReason, Guide, stop_code, stop_id_of
from mstar.utils.errors import Unavailable

from .toy import BREAKS, COMPLETES, EOS, FAULT, NO_CHOICE, Bench

TICK_NS = 10


@dataclass(frozen=True)
class Asked:
    """``time_limit`` in steps after it came, ``leaves_after`` in tokens seen; None is never."""

    arrives: int
    prompt: tuple[int, ...]
    max_tokens: int
    guide: Guide | None
    stop_ids: tuple[int, ...]
    num_logprobs: int
    num_prompt_logprobs: int
    time_limit: int | None
    leaves_after: int | None
    by_finish: bool


TOKEN = st.one_of(st.integers(3, 12), st.integers(3, 12), st.sampled_from([EOS, COMPLETES, BREAKS, FAULT, NO_CHOICE]))
ASKED = st.builds(
    Asked,
    arrives=st.integers(0, 20),
    prompt=st.lists(TOKEN, min_size=1, max_size=12).map(tuple),
    max_tokens=st.integers(1, 20),
    guide=st.sampled_from([None, None, Guide("regex", "a"), Guide("regex", "malformed")]),
    stop_ids=st.sampled_from([(), (), (7,), (3, 11)]),
    num_logprobs=st.sampled_from([-1, -1, 0, 3]),
    num_prompt_logprobs=st.sampled_from([-1, -1, 2]),
    time_limit=st.one_of(st.none(), st.none(), st.integers(1, 25)),
    leaves_after=st.one_of(st.none(), st.none(), st.integers(0, 9)),
    by_finish=st.booleans(),
)


def play(requests: list[Asked], **fields) -> tuple[Bench, dict[int, int]]:
    """The bench after all requests, and the ids of those that were accepted."""
    bench = Bench(pages=14, page_size=4, context=48, rows=4, queued=1000, batch_tokens=24, **fields)
    ids: dict[int, int] = {}
    for step in range(5000):
        for number, asked in enumerate(requests):
            if asked.arrives == step:
                deadline = 0 if asked.time_limit is None else bench.now_ns + asked.time_limit * TICK_NS
                with contextlib.suppress(Unavailable):
                    ids[number] = bench.submit(
                        asked.prompt,
                        asked.max_tokens,
                        guide=asked.guide,
                        stop_ids=asked.stop_ids,
                        num_logprobs=asked.num_logprobs,
                        num_prompt_logprobs=asked.num_prompt_logprobs,
                        deadline_ns=deadline,
                    )
        if step > 20 and not bench.conductor.has_work():
            break
        report = bench.step()
        bench.now_ns += TICK_NS
        if report.is_empty and not report.num_stepped:
            time.sleep(0.0002)
        for number, rid in ids.items():
            asked, outcome = requests[number], bench.outcomes[rid]
            leaves = asked.leaves_after is not None and len(outcome.tokens) >= asked.leaves_after
            if leaves and outcome.num_ends == 0:
                if asked.by_finish:
                    bench.conductor.finish(rid, 0)
                else:
                    bench.conductor.cancel(rid)
    return bench, ids


def expected(asked: Asked) -> list[int]:
    """Its output if time and client let it."""
    made = []
    while len(made) < asked.max_tokens:
        token = asked.prompt[len(made) % len(asked.prompt)]
        if token in (EOS, FAULT, NO_CHOICE, *asked.stop_ids) or (token == BREAKS and asked.guide):
            break
        made.append(token)
        if token == COMPLETES and asked.guide:
            break
    return made


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(ASKED, min_size=1, max_size=10),
    bench=st.fixed_dictionaries({"largest_batch": st.sampled_from([None, None, 2]), "mixed": st.booleans()}),
)
def test_every_request_ends_once_and_rows_under_a_grammar_never_step_ahead(requests, bench):
    for steps_ahead in (0, 1, 4):
        played, ids = play(requests, steps_ahead=steps_ahead, **bench)
        played.assert_idle()
        for number, rid in ids.items():
            asked, outcome = requests[number], played.outcomes[rid]
            whole = expected(asked)
            stayed = asked.time_limit is None and asked.leaves_after is None
            ends = Counter([*outcome.finishes, *(["error"] * len(outcome.failures))])
            assert sum(ends.values()) == 1 or (asked.leaves_after is not None and asked.by_finish and not ends)
            assert outcome.tokens == whole[: len(outcome.tokens)]
            ends_by_own_id = outcome.ends_with is not None and stop_id_of(outcome.ends_with) is not None
            num_told = len(outcome.tokens) + ends_by_own_id
            assert len(outcome.logprobs) == (0 if asked.num_logprobs < 0 else num_told)
            if outcome.tokens:
                assert len(outcome.prompt_logprobs) == (asked.num_prompt_logprobs >= 0)
            if ends.get(FinishReason.TIMEOUT):
                assert asked.time_limit is not None
            if asked.guide is not None and asked.guide.text == "malformed":
                assert not outcome.tokens
            elif stayed:
                assert outcome.tokens == whole
                after = asked.prompt[len(whole) % len(asked.prompt)]
                if after in asked.stop_ids and len(whole) < asked.max_tokens and COMPLETES not in whole:
                    assert outcome.ends_with == stop_code(after)
        counters = played.conductor.counters
        assert counters.failed == sum(len(outcome.failures) for outcome in played.outcomes.values())
        assert counters.generated_tokens == sum(len(outcome.tokens) for outcome in played.outcomes.values())
