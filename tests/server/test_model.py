"""The shipped SmolLM2 folder in a real server: reference outputs, streams, cancellation."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from golden import CASES, MODEL, assert_golden, board, certain, greedy, wait_idle
from repository_entries import write_model_entry
from serving_client import Answer, GrpcStream, ServerProcess, add_response, ask, ask_many, events, open_post, post

from mstar.model.front import open_front
from mstar.runtime.presence import engine_folders

pytestmark = [pytest.mark.server, pytest.mark.model]

BRIEF = "brief"  # a second entry over the same engine, greedy and with 24 tokens by default


# Reference outputs


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case["name"])
def test_golden_alone_over_grpc(model_server, case):
    answer = ask(model_server, MODEL, **greedy(case, stream=True))
    assert_golden(case, answer.token_ids)
    assert answer.num_input_tokens == len(case["prompt_ids"])
    assert answer.usage == 48
    if certain(case) == 48:
        assert answer.text == case["output_text"]


@pytest.mark.parametrize("case", CASES[1::5], ids=lambda case: case["name"])
def test_golden_alone_over_http(model_server, case):
    status, body = post(model_server, MODEL, greedy(case))
    reply = json.loads(body)
    assert status == 200
    assert_golden(case, reply["output_ids"])
    assert (reply["num_input_tokens"], reply["num_output_tokens"]) == (len(case["prompt_ids"]), 48)
    if certain(case) == 48:
        assert reply["text_output"] == case["output_text"]


def test_golden_sixteen_in_flight_over_grpc(model_server):
    answers = ask_many(model_server, MODEL, [greedy(case, stream=True) for case in CASES])
    for case, answer in zip(CASES, answers, strict=True):
        assert_golden(case, answer.token_ids)
        assert answer.finish_reason == "length"
        if certain(case) == 48:
            assert answer.text == case["output_text"]


def test_golden_sixteen_in_flight_over_http(model_server):
    connections = [
        open_post(model_server, MODEL, greedy(case, stream=bool(index % 2)), stream=bool(index % 2))
        for index, case in enumerate(CASES)
    ]
    for index, (case, connection) in enumerate(zip(CASES, connections, strict=True)):
        response = connection.getresponse()
        assert response.status == 200
        body = response.read().decode()
        connection.close()
        replies = list(events(body)) if index % 2 else [json.loads(body)]
        ids = [reply["output_ids"] for reply in replies if "output_ids" in reply]
        assert_golden(case, [i for item in ids for i in (item if isinstance(item, list) else [item])])
        assert sum(reply["num_output_tokens"] for reply in replies) == 48
        assert replies[-1]["finish_reason"] == "length"
        if certain(case) == 48:
            assert "".join(reply["text_output"] for reply in replies) == case["output_text"]


def test_golden_by_prompt_ids(model_server):
    case = CASES[0]
    asked = {"input_ids": case["prompt_ids"], "temperature": 0.0, "return_token_ids": True, "max_tokens": 48}
    answer = ask(model_server, MODEL, **asked)
    assert answer.token_ids == case["output_ids"][: case["eos_at"]]
    assert answer.finish_reason == "stop"
    assert answer.usage == case["eos_at"]


def test_sixty_four_streams_of_mixed_length(model_server):
    shapes = [(CASES[index % 15], 1 + (index * 7) % 24) for index in range(64)]
    requests = [greedy(case, length, stream=bool(index % 4)) for index, (case, length) in enumerate(shapes)]
    answers = ask_many(model_server, MODEL, requests)
    tokenizer = open_front("smollm2-135m").tokenizer
    for (case, length), answer in zip(shapes, answers, strict=True):
        assert answer.error is None
        assert answer.token_ids == case["output_ids"][:length]
        assert answer.text == tokenizer.decode(answer.token_ids, skip_special_tokens=False)
        assert answer.usage == length
        assert answer.finish_reason == "length"
        assert answer.finals.count(True) == 1
    wait_idle(model_server)


# Defaults, limits and seeds


def test_the_default_max_tokens_ends_with_length(model_server):
    case = next(case for case in CASES if case["name"] == "code_python")
    status, body = post(model_server, BRIEF, {"text_input": case["prompt"]})
    reply = json.loads(body)
    assert status == 200
    assert reply["finish_reason"] == "length"
    assert reply["num_output_tokens"] == 24
    assert case["output_text"].startswith(reply["text_output"])


def test_both_entries_share_one_engine(model_server):
    assert len(engine_folders(model_server.pid)) == 1


def test_max_tokens_of_nought_and_one(model_server):
    case = CASES[0]
    nought = ask(model_server, MODEL, **greedy(case, 0))
    assert (nought.text, nought.usage, nought.finish_reason) == ("", 0, "length")
    one = ask(model_server, MODEL, **greedy(case, 1))
    assert (one.token_ids, one.usage, one.finish_reason) == (case["output_ids"][:1], 1, "length")


def test_a_stop_string_ends_the_row_at_the_engine(model_server):
    case = CASES[0]  # " Paris.\n\nThe answer is: 2018-01-22 ..."
    for stream in (True, False):
        answer = ask(model_server, MODEL, **greedy(case, stop_words=["answer is"], stream=stream, max_tokens=500))
        assert answer.text == " Paris.\n\nThe "
        assert answer.finish_reason == "stop"
        assert answer.token_ids == case["output_ids"][:7]
        wait_idle(model_server, 2)


def test_a_seed_gives_the_same_text_by_every_way(model_server):
    base = {"text_input": "Once upon a time", "temperature": 1.0, "max_tokens": 12}

    def text(**seed: Any) -> str:
        answer: Answer = ask(model_server, MODEL, **base, **seed)
        return answer.text

    first = text(seed=1)
    assert text(parameters={"seed": 1}) == first
    assert text(sampling_parameters='{"seed": "1"}') == first
    assert len({first, text(seed=0), text(seed=2)}) == 3


def test_a_prompt_over_the_context_is_refused_with_both_numbers(model_server):
    answer = ask(model_server, MODEL, input_ids=[5] * 8192)
    assert answer.error is not None
    assert "input_ids" in answer.error
    assert "8191" in answer.error
    assert "8192" in answer.error


# Cancellation


def step_seconds(server: ServerProcess) -> float:
    """The longest pause of one stream: a step, or two whose tokens came in one response."""
    times, answer, is_last = [], Answer(), False
    with GrpcStream(server, MODEL) as stream:
        stream.send(greedy(CASES[0], 8, stream=True))
        while not is_last:
            is_last = add_response(answer, stream.receive()[0])
            times.append(time.monotonic())
    return max((b - a for a, b in pairwise(times)), default=0.0)


def begin_grpc(server: ServerProcess, streaming: bool) -> Callable[[], None]:
    """Start an endless request and return how to leave it, once its row runs."""
    stream = GrpcStream(server, MODEL)
    stream.send(greedy(CASES[1], 2000, stream=streaming))
    deadline = time.monotonic() + 5
    while not board(server).running:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return lambda: stream.close(cancel=True)


def begin_http(server: ServerProcess) -> Callable[[], None]:
    connection = open_post(server, MODEL, greedy(CASES[1], 2000, stream=True))
    response = connection.getresponse()
    response.readline()
    return response.close


WAYS_TO_LEAVE = {
    "grpc stream": lambda server: begin_grpc(server, streaming=True),
    "grpc single response": lambda server: begin_grpc(server, streaming=False),
    "http stream": begin_http,
}


@pytest.mark.parametrize("way", WAYS_TO_LEAVE)
def test_a_client_that_leaves_frees_its_row_within_50_ms_and_two_steps(model_server, way):
    times = []
    for _ in range(5):
        leave = WAYS_TO_LEAVE[way](model_server)
        assert board(model_server).running == 1
        started = time.monotonic()
        leave()
        wait_idle(model_server)
        times.append(time.monotonic() - started)
    way_in = 0.03  # from the client to the server, and our looking
    assert statistics.median(times) < 0.05 + 2 * step_seconds(model_server) + way_in, times


def test_survivors_of_many_cancels_are_right(model_server):
    leavers = [GrpcStream(model_server, MODEL) for _ in range(6)]
    for stream, case in zip(leavers, CASES, strict=False):
        stream.send(greedy(case, 2000, stream=True))
    with GrpcStream(model_server, MODEL) as stays:
        stays.send(greedy(CASES[3], stream=True))
        for stream in leavers:
            stream.receive()
            stream.close(cancel=True)
        assert_golden(CASES[3], stays.collect().token_ids)
    wait_idle(model_server)


def test_no_stub_maps_torch(model_server):
    stubs = psutil.Process(model_server.pid).children()
    assert len(stubs) == 2
    for stub in stubs:
        assert "libtorch" not in Path(f"/proc/{stub.pid}/maps").read_text()


# Loss of the engine


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Two rows at a time, so that others wait, behind two front ends; the last test kills its engine."""
    repository = tmp_path_factory.mktemp("small_repository")
    write_model_entry(repository, MODEL, instances=2, max_running_requests="2")
    server = ServerProcess(repository, tmp_path_factory.mktemp("small_server"))
    yield server
    server.stop()


