"""Attention with FlashInfer: what the planner sends and plans, with kernels by definition; on a GPU the real ones."""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from mstar.engine.resources.attention import flashinfer_backend
from mstar.engine.resources.attention.config import AttentionBackend, AttentionConfig, AttentionSpec, AttentionStep
from mstar.engine.resources.attention.flashinfer_backend import FlashInferPlanner
from mstar.engine.resources.attention.flashinfer_kernels import Geometry
from mstar.engine.resources.attention.flashinfer_load import Kernels, check_supported, load_kernels
from mstar.engine.resources.attention.flashinfer_rows import RowBuffers
from mstar.engine.resources.attention.flashinfer_workspace import (
    HeadShape,
    captured_float_bytes,
    captured_int_bytes,
    decode_float_bytes,
    eager_float_bytes,
)
from mstar.engine.resources.base import EngineResourceInfo
from mstar.engine.resources.kv.config import KVStep
from mstar.engine.resources.kv.plan import PagedIndptrs
from mstar.engine.resources.runner import StepRunner, build_resources
from mstar.engine.resources.step import Segment, SubmoduleStep
from mstar.kernels.attention import attention_reference

from .drive import CAPACITY, Rig

SMALL = HeadShape(num_qo_heads=9, num_kv_heads=3, head_dim=64, num_sms=132)
WIDE = HeadShape(num_qo_heads=16, num_kv_heads=8, head_dim=128, num_sms=132)


def on_flashinfer(rig, device="cpu", dtype=torch.float32):
    """The rig with FlashInfer's attention in place of the one it has."""
    attention = rig.specs[2]
    config = replace(attention.config, backend=AttentionBackend.FLASHINFER)
    rig.specs[2] = AttentionSpec(attention.resource_key, attention.nodes, config)
    info = EngineResourceInfo(torch.device(device), dtype, dtype, CAPACITY, 8, 2)
    rig.resources = build_resources(rig.specs, info)
    rig.runner = StepRunner(rig.resources, rig.specs)
    rig.kv, rig.attn = rig.resources["kv_cache"], rig.resources["attn"]
    return rig


class Tokens:
    """A request's fixed q, k, v [layers, length, heads, dim], from which any chunk's expected result follows."""

    def __init__(self, rig, seed, length=48):
        generator = torch.Generator().manual_seed(seed)
        config = rig.kv.config
        layers, dim = config.num_layers, config.head_dim
        self.q = torch.randn(layers, length, config.num_qo_heads, dim, generator=generator)
        self.k, self.v = torch.randn(2, layers, length, config.num_kv_heads, dim, generator=generator)
        self.stored = 0

    def cast(self, dtype):
        self.q, self.k, self.v = (x.to(dtype) for x in (self.q, self.k, self.v))
        return self

    def expected(self, span, window=None, causal=True):
        start, end = self.stored, self.stored + span
        rows = zip(self.q.float(), self.k.float(), self.v.float(), strict=True)
        return torch.stack(
            [attention_reference(q[start:end], k[:end], v[:end], start, window, causal) for q, k, v in rows]
        )


def inputs_of(streams, spans, layer, tail, device="cpu"):
    """q, k, v of the streams' next tokens, then ``tail`` padding tokens of large numbers."""
    parts = []
    for name in "qkv":
        rows = [getattr(s, name)[layer, s.stored : s.stored + n] for s, n in zip(streams, spans, strict=True)]
        parts.append(torch.cat([*rows, torch.full((tail, *rows[0].shape[1:]), 1e4, dtype=rows[0].dtype)]).to(device))
    return parts


def attend_layers(rig, streams, spans, tail=0, stores=False, device="cpu"):
    """Every layer's result [layers, tokens, heads, dim]; ``stores``: the forward stores keys and values itself."""
    outputs = []
    for layer in range(rig.kv.config.num_layers):
        q, k, v = inputs_of(streams, spans, layer, tail, device)
        if stores:
            memory, key_index = rig.attn.next_layer()
            flat = memory.view(-1, *memory.shape[3:])
            flat[key_index], flat[key_index + rig.kv.config.page_size] = k, v
            outputs.append(rig.attn.attend_stored(q))
        else:
            outputs.append(rig.attn.attend(q, k, v))
    return torch.stack(outputs)


