"""Paged attention kernels against the rule in torch operators."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("triton")

from mstar.kernels.attention import attention_reference
from mstar.kernels.cuda.decode_order import NO_PROGRAM, order_programs
from mstar.kernels.cuda.decode_split import DecodeSplit
from mstar.kernels.cuda.paged_attention import ROW_SHARES, DecodeScratch, paged_decode, paged_mixed, paged_prefill
from mstar.kernels.cuda.store_kv import store_kv
from mstar.kernels.paged_attention import paged_decode_reference, paged_prefill_reference

PAGE_SIZE = 16
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass
class Cache:
    """Pages in shuffled order; whatever no row has written is NaN."""

    layer: torch.Tensor
    table: torch.Tensor
    streams: torch.Tensor
    kv_lens: torch.Tensor


def usable(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The interpreter cannot multiply bfloat16 matrices."""
    return torch.float16 if device.type == "cpu" and dtype == torch.bfloat16 else dtype


def make_cache(kv_lens, kv_heads, head_dim, dtype, device, page_size=PAGE_SIZE, seed=0) -> Cache:
    draw = torch.Generator().manual_seed(seed)
    counts = [-(-n // page_size) for n in kv_lens]
    pages = (torch.randperm(sum(counts), generator=draw) + 1).split(counts)
    layer = torch.full((sum(counts) + 1, 2, page_size, kv_heads, head_dim), float("nan"))
    num_streams = len(kv_lens) + 3
    table = torch.full((num_streams, max(counts, default=0) + 2), 2**30, dtype=torch.int32)
    streams = torch.randperm(num_streams, generator=draw)[: len(kv_lens)].int()
    for stream, n, own in zip(streams.tolist(), kv_lens, pages, strict=True):
        table[stream, : own.numel()] = own.int()
        token = torch.arange(n)
        for i in (0, 1):
            values = torch.randn(n, kv_heads, head_dim, generator=draw)
            layer[own[token // page_size], i, token % page_size] = values
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    return Cache(layer.to(device, dtype), table.to(device), streams.to(device), lens.to(device))


def queries(num_tokens, num_heads, head_dim, dtype, device) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(num_tokens, num_heads, head_dim, generator=draw).to(device, dtype)


def indptr(spans, device) -> torch.Tensor:
    return torch.tensor([0, *spans], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    tolerance = TOLERANCE[want.dtype]
    torch.testing.assert_close(got.float(), want.float(), atol=tolerance, rtol=tolerance)


# Steps and shares of few tokens, so that short rows have several.
SHORT = DecodeSplit(16, 16, 1, 2, shares=64, whole_span=16, least_span=16)
# Programs that take rows of any length alone.
ALONE = DecodeSplit(64, 32, 4, 3, shares=1, whole_span=16, least_span=16)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [
        (6, 2, 64, torch.bfloat16),
        (2, 1, 128, torch.float16),
        (4, 4, 48, torch.float32),
        (3, 1, 256, torch.bfloat16),
        (20, 1, 64, torch.float16),
    ],
)
def test_decode_equals_the_reference_in_one_share_and_in_several(heads, kv_heads, head_dim, dtype, window, device):
    kv_lens, dtype = [1, 16, 37, 90], usable(dtype, device)
    cache = make_cache(kv_lens, kv_heads, head_dim, dtype, device)
    q = queries(len(kv_lens), heads, head_dim, dtype, device)
    args = (q, cache.layer, cache.table, cache.streams, cache.kv_lens)
    want = paged_decode_reference(*args, window=window, scale=0.2)
    scratch = DecodeScratch(len(kv_lens), heads, kv_heads, head_dim, device)
    for split in (None, ALONE):
        assert_close(paged_decode(*args, scratch, window=window, scale=0.2, split=split), want)
    for repeats_rows in (False, True):  # the first leaves the counts at zero for the second
        options = {"window": window, "scale": 0.2, "split": SHORT, "repeats_rows": repeats_rows}
        assert_close(paged_decode(*args, scratch, **options), want)
    assert not scratch.arrived.any()


@pytest.mark.parametrize("window", [None, 20])
def test_programs_may_begin_in_order_of_their_tokens(window, device):
    kv_lens, dtype = [1, 90, 37, 0, 16, 64], usable(torch.bfloat16, device)
    cache = make_cache(kv_lens, 2, 64, dtype, device)
    cache.streams[3] = -1  # padding
    q, scratch = queries(len(kv_lens), 6, 64, dtype, device), DecodeScratch(len(kv_lens), 6, 2, 64, device)
    args = (q, cache.layer, cache.table, cache.streams, cache.kv_lens)
    is_row = cache.streams >= 0
    want = paged_decode_reference(*args, window=window)[is_row]
    order = torch.full((len(kv_lens) * ROW_SHARES,), 99, dtype=torch.int32, device=device)
    split = replace(SHORT, shares=ROW_SHARES, longest_first=True)
    for repeats_rows in (False, True):  # the second goes by the first's order
        options = {"window": window, "split": split, "order": order, "repeats_rows": repeats_rows}
        assert_close(paged_decode(*args, scratch, **options)[is_row], want)
        assert not scratch.arrived.any()


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("share_bits", [0, 2, 6])
@pytest.mark.parametrize("num_rows", [1, 5, 300])
def test_the_order_of_programs(num_rows, share_bits, window, device):
    draw = torch.Generator().manual_seed(num_rows)
    lens = torch.randint(0, 200, (num_rows,), generator=draw).int()
    streams = torch.where(torch.rand(num_rows, generator=draw) < 0.1, -1, 0).int()
    order = torch.full((num_rows << share_bits,), 99, dtype=torch.int32, device=device)
    order_programs(order, streams.to(device), lens.to(device), share_bits, 64, 32, window, 16)
    want = []
    for row, (stream, kv_len) in enumerate(zip(streams.tolist(), lens.tolist(), strict=True)):
        first = max(kv_len - window, 0) // 16 * 16 if window else 0
        tokens = 0 if stream < 0 else kv_len - first
        span = max(-(-tokens // (1 << share_bits)), 64 if tokens <= 64 else 32)
        span = -(-span // 16) * 16
        want += [(-min(span, tokens), row, share) for share in range(max(-(-tokens // span), 1))]
    want = [row << share_bits | share for _, row, share in sorted(want)]
    assert order.tolist() == want + [NO_PROGRAM.value] * (order.numel() - len(want))


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [
        (6, 2, 64, torch.bfloat16),
        (2, 1, 128, torch.float16),
        (2, 1, 48, torch.float32),
        (1, 1, 256, torch.bfloat16),
    ],
)
def test_prefill_equals_the_reference(heads, kv_heads, head_dim, dtype, causal, window, device):
    spans, kv_lens, padding = [40, 1, 0, 9, 3], [40, 70, 12, 100, 3], 5
    dtype = usable(dtype, device)
    cache = make_cache(kv_lens, kv_heads, head_dim, dtype, device)
    q = queries(sum(spans) + padding, heads, head_dim, dtype, device)
    q[sum(spans) :] = float("nan")
    args = (q, cache.layer, cache.table, cache.streams, cache.kv_lens, indptr(spans, device))
    want = paged_prefill_reference(*args, causal=causal, window=window)
    assert not want[sum(spans) :].any()
    assert_close(paged_prefill(*args, causal=causal, window=window), want)


def test_prefill_of_rows_without_tokens_gives_zeros(device):
    cache = make_cache([0, 20], 1, 64, torch.float32, device)
    q = queries(6, 2, 64, torch.float32, device)
    args = (q, cache.layer, cache.table, cache.streams, cache.kv_lens, indptr([4, 2], device))
    got = paged_prefill(*args)
    assert not got[:4].any()
    assert_close(got, paged_prefill_reference(*args))
    assert paged_prefill(q[:0], *args[1:5], indptr([0, 0], device)).shape == (0, 2, 64)


def test_more_rows_than_a_program_looks_at_at_once(device, monkeypatch):
    monkeypatch.setattr("mstar.kernels.cuda.paged_prefill.ROWS_AT_ONCE", 4)
    spans = [2, 0, 1, 1, 0, 3, 1, 1, 2]
    cache = make_cache([n + 5 for n in spans], 1, 64, torch.float32, device)
    q = queries(sum(spans) + 2, 2, 64, torch.float32, device)
    args = (q, cache.layer, cache.table, cache.streams, cache.kv_lens, indptr(spans, device))
    assert_close(paged_prefill(*args), paged_prefill_reference(*args))


@pytest.mark.parametrize(
    ("split", "window", "causal", "padding"),
    [(SHORT, None, True, 1), (SHORT, 20, False, 5), (ALONE, 20, True, 0), (None, None, True, 5)],
)
def test_of_mixed_rows_each_token_is_one_kernels(split, window, causal, padding, device, monkeypatch):
    if split is not None:
        monkeypatch.setattr("mstar.kernels.cuda.paged_decode.choose_split", lambda *_: split)
    spans, kv_lens = [1, 25, 1, 0, 2, 1, 1], [70, 40, 1, 12, 33, 0, 16]
    dtype = usable(torch.bfloat16, device)
    cache = make_cache(kv_lens, 1, 64, dtype, device)
    scratch = DecodeScratch(len(spans), 3, 1, 64, device)
    q, starts = queries(sum(spans) + padding, 3, 64, dtype, device), indptr(spans, device)
    q[sum(spans) :] = float("nan")
    args = (q, cache.layer, cache.table, cache.streams, cache.kv_lens)
    want = paged_prefill_reference(*args, starts, causal=causal, window=window)
    for repeats_rows in (False, True):
        options = {"causal": causal, "window": window, "repeats_rows": repeats_rows}
        assert_close(paged_mixed(*args, starts, scratch, **options), want)
        assert not scratch.arrived.any()

    is_single = torch.zeros(q.shape[0], dtype=torch.bool)
    is_single[starts[:-1].cpu()[torch.tensor(spans) == 1].long()] = True
    decoded, others = torch.full_like(q, float("nan")), torch.full_like(q, float("nan"))
    paged_decode(*args, scratch, window=window, q_indptr=starts, out=decoded)
    paged_prefill(*args, starts, causal=causal, window=window, skips_single=True, out=others)
    assert torch.equal(decoded.isnan().all(2).all(1).cpu(), ~is_single)
    assert torch.equal(others.isnan().all(2).all(1).cpu(), is_single)
    assert not (decoded.isnan() & others.isnan()).any()


@pytest.mark.parametrize(
    ("spans", "head_dim", "dtype", "deterministic"),
    [
        ([1, 4], 64, torch.float32, False),
        ([1, 4], 256, torch.float16, False),
        ([1, 4], 64, torch.float16, True),
        ([4], 64, torch.float16, False),
        ([1], 64, torch.float16, False),
    ],
)
def test_mixed_rows_where_one_kernel_does_all(spans, head_dim, dtype, deterministic, device):
    cache = make_cache([30, 9][: len(spans)], 1, head_dim, dtype, device)
    q = queries(sum(spans) + 2, 2, head_dim, dtype, device)
    scratch = DecodeScratch(2, 2, 1, head_dim, device)
    args = (q, cache.layer, cache.table, cache.streams, cache.kv_lens, indptr(spans, device))
    got = paged_mixed(*args, scratch, deterministic=deterministic)
    assert torch.equal(got, paged_prefill(*args, deterministic=deterministic))
    assert_close(got, paged_prefill_reference(*args))


def test_mixed_rows_of_no_tokens(device):
    cache = make_cache([3, 9], 1, 64, torch.float16, device)
    q, scratch = queries(0, 2, 64, torch.float16, device), DecodeScratch(2, 2, 1, 64, device)
    rows = cache.layer, cache.table, cache.streams, cache.kv_lens
    assert paged_mixed(q, *rows, indptr([0, 0], device), scratch).shape == (0, 2, 64)


@pytest.mark.parametrize("window", [None, 30])
def test_deterministic_bits_depend_on_a_tokens_own_keys_alone(window, device):
    """The same tokens as one row, in chunks, beside others, and one by one."""
    kv_len, heads, dtype = 75, 3, usable(torch.bfloat16, device)
    cache = make_cache([kv_len, 33], 1, 64, dtype, device)
    own = [x[:1] for x in (cache.streams, cache.kv_lens)]
    q = queries(kv_len, heads, 64, dtype, device)
    keywords = {"window": window, "deterministic": True}
    whole = paged_prefill(q, cache.layer, cache.table, *own, indptr([kv_len], device), **keywords)

    cut = 41
    lens = torch.tensor([33, cut], dtype=torch.int32, device=device)
    beside = torch.cat((q[:7], q[:cut]))
    chunk = paged_prefill(
        beside, cache.layer, cache.table, cache.streams.flip(0), lens, indptr([7, cut], device), **keywords
    )
    assert torch.equal(chunk[7:], whole[:cut])
    rest = paged_prefill(q[cut:], cache.layer, cache.table, *own, indptr([kv_len - cut], device), **keywords)
    assert torch.equal(rest, whole[cut:])

    at = [0, 20, 64, kv_len - 1]
    scratch = DecodeScratch(len(at), heads, 1, 64, device)
    lens = torch.tensor([i + 1 for i in at], dtype=torch.int32, device=device)
    decoded = paged_decode(
        q[at], cache.layer, cache.table, own[0].expand(len(at)).contiguous(), lens, scratch, **keywords
    )
    assert torch.equal(decoded, whole[at])


def test_queries_inside_a_larger_tensor_and_pages_of_another_size_and_dtype(device):
    kv_lens = [5, 30]
    cache = make_cache(kv_lens, 2, 64, torch.float16, device, page_size=8)
    q = queries(2, 10, 64, torch.float32, device)[:, :4]
    args = (q, cache.layer, cache.table, cache.streams, cache.kv_lens)
    scratch = DecodeScratch(2, 4, 2, 64, device)
    want = paged_decode_reference(*args)
    assert_close(paged_decode(*args, scratch, split=SHORT), want)
    assert_close(paged_prefill(*args, indptr([1, 1], device)), want)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 4])
def test_the_reference_is_attention_by_definition(causal, window):
    spans, kv_lens = [3, 20], [18, 20]
    cache = make_cache(kv_lens, 2, 8, torch.float32, torch.device("cpu"))
    q = queries(sum(spans), 4, 8, torch.float32, torch.device("cpu"))
    args = (cache.layer, cache.table, cache.streams, cache.kv_lens, indptr(spans, "cpu"))
    got = paged_prefill_reference(q, *args, causal=causal, window=window)
    for row, (stream, kv_len, rows) in enumerate(zip(cache.streams, kv_lens, q.split(spans), strict=True)):
        pages = cache.table[stream, : -(-kv_len // PAGE_SIZE)].long()
        k, v = (cache.layer[pages, i].flatten(0, 1)[:kv_len] for i in (0, 1))
        want = attention_reference(rows, k, v, kv_len - spans[row], window, causal)
        torch.testing.assert_close(got.split(spans)[row], want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_captured_decode_serves_other_lengths():
    device = torch.device("cuda")
    kv_lens = [1000, 300, 5]
    cache = make_cache(kv_lens, 3, 64, torch.bfloat16, device)
    q = queries(3, 9, 64, torch.bfloat16, device)
    scratch = DecodeScratch(3, 9, 3, 64, device)
    args = (q, cache.layer, cache.table, cache.streams, cache.kv_lens)
    paged_decode(*args, scratch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = paged_decode(*args, scratch)
    for lens in (kv_lens, [1, 290, 3], [999, 1, 1]):
        cache.kv_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        graph.replay()
        assert_close(got, paged_decode_reference(*args))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("rows", [1, 60, 250])
def test_rows_read_ahead_see_what_the_kernel_in_front_stored(rows):
    """Each call's newest key and value come from the kernel before it, its queries from the call before that."""
    device, draw = torch.device("cuda"), torch.Generator().manual_seed(2)
    kv_lens = torch.randint(1, 900, (rows,), generator=draw).tolist()
    cache = make_cache(kv_lens, 3, 64, torch.bfloat16, device)
    q = queries(rows, 9, 64, torch.bfloat16, device)
    scratch = DecodeScratch(rows, 9, 3, 64, device)
    rows_of = (cache.table, cache.streams, cache.kv_lens)
    newest = cache.table[cache.streams.long(), (cache.kv_lens.long() - 1) // PAGE_SIZE].long()
    key_index = newest * 2 * PAGE_SIZE + (cache.kv_lens.long() - 1) % PAGE_SIZE
    layers = [cache.layer.clone() for _ in range(6)]

    def run(attend) -> torch.Tensor:
        x = q
        for i, layer in enumerate(layers):
            store_kv(layer, key_index, x[:, :3], x[:, 3:6])
            x = attend(i, x, layer)
        return x

    want = run(lambda i, x, layer: paged_decode(x, layer, *rows_of, scratch))
    for layer in layers:
        layer.copy_(cache.layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(lambda i, x, layer: paged_decode(x, layer, *rows_of, scratch, repeats_rows=i > 0))
    for _ in range(20):
        for layer in layers:
            layer.copy_(cache.layer)
        graph.replay()
        assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_captured_mixed_step_serves_other_rows():
    device = torch.device("cuda")
    kv_lens = [1000, 300, 500, 40]
    cache = make_cache(kv_lens, 3, 64, torch.bfloat16, device)
    q = queries(200, 9, 64, torch.bfloat16, device)
    scratch = DecodeScratch(4, 9, 3, 64, device)
    starts = indptr([1, 1, 100, 0], device)
    args = (q, cache.layer, cache.table, cache.streams, cache.kv_lens, starts)
    paged_mixed(*args, scratch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = paged_mixed(*args, scratch)
    for spans in ([1, 1, 100, 0], [1, 1, 1, 1], [150, 1, 0, 0], [0, 0, 160, 40], [2, 1, 64, 1]):
        starts.copy_(indptr(spans, device))
        graph.replay()
        assert_close(got, paged_prefill_reference(*args))
