"""Real graphs on a GPU: the rules that the CPU keeps, and what only a device can show."""

from __future__ import annotations

import pytest
import torch

from mstar.engine.batch import Batch
from mstar.engine.cuda_graph_backend import CudaGraphBackend
from mstar.engine.outputs import BatchedModelOutput
from mstar.engine.resources.step import BucketKey

from .toy import MODULUS, ToyOptions, ToySubmodule, expected, generate, make_engine, next_token, request
from .toy_regions import WIDTH, make_regions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def backend(device):
    return CudaGraphBackend(device, compiles=False)


def engine_on(device, backend, options=None, **arguments):
    return make_engine(options or ToyOptions(caps=False), backend=backend, device=str(device), **arguments)


def forward_of(function):
    return lambda tensors: BatchedModelOutput(row_outputs={"y": function(tensors["x"])})


def captured(backend, function, x, pool=None):
    """A graph of ``function`` over ``x`` after one warm-up."""
    forward = forward_of(function)
    with backend.capturing():
        forward({"x": x})
        backend.synchronize()
        graph = backend.capture(forward, {"x": x}, x.shape[0], pool)
    return lambda: graph.replay({"x": x}, x.shape[0]).row_outputs["y"]


# One graph


def test_a_replay_reads_what_the_static_buffer_holds_now(backend, device):
    x = torch.ones(4, device=device)
    replay = captured(backend, lambda x: x * 2 + 1, x)
    for value in (3.0, 5.0):
        x.fill_(value)
        assert replay().tolist() == [2 * value + 1] * 4


def test_what_python_says_later_is_frozen(backend, device):
    x, scale = torch.ones(4, device=device), {"by": 2.0}
    replay = captured(backend, lambda x: x * scale["by"], x)
    scale["by"] = 7.0
    assert replay().tolist() == [2.0] * 4


def test_graphs_of_one_pool_share_memory_and_stay_right_when_replayed_in_turn(backend, device):
    pool = backend.make_pool()
    x = torch.ones(1 << 22, device=device)  # 16 MiB
    before = torch.cuda.memory_reserved(device)
    replays = [captured(backend, lambda x, k=k: ((x + k) * 2 - x).sum().reshape(1), x, pool) for k in range(6)]
    grown = torch.cuda.memory_reserved(device) - before
    assert grown < 6 * 2 * x.numel() * 4
    for k in (5, 0, 3, 3, 1):
        assert replays[k]().item() == pytest.approx((1 + k) * 2 * x.numel() - x.numel())


@pytest.mark.parametrize(
    "illegal",
    [
        lambda x: x * x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.to("cpu").to(x.device),
        lambda x: (torch.cuda.synchronize(), x)[1],
        lambda x: x.unknown_method(),
    ],
    ids=["item", "mask", "host copy", "synchronise", "python error"],
)
def test_a_failed_capture_leaves_the_stream_the_allocator_and_later_captures_in_order(backend, device, illegal):
    pool = backend.make_pool()
    x = torch.ones(8, device=device)
    caller = torch.cuda.current_stream(device)
    forward = forward_of(illegal)
    for _ in range(2):
        with pytest.raises((RuntimeError, AttributeError)), backend.capturing():
            backend.capture(forward, {"x": x}, 8, pool)
        assert torch.cuda.current_stream(device) == caller
        assert not torch.cuda.is_current_stream_capturing()
    eager = [torch.full((1 << 20,), float(i), device=device) for i in range(4)]  # not from the graphs' pool
    replay = captured(backend, lambda x: x * 3, x, pool)
    other = captured(backend, lambda x: x - 1, x, backend.make_pool())
    x.fill_(4.0)
    assert replay().tolist() == [12.0] * 8
    assert other().tolist() == [3.0] * 8
    for i, tensor in enumerate(eager):
        assert tensor.eq(i).all()


def test_the_first_error_is_the_one_that_is_raised(backend, device):
    def forward(tensors):
        raise LookupError("what went wrong")

    with pytest.raises(LookupError, match="what went wrong"), backend.capturing():
        backend.capture(forward, {"x": torch.ones(1, device=device)}, 1)