class KernelByDefinition:
    """Does what FlashInfer's kernels do, from the arrays it is sent; keeps its plans."""

    def __init__(self, geometry, chunk_pages=0):
        self.geometry = geometry
        self._chunk_pages = chunk_pages
        self.planned = []

    def plan(self, workspace, rows, options):
        self.planned.append(options)
        return rows.qo_indptr.tolist(), self._chunks(np.diff(rows.kv_indptr.numpy()))

    def chunk_pages(self, workspace, plan):
        return self._chunk_pages

    def _chunks(self, num_pages):
        return [1 if not self._chunk_pages else -(-max(n, 1) // self._chunk_pages) for n in num_pages.tolist()]

    def run(self, workspace, plan, q, layer, rows, out, causal):
        qo, kv, last = (x.tolist() for x in (rows.qo_indptr, rows.kv_indptr, rows.last_page_len))
        assert plan == (qo, self._chunks(np.diff(kv))), "planned for other rows"
        window = None if self.geometry.window_left < 0 else self.geometry.window_left + 1
        for row, (begin, end) in enumerate(itertools.pairwise(qo)):
            pages = rows.pages[kv[row] : kv[row + 1]].long()
            length = max(pages.numel() - 1, 0) * self.geometry.page_size + last[row]
            k, v = (layer[pages, side].flatten(0, 1)[:length] for side in (0, 1))
            if length:
                start = length - (end - begin)
                out[begin:end] = attention_reference(q[begin:end], k, v, start, window, causal)


@dataclass
class Loaded:
    kernels: Kernels | None = None
    has_decode: bool = True


@pytest.fixture
def loaded(monkeypatch):
    """Kernels by definition instead of FlashInfer's; what decodes cuts rows into chunks of two pages."""
    loaded = Loaded()

    def load(geometry, kv_dtype, device):
        prefill = KernelByDefinition(geometry, chunk_pages=2)
        decode = KernelByDefinition(geometry, chunk_pages=2) if loaded.has_decode else prefill
        loaded.kernels = Kernels(decode, prefill, KernelByDefinition(geometry))
        return loaded.kernels

    monkeypatch.setattr(flashinfer_backend, "load_kernels", load)
    return loaded


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("stores", [False, True])
@pytest.mark.parametrize("slots", [(None,), (0, 1), (None, 0, 1)])
def test_prompts_chunks_and_decode_equal_each_request_alone(loaded, window, stores, slots):
    rig = on_flashinfer(Rig(window=window))
    rig.reserve(8, 64)
    streams = {rid: Tokens(rig, rid) for rid in (1, 2, 3)}
    for row, rid in enumerate(streams):
        rig.join(rid, row)
    slot = itertools.cycle(slots)
    steps = [([1, 2], [7, 3]), ([1, 2, 3], [1, 1, 9]), *[([1, 2, 3], [1, 1, 1])] * 9, ([3, 1], [4, 1]), ([2], [1])]
    for rids, spans in steps:
        chosen = [streams[rid] for rid in rids]
        out = rig.run(
            rids,
            spans,
            lambda rig, ctx, chosen=chosen, spans=spans: attend_layers(rig, chosen, spans, stores=stores),
            step=rig.step("kv_cache", "attn"),
            slot=next(slot),
        )
        wanted = torch.cat([s.expected(n, window) for s, n in zip(chosen, spans, strict=True)], 1)
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
        for stream, span in zip(chosen, spans, strict=True):
            stream.stored += span


@pytest.mark.parametrize("has_decode", [True, False])
def test_a_packed_bucket_prefills_even_single_tokens_and_gives_zeros_behind_them(loaded, has_decode):
    loaded.has_decode = has_decode
    rig = on_flashinfer(Rig())
    rig.reserve(4, 16)
    streams = [Tokens(rig, 1), Tokens(rig, 2)]
    rig.join(1, 0)
    rig.join(2, 1)
    for spans in ([5, 4], [1, 1], [2, 1], [3, 0]):
        tail = 16 - sum(spans)
        out = rig.run(
            [1, 2],
            [*spans, 0, 0],
            lambda rig, ctx, spans=spans, tail=tail: attend_layers(rig, streams, spans, tail),
            step=rig.step("kv_cache", "attn"),
            padding=2,
            slot=0,
            bucket_tokens=16,
            is_packed=True,
        )
        wanted = torch.cat([s.expected(n) for s, n in zip(streams, spans, strict=True)], 1)
        torch.testing.assert_close(out[:, : sum(spans)], wanted, rtol=1e-4, atol=1e-4)
        assert not out[:, sum(spans) :].any()
        for stream, span in zip(streams, spans, strict=True):
            stream.stored += span
    assert [(p.is_captured, p.max_tokens) for p in loaded.kernels.prefill.planned] == [(True, 16)] * 4


@pytest.mark.parametrize("has_decode", [True, False])
def test_a_captured_decode_is_planned_again_only_when_a_row_gains_a_chunk(loaded, has_decode):
    loaded.has_decode = has_decode
    rig = on_flashinfer(Rig(page_size=4))  # chunks of two pages: 8 tokens
    rig.reserve(2, 16)
    stream = Tokens(rig, 1)
    rig.join(1, 0)
    for _ in range(32):
        out = rig.run(
            [1], [1], lambda rig, ctx: attend_layers(rig, [stream], [1]), step=rig.step("kv_cache", "attn"), slot=0
        )
        torch.testing.assert_close(out, stream.expected(1), rtol=1e-4, atol=1e-4)
        stream.stored += 1
    assert len(loaded.kernels.decode.planned) == 4


def test_rows_outside_a_capture_are_planned_every_step(loaded):
    rig = on_flashinfer(Rig(page_size=4))
    rig.join(1, 0)
    stream = Tokens(rig, 1)
    for _ in range(5):
        rig.run([1], [1], lambda rig, ctx: attend_layers(rig, [stream], [1]), step=rig.step("kv_cache", "attn"))
        stream.stored += 1
    assert len(loaded.kernels.decode.planned) == 5


def test_long_prompts_go_to_the_kernel_for_long_rows(loaded):
    rig = on_flashinfer(Rig(max_seq_len=800, pages=512))
    rig.join(1, 0)
    rig.join(2, 1)
    first, second = Tokens(rig, 1, 600), Tokens(rig, 2, 600)
    for rids, streams, spans in (([1], [first], [520]), ([1, 2], [first, second], [1, 530])):
        rig.run(
            rids,
            spans,
            lambda rig, ctx, streams=streams, spans=spans: attend_layers(rig, streams, spans),
            step=rig.step("kv_cache", "attn"),
        )
        for stream, span in zip(streams, spans, strict=True):
            stream.stored += span
    assert len(loaded.kernels.long_prefill.planned) == len(loaded.kernels.prefill.planned) == 1


def test_queries_of_their_own_read_a_label_that_does_not_grow(loaded):
    rig = on_flashinfer(Rig())
    rig.join(1, 0)
    stream = Tokens(rig, 1)
    rig.run([1], [10], lambda rig, ctx: attend_layers(rig, [stream], [10]), step=rig.step("kv_cache", "attn"))
    read = SubmoduleStep(
        {"kv_cache": KVStep((Segment(1, "main", 0),)), "attn": AttentionStep((Segment(1, "main", 3),), causal=False)}
    )
    q = torch.randn(3, 6, 16)
    none = torch.empty(0, 2, 16)
    out = rig.run([1], [0], lambda rig, ctx: rig.attn.attend(q, none, none), step=read)
    wanted = attention_reference(q, stream.k[0, :10], stream.v[0, :10], 0, causal=False)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="more queries than its rows hold"):
        rig.run(
            [1],
            [0],
            step=SubmoduleStep(
                {"kv_cache": KVStep((Segment(1, "main", 0),)), "attn": AttentionStep((Segment(1, "main", 11),))}
            ),
        )


def test_a_step_without_queries_gives_nothing(loaded):
    rig = on_flashinfer(Rig())
    rig.join(1, 0)
    none = torch.empty(0, 2, 16)
    out = rig.run(
        [1], [0], lambda rig, ctx: rig.attn.attend(torch.empty(0, 6, 16), none, none), step=rig.step("kv_cache", "attn")
    )
    assert out.shape == (0, 6, 16)


def arrays(num_rows, pages_per_row, seed=0):
    pages = np.random.default_rng(seed).integers(1, 99, num_rows * pages_per_row).astype(np.int32)
    indptr = np.arange(num_rows + 1, dtype=np.int32) * pages_per_row
    return PagedIndptrs(
        qo_indptr=np.arange(num_rows + 1, dtype=np.int32),
        paged_kv_indptr=indptr,
        paged_kv_indices=pages,
        kv_lens=np.full(num_rows, 16 * pages_per_row - 3, np.int32),
        page_size=np.array([16], np.int32),
    )


def test_row_buffers_hold_what_was_sent_at_addresses_that_stay():
    buffers = RowBuffers(torch.device("cpu"))
    buffers.reserve(8, 64)
    addresses = None
    for num_rows, pages_per_row, seed in ((8, 8, 1), (3, 2, 2), (3, 2, 2), (5, 2, 3), (8, 8, 1)):
        host = arrays(num_rows, pages_per_row, seed)
        sent = buffers.send(host.qo_indptr, host)
        held = (host.qo_indptr, host.paged_kv_indptr, host.paged_kv_indices, host.paged_kv_last_page_len)
        assert all(np.array_equal(there.numpy(), here) for there, here in zip(sent, held, strict=True))
        addresses = addresses or [x.data_ptr() for x in sent]
        assert [x.data_ptr() for x in sent] == addresses


def test_row_buffers_grow_where_nothing_was_reserved():
    buffers = RowBuffers(torch.device("cpu"))
    for num_rows in (1, 4, 33):
        host = arrays(num_rows, 3)
        sent = buffers.send(host.qo_indptr, host)
        assert np.array_equal(sent.pages.numpy(), host.paged_kv_indices)


def test_row_buffers_send_only_what_changed(monkeypatch):
    buffers = RowBuffers(torch.device("cpu"))
    host = arrays(4, 3)
    buffers.send(host.qo_indptr, host)
    copied = []
    real = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, *a, **k: copied.append(self.numel()) or real(self, *a, **k))
    host = arrays(4, 3)
    host.kv_lens += 1
    buffers.send(host.qo_indptr, host)
    assert copied == [4]  # lengths of the last pages