def test_two_instances_share_one_engine(small_server):
    assert len(psutil.Process(small_server.pid).children()) == 2
    answers = ask_many(small_server, MODEL, [greedy(case, 8, stream=True) for case in CASES[:6]])
    assert [answer.token_ids for answer in answers] == [case["output_ids"][:8] for case in CASES[:6]]
    (folder,) = engine_folders(small_server.pid)
    assert len(folder.fronts()) == 2


def test_a_cancel_in_the_queue_frees_the_place_and_time_runs_there_too(small_server):
    running = [GrpcStream(small_server, MODEL) for _ in range(2)]
    for stream in running:
        stream.send(greedy(CASES[1], 2000, stream=True))
        stream.receive()
    waiting = GrpcStream(small_server, MODEL)
    waiting.send(greedy(CASES[2], stream=True))
    counters = board(small_server)
    deadline = time.monotonic() + 5
    while not counters.queued:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    waiting.close(cancel=True)
    started = time.monotonic()
    while counters.queued:
        assert time.monotonic() - started < 1
        time.sleep(0.005)
    late = ask(small_server, MODEL, **greedy(CASES[2], timeout_ms=100))
    assert late.error is not None
    assert late.error.startswith("timeout_ms: ")
    assert not late.outputs
    for stream in running:
        stream.close(cancel=True)
    wait_idle(small_server)


def test_a_killed_engine_ends_every_request_once_and_the_launcher(small_server):
    (folder,) = engine_folders(small_server.pid)
    record = folder.engine()
    assert record is not None
    streams = [GrpcStream(small_server, MODEL) for _ in range(64)]
    for index, stream in enumerate(streams):
        stream.send(greedy(CASES[index % 15], 2000, stream=bool(index % 2)))
    deadline = time.monotonic() + 10
    while board(small_server).running + board(small_server).queued < len(streams):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    psutil.Process(record.pid).kill()
    started = time.monotonic()
    for stream in streams:
        answer = stream.collect(timeout_s=5)
        assert answer.error is not None
        assert "engine" in answer.error
        assert not answer.finish_reasons
    assert time.monotonic() - started < 2
    with GrpcStream(small_server, MODEL, headers={"triton_grpc_error": "true"}) as late:
        late.send(greedy(CASES[0]))
        _, error = late.receive(5)
        assert error is not None
        assert "UNAVAILABLE" in error.status()
        assert "engine" in error.message()
    for stream in streams:
        stream.close()
    assert small_server.process.wait(20) != 0
    assert time.monotonic() - started > 2.5  # the grace
