"""How large parts of prompts may be for rows that generate to keep to their time."""

import pytest

from mstar.conductor.deadlines import Deadlines
from mstar.conductor.pace import FIRST_TOKENS, LEAST_TOKENS, Pace
from mstar.conductor.step_times import StepTimes

from .test_batching import DECODE, PREFILL, batcher, table_of
from .test_chunks import brought
from .toy import Bench

MS = 1_000_000


def play(pace: Pace, steps) -> None:
    """Steps of (ms, prompt tokens), one after the other."""
    for ms, tokens in steps:
        pace.landed(ms * MS, tokens)


def test_it_begins_small_and_learns_what_a_token_costs():
    pace = Pace(50 * MS, StepTimes())
    assert pace.prompt_tokens == FIRST_TOKENS
    play(pace, [(10, 0), (10 + 64, 64)])  # 1 ms a token
    assert pace.prompt_tokens == 40


def test_a_step_launched_ahead_begins_as_the_one_before_lands():
    pace = Pace(50 * MS, StepTimes())
    moments = iter((10 * MS, 20 * MS, 50 * MS))
    deadlines = Deadlines(lambda: next(moments))
    for launched_ns, tokens in ((0, 0), (1 * MS, 0), (2 * MS, 10)):
        pace.landed(deadlines.landed(launched_ns), tokens)  # the last: 10 ms as without, 20 ms for 10 tokens
    assert pace.prompt_tokens == 20


def test_prompts_go_on_however_short_the_time():
    pace = Pace(1 * MS, StepTimes())
    play(pace, [(10, 0), (100, 10)])
    assert pace.prompt_tokens == LEAST_TOKENS


def test_it_follows_a_machine_that_slows_down():
    pace = Pace(100 * MS, StepTimes())
    play(pace, [(10, 0), (20, 10)])
    assert pace.prompt_tokens == 64, "twice as many at most as were timed"
    play(pace, [(30, 0), (50, 10)] * 40)
    assert 34 <= pace.prompt_tokens <= 36


def test_steps_that_took_no_time_are_believed_by_and_by():
    pace = Pace(50 * MS, StepTimes())
    play(pace, [(10, 0), (10, 1)])
    for wanted in (64, 128, 256):
        assert pace.prompt_tokens == wanted
        play(pace, [(10, wanted)])


def test_it_learns_where_every_step_has_a_prompt():
    pace = Pace(20 * MS, StepTimes())
    play(pace, [(200, 50)] * 5)
    assert pace.prompt_tokens == LEAST_TOKENS


def test_only_steps_that_somebody_waits_for_are_kept_short():
    pace = Pace(50 * MS, StepTimes())
    table = table_of((PREFILL, 500))
    assert brought(batcher(splits=True, pace=pace).pick(table)) == [(0, 100)]
    table = table_of((DECODE, 5), (PREFILL, 500))
    assert brought(batcher(splits=True, pace=pace).pick(table)) == [(1, FIRST_TOKENS)]
    assert brought(batcher(splits=True, pace=pace, mixed=False).pick(table)) == [(1, FIRST_TOKENS)]
    assert brought(batcher(splits=False, pace=pace).pick(table)) == [(1, 500)]


def test_a_conductor_keeps_to_its_target():
    bench = Bench(mixed=True, chunked=True, batch_tokens=256, context=512, pages=200, target_ms=40)
    ms_per_token, longest = 1, []
    forward = bench.echo.forward_batched

    def timed(graph_walk, engine_inputs, **tensors):
        spans = engine_inputs.ctx.spans
        bench.now_ns += 10 * MS + ms_per_token * MS * int(spans[spans > 1].sum())
        longest.append(int(spans[spans > 1].sum()))
        return forward(graph_walk, engine_inputs, **tensors)

    bench.echo.forward_batched = timed
    first = bench.submit([5, 6], 100)
    for _ in range(4):
        bench.step()
    late = bench.submit([7] * 400, 2)
    bench.run()
    assert len(bench.outcomes[first].tokens) == 100
    assert len(bench.outcomes[late].tokens) == 2
    parts = [tokens for tokens in longest if tokens]
    assert parts[1] == LEAST_TOKENS  # two tokens have taken 12 ms, and how much of that was theirs is not known
    assert all(tokens <= 30 for tokens in parts[2:])
    assert max(parts[2:]) >= 25
    bench.assert_idle()


@pytest.mark.parametrize(("chunked", "mixed"), [(True, True), (False, True), (False, False)])
def test_steps_of_prompts_alone_are_filled(chunked, mixed):
    bench = Bench(rows=64, mixed=mixed, chunked=chunked, batch_tokens=1000, context=512, pages=8000, target_ms=2)
    launch, tokens = bench.engine.launch, []

    def timed(batch):
        handle = launch(batch)
        tokens.append(int(sum(bench.echo.spans[-1])))
        bench.now_ns += MS + tokens[-1] * MS // 100
        return handle

    bench.engine.launch = timed
    for number in range(60):
        bench.submit([number + 11] * 100, 1)
    bench.run()
    assert tokens == [1000] * 6