def split_bytes(heads, blocks, tile):
    """fp32 values and sums that ``blocks`` of a kv head hand on, two parts that are laid out one after the other."""
    return heads.num_qo_heads * blocks * tile * heads.head_dim * 4 + heads.num_qo_heads * blocks * tile * 4


@pytest.mark.parametrize("heads", [SMALL, WIDE, HeadShape(8, 1, 256, 132)])
def test_workspaces_hold_what_the_plans_allot(heads):
    full_tile = 64 if heads.head_dim == 256 else 128
    per_kv_head = 2 * heads.num_sms // heads.num_kv_heads
    assert eager_float_bytes(heads) >= split_bytes(heads, per_kv_head, full_tile) + 32
    assert decode_float_bytes(heads) >= split_bytes(heads, 32 * heads.num_sms // heads.num_kv_heads, 1) + 32
    assert eager_float_bytes(heads) < 160 << 20
    for num_tokens, num_rows in ((1, 1), (64, 64), (256, 256), (512, 64), (8192, 256)):
        tiles = -(-num_tokens * heads.group // full_tile) + num_rows - 1  # the fewest that are possible
        assert captured_float_bytes(heads, num_tokens, num_rows) >= split_bytes(heads, max(per_kv_head, tiles), 16)
        assert captured_int_bytes(heads, num_tokens, num_rows) >= 13 * tiles + 4 * num_tokens + 8 * num_rows


def test_a_bucket_too_large_for_the_workspace_does_not_split_rows(loaded, monkeypatch):
    monkeypatch.setenv("MSTAR_WORKSPACE_BUFFER_MB", "1")
    rig = on_flashinfer(Rig(max_seq_len=800, pages=512, dim=64))
    rig.reserve(2, 700)
    stream = Tokens(rig, 1, 200)
    rig.join(1, 0)
    for span, tokens in ((2, 2), (100, 700)):
        rig.run(
            [1],
            [span],
            lambda rig, ctx, span=span, tokens=tokens: attend_layers(rig, [stream], [span], tokens - span),
            step=rig.step("kv_cache", "attn"),
            slot=0,
            bucket_tokens=tokens,
            is_packed=True,
        )
        stream.stored += span
    planned = [*loaded.kernels.prefill.planned, *loaded.kernels.long_prefill.planned]
    assert [p.splits for p in planned] == [True, False]


CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("geometry", "kv_dtype", "device", "message"),
    [
        (Geometry(SMALL, 16, -1, torch.bfloat16), torch.bfloat16, torch.device("cpu"), "needs a CUDA device, got cpu"),
        (
            Geometry(HeadShape(4, 4, 72, 132), 16, -1, torch.bfloat16),
            torch.bfloat16,
            CUDA,
            "head_dim must be one of 64, 128, 256, got 72",
        ),
        (Geometry(SMALL, 16, -1, torch.float32), torch.float32, CUDA, "both be float16 or both bfloat16, got float32"),
        (Geometry(SMALL, 16, -1, torch.bfloat16), torch.float16, CUDA, "got bfloat16 and float16"),
    ],
)
def test_what_flashinfer_cannot_do_is_refused(geometry, kv_dtype, device, message):
    with pytest.raises(ValueError, match=message):
        check_supported(geometry, kv_dtype, device)


def test_a_missing_flashinfer_is_said_so(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "flashinfer", None)
    with pytest.raises(ValueError, match=r"needs flashinfer-python 0\.6\.13 \(extra 'cuda'\)"):
        load_kernels(Geometry(SMALL, 16, -1, torch.bfloat16), torch.bfloat16, CUDA)


def test_a_deterministic_config_is_refused(loaded):
    rig = Rig()
    config = AttentionConfig(backend="FLASHINFER", deterministic=True)
    info = EngineResourceInfo(torch.device("cpu"), torch.float32, torch.float32, CAPACITY, 8)
    with pytest.raises(ValueError, match="no deterministic mode"):
        FlashInferPlanner(config, rig.kv, info)


# The real kernels.


def is_built(heads, has_window=False):
    """Whether FlashInfer's modules lie there already: building them takes minutes."""
    from flashinfer.jit import gen_batch_decode_module, gen_batch_prefill_module

    built_for = (*[torch.bfloat16] * 3, torch.int32, heads.head_dim, heads.head_dim, 0, has_window, False)
    specs = [gen_batch_prefill_module("fa2", *built_for, False), gen_batch_decode_module(*built_for)]
    return all(spec.is_compiled for spec in specs)


def gpu_rig(heads, window=None, **options):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    pytest.importorskip("flashinfer")
    if not is_built(heads, window is not None):
        pytest.skip("FlashInfer's modules are not built")
    options = {"page_size": 16, "pages": 1024, "max_seq_len": 2048, **options}
    rig = Rig(kv_heads=heads.num_kv_heads, group=heads.group, dim=heads.head_dim, window=window, **options)
    rig = on_flashinfer(rig, "cuda", torch.bfloat16)
    rig.join(99, 7)
    stream = Tokens(rig, 99, 700).cast(torch.bfloat16)
    for span in (600, 20, 1):  # loads each kernel, which a capture may not
        rig.run(
            [99],
            [span],
            lambda rig, ctx, span=span: attend_layers(rig, [stream], [span], device="cuda"),
            step=rig.step("kv_cache", "attn"),
        )
        stream.stored += span
    rig.leave(99)
    return rig


def close(out, wanted):
    torch.testing.assert_close(out.float().cpu(), wanted, rtol=2e-2, atol=2e-2)


SHAPES = [SMALL, WIDE, HeadShape(14, 2, 64, 132)]  # the last has no CUDA-core decode


@pytest.mark.gpu
@pytest.mark.parametrize("heads", SHAPES)
@pytest.mark.parametrize("window", [None, 37])
def test_real_kernels_equal_the_definition(heads, window):
    rig = gpu_rig(heads, window)
    streams = {rid: Tokens(rig, rid, 1500).cast(torch.bfloat16) for rid in (1, 2, 3)}
    for row, rid in enumerate(streams):
        rig.join(rid, row)
    steps = [([1, 2], [1030, 17]), ([2, 1, 3], [1, 1, 300]), *[([1, 2, 3], [1, 1, 1])] * 4, ([3], [600]), ([2], [1])]
    for rids, spans in steps:
        chosen = [streams[rid] for rid in rids]
        out = rig.run(
            rids,
            spans,
            lambda rig, ctx, chosen=chosen, spans=spans: attend_layers(rig, chosen, spans, device="cuda"),
            step=rig.step("kv_cache", "attn"),
        )
        close(out, torch.cat([s.expected(n, window) for s, n in zip(chosen, spans, strict=True)], 1))
        for stream, span in zip(chosen, spans, strict=True):
            stream.stored += span


class Capture:
    """The layers' attention in a graph, over buffers that hold each replay's q, k and v."""

    def __init__(self, rig, tokens):
        config = rig.kv.config
        layers, dim = config.num_layers, config.head_dim
        heads = (config.num_qo_heads, config.num_kv_heads, config.num_kv_heads)
        self.buffers = [torch.zeros(layers, tokens, n, dim, dtype=torch.bfloat16, device="cuda") for n in heads]
        self.graph = None

    def run(self, rig, streams, spans):
        for layer in range(rig.kv.config.num_layers):
            for buffer, values in zip(self.buffers, inputs_of(streams, spans, layer, 0, "cuda"), strict=True):
                buffer[layer, : values.shape[0]] = values
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph):
                self.out = torch.stack([rig.attn.attend(*qkv) for qkv in zip(*self.buffers, strict=True)])
        self.graph.replay()
        torch.cuda.synchronize()
        return self.out


