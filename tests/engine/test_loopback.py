"""Where no resource keeps a row's token, the engine hands it on by reference, on the device."""

import pytest
import torch

from mstar.engine.accelerator_graph_backend import CpuGraphBackend, EagerBackend
from mstar.engine.batch import Batch
from mstar.engine.inputs import NodeInputs
from mstar.engine.loopback import KeptOutputs
from mstar.engine.outputs import BatchedModelOutput

from .toy import ToyOptions, ToySubmodule, ToyTokens, expected, generate, make_engine, request

BACKENDS = {
    "eager": lambda: EagerBackend(),
    "service": lambda: CpuGraphBackend(),
    "captured-at-load": lambda: CpuGraphBackend(
        warmup_forwards=2, capture_at_load=True, replays_real_head=False, strict=True
    ),
}


def output(*values):
    return BatchedModelOutput(check_stop_buffers={"new_token": torch.tensor(values)})


def test_each_request_gets_its_last_value_beside_its_own_tensors():
    kept = KeptOutputs({"text_inputs": "new_token"})
    assert kept.keep((4, 7), output(10, 20, 99)) == 2  # the third row is padding
    kept.keep((7,), output(21))
    row = NodeInputs({"x": torch.ones(1)})
    values = {i: kept.attach(i, row, ("text_inputs",)).tensors for i in (4, 7)}
    assert {i: tensors["text_inputs"].tolist() for i, tensors in values.items()} == {4: [10], 7: [21]}
    assert all("x" in tensors for tensors in values.values())
    assert list(row.tensors) == ["x"]  # a shared row stays as it is


def test_values_stay_when_the_step_after_overwrites_its_buffer():
    kept = KeptOutputs({"text_inputs": "new_token"})
    buffer = output(10)
    kept.keep((4,), buffer)
    buffer.check_stop_buffers["new_token"].zero_()
    assert kept.attach(4, NodeInputs(), ("text_inputs",)).tensors["text_inputs"].tolist() == [10]


def test_a_missing_value_is_a_key_error():
    kept = KeptOutputs({"text_inputs": "new_token"})
    kept.keep((4,), output(10))
    kept.forget(4)
    with pytest.raises(KeyError, match="request 4 has no 'new_token' to loop back as 'text_inputs'"):
        kept.attach(4, NodeInputs(), ("text_inputs",))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_the_tokens_are_those_of_a_resource_that_keeps_them(name, rows):
    engine, _, _ = make_engine(ToyOptions(is_routed=True), backend=BACKENDS[name]())
    infos = [request(i, [i + 1] * (i + 1)) for i in range(rows)]
    for info in infos:
        engine.ingest(info)
    assert generate(engine, infos, 4) == {i: expected([i + 1] * (i + 1), 4) for i in range(rows)}
    assert engine.counters["host_loopback_rows"] == 5 * rows


@pytest.mark.parametrize("name", BACKENDS)
def test_a_step_may_be_launched_before_the_last_ones_tokens_were_read(name):
    engine, _, _ = make_engine(ToyOptions(is_routed=True), backend=BACKENDS[name]())
    infos = [request(i, [i + 1]) for i in range(3)]
    for info in infos:
        engine.ingest(info)
    decode = Batch("LLM", "decode", infos)
    flights = [engine.launch(Batch("LLM", "prefill", infos)), engine.launch(decode)]
    assert engine.collect(flights[1]).host["new_token"].tolist() == [expected([i + 1], 1)[1] for i in range(3)]


@pytest.mark.parametrize("name", BACKENDS)
def test_a_mixed_step_takes_the_tokens_of_its_decode_rows_only(name):
    engine, _, _ = make_engine(ToyOptions(is_routed=True), backend=BACKENDS[name]())
    old, new = request(0, [1]), request(1, [2, 3])
    engine.ingest(old)
    engine.ingest(new)
    engine.exec(Batch("LLM", "prefill", [old]))
    result = engine.exec(Batch("LLM", "mixed", [old, new], row_walks=["decode", "prefill"]))
    assert result.host["new_token"].tolist() == [expected([1], 1)[1], *expected([2, 3], 0)]


def test_a_row_without_a_value_fails_alone():
    engine, _, _ = make_engine(ToyOptions(is_routed=True))
    ready, unready = request(0, [1]), request(1, [2])
    engine.ingest(ready)
    engine.ingest(unready)
    engine.exec(Batch("LLM", "prefill", [ready]))
    result = engine.exec(Batch("LLM", "decode", [ready, unready]))
    assert isinstance(result.errors[1], KeyError)
    assert result.request_ids == (0,)
    assert result.host["new_token"].tolist() == expected([1], 1)[1:]


def test_a_request_that_left_leaves_nothing_for_its_successor():
    engine, _, _ = make_engine(ToyOptions(is_routed=True), capacity=1)
    engine.ingest(first := request(0, [1]))
    engine.exec(Batch("LLM", "prefill", [first]))
    engine.remove(0)
    engine.ingest(again := request(0, [2]))
    assert isinstance(engine.exec(Batch("LLM", "decode", [again])).errors[0], KeyError)


@pytest.mark.parametrize("has_masters", [False, True])
def test_nothing_is_kept_where_a_resource_keeps_tokens_on_the_device(has_masters, monkeypatch):
    monkeypatch.setattr(ToyTokens, "has_slot_masters", has_masters)
    engine, _, _ = make_engine(ToyOptions(is_routed=True), backend=CpuGraphBackend())
    engine.ingest(info := request(0, [1]))
    engine.exec(Batch("LLM", "prefill", [info]))
    assert engine.counters["host_loopback_rows"] == (0 if has_masters else 1)


def test_a_node_that_does_not_read_them_there_gets_its_tokens_from_the_engine(monkeypatch):
    monkeypatch.setattr(ToyTokens, "has_slot_masters", True)
    monkeypatch.setattr(ToySubmodule, "reads_device_loopback", False)
    engine, _, _ = make_engine(ToyOptions(is_routed=True), backend=CpuGraphBackend())
    engine.ingest(info := request(0, [1]))
    engine.exec(Batch("LLM", "prefill", [info]))
    assert engine.counters["host_loopback_rows"] == 1