def test_algorithm_search_is_off_in_a_capture_and_back_on_afterwards(backend, device):
    seen = []
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        captured(backend, lambda x: seen.append(torch.backends.cudnn.benchmark) or x * 1, torch.ones(2, device=device))
        assert seen == [True, False]
        assert torch.backends.cudnn.benchmark
        with pytest.raises(ZeroDivisionError), backend.capturing():
            backend.capture(lambda tensors: 1 // 0, {}, 1)
        assert torch.backends.cudnn.benchmark
    finally:
        torch.backends.cudnn.benchmark = before


def test_compiling_in_a_capture_is_refused(backend, device):
    compiled = torch.compile(lambda x: x * 2 + 1, backend="eager", dynamic=False)
    compiled(torch.ones(3, device=device))
    with pytest.raises(RuntimeError, match="recompile"), backend.capturing():
        backend.capture(forward_of(compiled), {"x": torch.ones(4, device=device)}, 4)
    replay = captured(backend, compiled, torch.ones(3, device=device))
    assert replay().tolist() == [3.0] * 3


# Memory and host copies


def test_a_forward_s_memory_is_measured(backend, device):
    x = torch.ones(1 << 22, device=device)
    use = backend.measure(lambda: ((x + 1) * 2).sum())
    assert 2 * x.numel() * 4 <= use.peak < 3 * x.numel() * 4
    assert use.reserved >= use.peak
    assert backend.free_memory() > 0


def test_a_host_copy_survives_the_next_replay_and_its_buffers_are_reused(backend, device):
    x = torch.zeros(64, dtype=torch.int64, device=device)
    replay = captured(backend, lambda x: x + 1, x)
    copies = []
    for value in range(20):
        x.fill_(value)
        copies.append(backend.copy_to_host({"y": replay()[:50]}))
        if len(copies) > 2:
            assert copies.pop(0).wait()["y"].tolist() == [value - 2 + 1] * 50
    assert len(backend._pinned._free[torch.int64, 64]) <= 3


def test_host_copies_of_every_type(backend, device):
    source = {
        "f": torch.tensor([[1.5, 2.5]], device=device),
        "b": torch.tensor([True, False], device=device),
        "h": torch.tensor([1.5], dtype=torch.bfloat16, device=device),
        "s": torch.tensor(7, device=device),
        "e": torch.empty(0, 3, device=device),
    }
    host = backend.copy_to_host(source).wait()
    assert host["f"].tolist() == [[1.5, 2.5]]
    assert host["b"].tolist() == [True, False]
    assert host["h"].tolist() == [1.5]
    assert int(host["s"]) == 7
    assert host["e"].shape == (0, 3)


# The engine over real graphs


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9])
def test_tokens_are_those_of_the_rule_at_every_batch_size(backend, device, rows):
    engine, _, toy = engine_on(device, backend)
    infos = [request(i, [5 * i + 1] * (i + 1)) for i in range(rows)]
    for info in infos:
        engine.ingest(info)
    assert generate(engine, infos, 6) == {i: expected([5 * i + 1] * (i + 1), 6) for i in range(rows)}
    assert not toy.length[engine.capacity :].any()
    captured_walks = {walk for _, walk in engine.steps} - {walk for _, walk, _ in engine.eager_steps}
    assert captured_walks == ({"prefill", "decode"} if rows <= 4 else {"decode"} if rows <= 8 else set())


@pytest.mark.parametrize("seed", range(5))
def test_random_ragged_batches_at_the_edges_of_buckets_replay_as_they_run_eager(backend, device, seed):
    engine, _, _ = engine_on(device, backend, ToyOptions(caps=False, decode_aliases=["talk"]))
    generator = torch.Generator().manual_seed(seed)
    next_id = 0
    for total, rows in [(16, 1), (16, 4), (17, 2), (64, 4), (65, 3), (5, 3), (1, 1)]:
        cuts = torch.randint(0, total - rows + 1, (rows - 1,), generator=generator).sort().values.tolist()
        lengths = [b - a + 1 for a, b in zip([0, *cuts], [*cuts, total - rows], strict=True)]
        prompts = {
            next_id + i: torch.randint(0, 100, (n,), generator=generator).tolist() for i, n in enumerate(lengths)
        }
        infos = [request(i, prompt) for i, prompt in prompts.items()]
        for info in infos:
            engine.ingest(info)
        assert generate(engine, infos, 3) == {i: expected(prompt, 3) for i, prompt in prompts.items()}
        talk = engine.exec(Batch("LLM", "talk", infos))
        assert talk.captured
        assert talk.bucket.graph_walk == "decode"
        for info in infos:
            engine.remove(info.request_id)
        next_id += rows