@pytest.mark.gpu
@pytest.mark.parametrize("heads", SHAPES)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_captured_decode_replays_with_other_lengths_and_pages(heads, rows):
    rig = gpu_rig(heads)
    rig.reserve(4, 2048)
    rids = list(range(1, rows + 1))
    streams = [Tokens(rig, rid, 2000).cast(torch.bfloat16) for rid in rids]
    for row, rid in enumerate(rids):
        rig.join(rid, row)
    captures = [Capture(rig, rows) for _ in range(2)]
    step = rig.step("kv_cache", "attn")
    # Captured short, replayed long: each prompt is cut into more chunks than at capture.
    for prompt in (3, 150, 1100):
        spans = [prompt + 7 * i for i in range(rows)]
        rig.run(rids, spans, lambda rig, ctx, s=spans: attend_layers(rig, streams, s, device="cuda"), step=step)
        for stream, span in zip(streams, spans, strict=True):
            stream.stored += span
        for i in range(36):
            out = rig.run(
                rids,
                [1] * rows,
                lambda rig, ctx, i=i: captures[i % 2].run(rig, streams, [1] * rows),
                step=step,
                slot=i % 2,
            )
            close(out, torch.cat([s.expected(1) for s in streams], 1))
            for stream in streams:
                stream.stored += 1


