"""Traces: as columns, as files, and made up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mstar.simulate.arrivals import Arrivals
from mstar.simulate.synthetic import BURST, SYNTHETIC, TURNS, Ask, with_tenants
from mstar.simulate.tokens import EOS, VOCABULARY, stream_tokens
from mstar.simulate.trace import NOBODY, Trace, make_trace, read_trace, write_trace
from mstar.utils.errors import LoadError

ASK = Ask(requests=400, rate=20.0, prompt_tokens=60, output_tokens=20, context=2048)


def columns(trace: Trace) -> dict[str, list[int]]:
    """As lists; streams by order of appearance."""
    found = {name: value.tolist() for name, value in vars(trace).items() if isinstance(value, np.ndarray)}
    first_seen = {stream: place for place, stream in enumerate(dict.fromkeys(found["streams"]))}
    systems = {system: place for place, system in enumerate(dict.fromkeys(found["systems"]))}
    return found | {
        "streams": [first_seen[stream] for stream in found["streams"]],
        "systems": [systems[system] for system in found["systems"]],
    }


@pytest.mark.parametrize("name", SYNTHETIC)
def test_a_trace_is_read_as_it_was_written(tmp_path, name):
    trace = with_tenants(SYNTHETIC[name](ASK), 3)
    trace.priorities[::7] = 2
    trace.max_tokens[::5] += 9
    write_trace(trace, tmp_path / "trace.jsonl")
    read = read_trace(tmp_path / "trace.jsonl")
    written = columns(trace)
    names = [trace.tenant_names[tenant] for tenant in trace.tenants]
    assert [read.tenant_names[tenant] for tenant in read.tenants] == names
    assert np.abs(read.due_ns - trace.due_ns).max() <= 1
    for name_of in (
        "follows",
        "prompt_tokens",
        "output_tokens",
        "max_tokens",
        "priorities",
        "streams",
        "system_tokens",
    ):
        assert columns(read)[name_of] == written[name_of], name_of


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"arrival": 1, "prompt_tokens": 0, "output_tokens": 1}', "at least 1"),
        ('{"arrival": 1, "prompt_tokens": 1}', "output_tokens"),
        ('{"prompt_tokens": 1, "output_tokens": 1}', "either arrival or think"),
        ('{"arrival": 1, "think": 1, "prompt_tokens": 1, "output_tokens": 1}', "either arrival or think"),
        ('{"think": 1, "prompt_tokens": 1, "output_tokens": 1}', "think needs a session"),
        ('{"arrival": -1, "prompt_tokens": 1, "output_tokens": 1}', "seconds from 0"),
        ('{"arrival": 1, "prompt_tokens": 1, "output_tokens": 5, "max_tokens": 4}', "max_tokens is at least"),
        ('{"arrival": 1, "prompt_tokens": 1, "output_tokens": 1, "priority": 101}', "priority is from"),
        ('{"arrival": 1, "prompt_tokens": 1, "output_tokens": 1, "tennant": "a"}', "tennant"),
        ('{"arrival": 1, "prompt_tokens": 9, "output_tokens": 1, "system": "a"}', "go together"),
        ('{"arrival": 1, "prompt_tokens": 9, "output_tokens": 1, "system_tokens": 2}', "go together"),
        ('{"arrival": 1, "prompt_tokens": 9, "output_tokens": 1, "system": "a", "system_tokens": 10}', "go together"),
        ("nonsense", "line 2"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, told):
    file = tmp_path / "trace.jsonl"
    file.write_text('{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1}\n' + line + "\n")
    with pytest.raises(LoadError, match=told) as raised:
        read_trace(file)
    assert f"{file}, line 2" in str(raised.value)


def test_a_turn_without_one_before_is_refused(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text('{"think": 1, "session": "a", "prompt_tokens": 1, "output_tokens": 1}\n')
    with pytest.raises(LoadError, match="nobody is before it"):
        read_trace(file)


def test_a_session_keeps_its_system(tmp_path):
    file = tmp_path / "trace.jsonl"
    line = '"prompt_tokens": 9, "output_tokens": 1, "session": "a", "system_tokens": 4'
    file.write_text(f'{{"arrival": 0, "system": "x", {line}}}\n{{"think": 1, "system": "y", {line}}}\n')
    with pytest.raises(LoadError, match="request 2 has another system"):
        read_trace(file)


def test_prompts_with_one_system_begin_alike_and_go_on_apart():
    trace = SYNTHETIC["systems"](replace(ASK, systems=5, system_tokens=300))
    lengths = {}
    for system in range(5):
        first, *others = np.flatnonzero(trace.systems == system).tolist()
        shared = lengths[system] = int(trace.system_tokens[first])
        prompt = np.frombuffer(trace.prompt(first), "<i4")
        for other in others:
            assert trace.system_tokens[other] == shared < trace.prompt_tokens[other]
            theirs = np.frombuffer(trace.prompt(other), "<i4")
            assert (theirs[:shared] == prompt[:shared]).all()
            assert (theirs[shared : shared + 8] != prompt[shared : shared + 8][: theirs.size - shared]).any()
    beginnings = {np.frombuffer(trace.prompt(ticket), "<i4")[:8].tobytes() for ticket in range(len(trace))}
    assert len(beginnings) == 5
    assert min(lengths.values()) >= 150 <= max(lengths.values()) <= 450
    assert (trace.prompt_tokens - trace.system_tokens).mean() == pytest.approx(ASK.prompt_tokens, rel=0.1)


def test_systems_are_asked_for_alike_or_as_by_zipf():
    alike = np.bincount(SYNTHETIC["systems"](replace(ASK, requests=4000, systems=4)).systems)
    zipf = np.bincount(SYNTHETIC["systems"](replace(ASK, requests=4000, systems=4, system_skew=1.0)).systems)
    assert alike / 4000 == pytest.approx([0.25] * 4, abs=0.04)
    assert zipf / 4000 == pytest.approx(np.array([12, 6, 4, 3]) / 25, abs=0.04)


def test_requests_of_one_system_come_together():
    trace = SYNTHETIC["systems"](replace(ASK, requests=402, systems=3, together=4))
    moments, counts = np.unique(trace.due_ns, return_counts=True)
    assert counts.tolist() == [4] * 100 + [2]
    for moment in moments:
        assert len(set(trace.systems[trace.due_ns == moment])) == 1
    assert 402 / (trace.due_ns.max() / 1e9) == pytest.approx(ASK.rate, rel=0.3)


def test_a_next_prompt_begins_with_prompt_and_answer():
    trace = SYNTHETIC["chats"](ASK)
    turn = int(np.flatnonzero(trace.follows != NOBODY)[0])
    before = int(trace.follows[turn])
    said, answered = int(trace.prompt_tokens[before]), int(trace.output_tokens[before])
    whole = np.frombuffer(trace.prompt(turn), "<i4")
    assert whole.size > said + answered
    assert (whole[:said] == np.frombuffer(trace.prompt(before), "<i4")).all()
    answer = stream_tokens(int(trace.streams[before]), np.arange(said, said + answered))
    assert (whole[said : said + answered] == answer).all()


def test_streams_differ_and_never_end_by_themselves():
    tokens = np.stack([stream_tokens(stream, np.arange(2000)) for stream in range(50)])
    assert tokens.min() > EOS
    assert tokens.max() < VOCABULARY
    assert len(np.unique(tokens[:, :8], axis=0)) == 50
    by_row = stream_tokens(np.arange(50), np.full(50, 7))
    assert (by_row == tokens[:, 7]).all()


def test_rates_and_lengths_are_as_asked():
    for name in ("poisson", "bursts", "long-tail"):
        trace = SYNTHETIC[name](replace(ASK, requests=4000))
        assert 4000 / (trace.due_ns.max() / 1e9) == pytest.approx(ASK.rate, rel=0.2), name
        assert trace.prompt_tokens.mean() == pytest.approx(ASK.prompt_tokens, rel=0.1), name
        assert trace.output_tokens.mean() == pytest.approx(ASK.output_tokens, rel=0.1), name


def test_each_trace_has_what_it_is_named_after():
    bursts = SYNTHETIC["bursts"](ASK)
    assert set(np.unique(bursts.due_ns, return_counts=True)[1].tolist()) <= {BURST, ASK.requests % BURST}
    tail = SYNTHETIC["long-tail"](ASK).prompt_tokens
    assert np.median(tail) < 0.8 * tail.mean()
    giant = SYNTHETIC["giant"](ASK)
    assert (giant.prompt_tokens > ASK.context // 2).sum() == 1
    chats = SYNTHETIC["chats"](ASK)
    assert np.bincount(chats.streams).max() == TURNS
    systems = SYNTHETIC["systems"](replace(ASK, systems=9, system_tokens=5_000))
    for trace in (bursts, giant, chats, systems):
        assert len(trace) <= ASK.requests
        assert (trace.prompt_tokens + trace.output_tokens <= ASK.context).all()


def test_tenants_ask_for_unequal_shares():
    trace = with_tenants(SYNTHETIC["poisson"](ASK), 4)
    asked = np.bincount(trace.tenants)
    assert asked.size == 4
    assert asked[0] > 2 * asked[3]
    chats = with_tenants(SYNTHETIC["chats"](ASK), 4)
    for stream in np.unique(chats.streams):
        assert len(set(chats.tenants[chats.streams == stream])) == 1


def test_arrivals_come_in_order_of_their_times():
    trace = make_trace(
        np.array([3.0, 1.0, 2.0, 0.5]), np.ones(4), np.ones(4), follows=np.array([NOBODY, NOBODY, NOBODY, 1])
    )
    arrivals = Arrivals(trace)
    assert arrivals.next_ns() == 1_000_000_000
    assert arrivals.take(999_999_999, 8) == []
    assert arrivals.take(1_000_000_000, 8) == [(1_000_000_000, 1)]
    arrivals.ended(1, 1_200_000_000)
    assert arrivals.take(5_000_000_000, 2) == [(1_700_000_000, 3), (2_000_000_000, 2)]
    assert arrivals.take(5_000_000_000, 2) == [(3_000_000_000, 0)]
    assert arrivals.next_ns() is None
