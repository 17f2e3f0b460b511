"""Outputs of a batched forward: whose they are, and that a later replay leaves them alone."""

import pytest
import torch

from mstar.engine.accelerator_graph_backend import CpuGraphBackend, EagerBackend
from mstar.engine.batch import Batch
from mstar.engine.inputs import NodeInputs, RequestInfo
from mstar.engine.outputs import BatchedModelOutput, split_by_request
from mstar.engine.submodule import NodeSubmodule

from .toy import ToySubmodule, expected, make_engine, request

STRICT = {"warmup_forwards": 2, "capture_at_load": True, "replays_real_head": False, "strict": True}
BACKENDS = {
    "eager": lambda: EagerBackend(),
    "service": lambda: CpuGraphBackend(),
    "captured-at-load": lambda: CpuGraphBackend(**STRICT),
}


def test_a_dict_is_coerced_by_its_keys():
    entry = {"x": [torch.ones(1)]}
    output = BatchedModelOutput.coerce({3: entry, "__logits__": torch.ones(2), 4: entry})
    assert output.per_rid_outputs == {3: entry, 4: entry}
    assert list(output.packed_outputs) == ["__logits__"]
    assert not output.is_rows_only
    assert BatchedModelOutput.coerce(output) is output
    assert BatchedModelOutput.coerce({}).is_rows_only


@pytest.mark.parametrize("output", [None, torch.ones(1), [1]])
def test_anything_else_is_refused(output):
    with pytest.raises(TypeError, match=f"got {type(output).__name__}"):
        BatchedModelOutput.coerce(output)


def split(output, submodule=None, captured=False, ids=(5, 9)):
    infos = [RequestInfo(i) for i in ids]
    rows = [NodeInputs(input_seq_len=n + 1) for n in range(len(ids))]
    return split_by_request(output, submodule or NodeSubmodule(), "walk", infos, [1, 2], rows, captured)


def test_row_outputs_are_narrowed_views_of_one_copy():
    rows = torch.arange(8).view(4, 2)
    outputs = split(BatchedModelOutput(row_outputs={"x": rows}))
    first, second = outputs[5]["x"][0], outputs[9]["x"][0]
    assert (first.tolist(), second.tolist()) == ([[0, 1]], [[2, 3]])
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr() != rows.data_ptr()
    assert first.untyped_storage().nbytes() == 4 * rows.element_size()
    rows.zero_()
    assert second.tolist() == [[2, 3]]


def test_values_without_rows_pass_through():
    scalar = torch.tensor(3)
    outputs = split(BatchedModelOutput(row_outputs={"scalar": scalar, "name": "x"}))
    assert outputs == {i: {"scalar": [scalar], "name": ["x"]} for i in (5, 9)}
    assert outputs[5]["scalar"][0] is scalar


def test_a_per_request_entry_of_the_same_name_wins():
    own = torch.tensor([70])
    output = BatchedModelOutput(row_outputs={"x": torch.tensor([1, 2])}, per_rid_outputs={9: {"x": [own]}})
    outputs = split(output)
    assert outputs[5]["x"][0].tolist() == [1]
    assert outputs[9]["x"][0].tolist() == [70]
    own.zero_()
    assert outputs[9]["x"][0].tolist() == [70]  # a copy


def test_in_a_captured_step_the_entries_belong_to_the_real_requests_in_order():
    entries = {-2: {"x": [torch.tensor(1)]}, -3: {"x": [torch.tensor(2)]}, -4: {"x": [torch.tensor(3)]}}
    outputs = split(BatchedModelOutput(per_rid_outputs=entries), captured=True)
    assert {i: int(own["x"][0]) for i, own in outputs.items()} == {5: 1, 9: 2}
    assert split(BatchedModelOutput(per_rid_outputs=entries)) == {5: {}, 9: {}}  # eager: by id


def test_only_what_the_node_lets_through_is_copied():
    class Picky(NodeSubmodule):
        def filter_batched_output(self, graph_walk, request_id, outputs):
            return {name: values for name, values in outputs.items() if name == "kept" and request_id == 5}

    entry = {"kept": [torch.ones(1)], "dropped": [torch.ones(1)]}
    outputs = split(BatchedModelOutput(per_rid_outputs={5: entry, 9: entry}), Picky())
    assert [list(own) for own in outputs.values()] == [["kept"], []]


def test_packed_outputs_are_cut_by_the_real_lengths_and_copied():
    class Cutting(NodeSubmodule):
        def unpack_packed_outputs(self, static_output, request_ids, real_seq_lens, inputs, per_request_info):
            assert [row.input_seq_len for row in inputs] == real_seq_lens
            assert [info.request_id for info in per_request_info] == request_ids
            parts = static_output["__x__"][: sum(real_seq_lens)].split(real_seq_lens)
            return {i: {"last": [part[-1:]]} for i, part in zip(request_ids, parts, strict=True)}

    packed = torch.arange(10)
    outputs = split(BatchedModelOutput(packed_outputs={"__x__": packed}), Cutting())
    packed.zero_()
    assert {i: own["last"][0].tolist() for i, own in outputs.items()} == {5: [0], 9: [2]}