@pytest.mark.gpu
@pytest.mark.parametrize("heads", SHAPES)
@pytest.mark.parametrize("tokens", [64, 1100])
def test_a_captured_packed_bucket_replays_ragged_rows(heads, tokens):
    rig = gpu_rig(heads)
    rig.reserve(2, tokens)
    streams = [Tokens(rig, rid, 1800).cast(torch.bfloat16) for rid in (1, 2)]
    for row, rid in enumerate((1, 2)):
        rig.join(rid, row)
    capture = Capture(rig, tokens)
    for spans in ([tokens - 1, 1], [1, 1], [2, tokens // 2], [30, 0]):
        out = rig.run(
            [1, 2],
            spans,
            lambda rig, ctx, spans=spans: capture.run(rig, streams, spans),
            step=rig.step("kv_cache", "attn"),
            slot=0,
            bucket_tokens=tokens,
            is_packed=True,
        )
        close(out[:, : sum(spans)], torch.cat([s.expected(n) for s, n in zip(streams, spans, strict=True)], 1))
        assert not out[:, sum(spans) :].any()
        for stream, span in zip(streams, spans, strict=True):
            stream.stored += span


@pytest.mark.gpu
def test_rows_without_keys_give_zeros():
    rig = gpu_rig(SMALL)
    rig.join(1, 0)
    read = SubmoduleStep(
        {"kv_cache": KVStep((Segment(1, "main", 0),)), "attn": AttentionStep((Segment(1, "main", 3),), causal=False)}
    )
    q, none = (torch.ones(n, h, 64, dtype=torch.bfloat16, device="cuda") for n, h in ((3, 9), (0, 3)))
    out = rig.run([1], [0], lambda rig, ctx: rig.attn.attend(q, none, none), step=read)
    assert not out.any()