def test_the_forward_s_python_runs_at_load_only(backend, device):
    engine, submodule, _ = engine_on(device, backend)
    infos = [request(i, [i]) for i in range(3)]
    for info in infos:
        engine.ingest(info)
    ran = submodule.forwards
    generate(engine, infos, 5)
    assert submodule.forwards == ran


def test_one_failing_capture_drops_its_bucket_and_the_rest_serve(backend, device, caplog):
    engine, submodule, toy = engine_on(device, backend, warm=False)

    def hook(walk, ids):
        if walk == "decode" and ids.numel() == 4 and torch.cuda.is_current_stream_capturing():
            ids.sum().item()

    submodule.hook = hook
    engine.warm_up()
    submodule.hook = None
    assert engine._nodes["LLM"].runner.dropped_buckets == [BucketKey("decode", 4, 4)]
    assert "captured 9 of 10 buckets" in caplog.text
    assert not toy.length.any()
    infos = [request(i, [i + 1]) for i in range(3)]
    for info in infos:
        engine.ingest(info)
    assert generate(engine, infos, 4) == {i: expected([i + 1], 4) for i in range(3)}
    assert engine.exec(Batch("LLM", "decode", infos)).bucket.bs == 8


class CompiledDecode(ToySubmodule):
    """Decode through a method without Python side effects, which is compiled and then captured."""

    def pure_forward(self, graph_walk, engine_inputs, input_ids):
        toy = engine_inputs.resources["toy"]
        token = (7 * toy.sum_rows(input_ids) + toy.spans()) % MODULUS
        toy.store(token)
        return BatchedModelOutput(check_stop_buffers={"new_token": token, "fault": token < 0})

    def get_accelerator_graph_configs(self, device):
        decode, prefill = super().get_accelerator_graph_configs(device)
        decode.compile_mode, decode.capture_forward_method, prefill.compile = "default", "pure_forward", False
        return [decode, prefill]


def test_a_method_compiled_before_the_capture_gives_the_same_tokens(device):
    options = ToyOptions(decode_sizes=(1, 2), prefill_sizes=(1,), prefill_tokens=(16,))
    submodule = CompiledDecode(options)
    engine, _, _ = engine_on(device, CudaGraphBackend(device), submodule=submodule)
    assert not engine._nodes["LLM"].runner.dropped_buckets
    info = request(0, [3])
    engine.ingest(info)
    ran = submodule.forwards
    assert generate(engine, [info], 5) == {0: expected([3], 5)}
    assert submodule.forwards == ran
    assert not engine.eager_steps


def test_regions_replay_as_they_run_eager_and_their_outputs_lie_outside_the_pool(backend, device):
    engine, submodule, toy = make_regions(backend=backend, device=str(device))
    core, side = (engine._nodes["LLM"].regions[label] for label in ("core", "side"))
    rows = {0: [1, 2, 3], 1: [4] * 7, 2: [5]}
    infos = [request(i, ids) for i, ids in rows.items()]
    for info in infos:
        engine.ingest(info)
    ran = len(submodule.region.seen)
    for _ in range(3):
        kept = side.run({"x": torch.full((3, WIDTH), 2.0, device=device)}, real_bs=3).get_view("x")
        result = engine.exec(Batch("LLM", "score", infos))
        assert result.host["new_token"].tolist() == [next_token(ids) for ids in rows.values()]
        core.run({"x": torch.arange(9, device=device)}, seq_lens=[9])
        assert kept.tolist() == [[5.0] * WIDTH] * 3  # no other region's replay wrote over it
    assert len(submodule.region.seen) == ran
    assert set(submodule.took) == {"region"}
    assert [int(toy.length[info.row]) for info in infos] == [3 * len(ids) for ids in rows.values()]