class Routed(ToySubmodule):
    """Also hands out each row's span, its input tokens, and (per request) a note."""

    def forward_batched(self, graph_walk, engine_inputs, **tensors):
        output = super().forward_batched(graph_walk, engine_inputs, **tensors)
        token = output.check_stop_buffers["new_token"]
        output.row_outputs = {"double": 2 * token}
        output.packed_outputs = {"__ids__": tensors["input_ids"] + 0}
        output.per_rid_outputs = {i: {"span": [span]} for i, span in zip(engine_inputs.request_ids, token, strict=True)}
        return output

    def unpack_packed_outputs(self, static_output, request_ids, real_seq_lens, inputs, per_request_info):
        parts = static_output["__ids__"][: sum(real_seq_lens)].split(list(real_seq_lens))
        return {i: {"ids": [part]} for i, part in zip(request_ids, parts, strict=True)}

    def postprocess(self, graph_walk, info, outputs):
        if info.extras.get("break") == graph_walk:
            raise RuntimeError("broke in postprocess")
        return outputs | {"walk": [graph_walk]}


@pytest.mark.parametrize("name", BACKENDS)
def test_every_request_gets_its_own_outputs_on_every_path(name):
    engine, _, _ = make_engine(backend=BACKENDS[name](), submodule=Routed())
    prompts = {0: [1, 2], 1: [3], 2: [4, 5, 6]}
    infos = [request(i, prompt) for i, prompt in prompts.items()]
    for info in infos:
        engine.ingest(info)
    first = engine.exec(Batch("LLM", "prefill", infos))
    second = engine.exec(Batch("LLM", "decode", [infos[2], infos[0]]))
    assert first.request_ids == (0, 1, 2)
    for i, prompt in prompts.items():
        token = expected(prompt, 0)[0]
        own = first.outputs[i]
        assert own["ids"][0].tolist() == prompt
        assert (own["double"][0].tolist(), int(own["span"][0])) == ([2 * token], token)
        assert own["walk"] == ["prefill"]
    assert list(second.outputs) == [2, 0]
    assert second.outputs[0]["double"][0].tolist() == [2 * expected([1, 2], 1)[1]]
    assert second.outputs[2]["ids"][0].tolist() == expected([4, 5, 6], 0)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_request_whose_postprocess_raises_fails_alone(name):
    engine, _, toy = make_engine(backend=BACKENDS[name](), submodule=Routed())
    infos = [request(i, [i + 1], **({"break": "decode"} if i == 1 else {})) for i in range(3)]
    for info in infos:
        engine.ingest(info)
    assert not engine.exec(Batch("LLM", "prefill", infos)).errors
    flight = engine.launch(Batch("LLM", "decode", infos))
    assert flight.request_ids == (0, 2)
    assert str(flight.errors[1]) == "broke in postprocess"
    result = engine.collect(flight)
    assert result.host["new_token"].tolist() == [expected([1], 1)[1], expected([3], 1)[1]]
    assert list(result.outputs) == [0, 2]
    assert [int(toy.length[info.row]) for info in infos] == [2, 2, 2]  # it did run
    engine.remove(1)
    again = engine.exec(Batch("LLM", "decode", [infos[0], infos[2]]))
    assert again.host["new_token"].tolist() == [expected([1], 2)[2], expected([3], 2)[2]]


def test_a_mixed_step_is_post_processed_by_each_rows_own_walk():
    engine, _, _ = make_engine(backend=CpuGraphBackend(), submodule=Routed())
    old, new = request(0, [1]), request(1, [2, 3])
    engine.ingest(old)
    engine.ingest(new)
    engine.exec(Batch("LLM", "prefill", [old]))
    result = engine.exec(Batch("LLM", "mixed", [old, new], row_walks=["decode", "prefill"]))
    assert {i: own["walk"] for i, own in result.outputs.items()} == {0: ["decode"], 1: ["prefill"]}


def test_a_step_whose_outputs_cannot_be_told_apart_fails_and_does_not_run_again():
    class Forgetful(Routed):
        def unpack_packed_outputs(self, *args):
            raise RuntimeError("broke in unpack")

    engine, submodule, _ = make_engine(backend=CpuGraphBackend(), submodule=Forgetful())
    infos = [request(i) for i in range(2)]
    for info in infos:
        engine.ingest(info)
    result = engine.exec(Batch("LLM", "prefill", infos))
    assert {str(error) for error in result.errors.values()} == {"broke in unpack"}
    assert result.request_ids == ()
    assert submodule.forwards == 1


def test_a_step_of_stop_buffers_alone_makes_nothing_per_request():
    engine, _, _ = make_engine()
    info = request(0)
    engine.ingest(info)
    assert engine.exec(Batch("LLM", "prefill", [info])).outputs == {}
