"""The offload pool: claims are all or nothing, copies come back bit for bit, and only what was at rest is freed."""

import threading

import numpy as np
import pytest
import torch

from mstar.engine.resources.kv.offload import NoHostMemory, OffloadPool

SHAPE = (3, 12, 2, 4, 2, 8)  # layers, pages, K and V, page size, heads, dim


def filled(dtype=torch.float32, device="cpu"):
    words = torch.randint(-(2**15), 2**15, (*SHAPE[:-1], SHAPE[-1] * dtype.itemsize // 2), dtype=torch.int16)
    return words.view(dtype).to(device)  # any bits: NaNs, denormals, infinities


def bits(tensor):
    return tensor.contiguous().view(torch.int16)


def at(*pages):
    return np.array(pages, np.int32)


needs_gpu = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stream_comes_back_bit_for_bit_on_other_pages(dtype, device):
    cache = filled(dtype, device)
    before = bits(cache).clone()
    pool = OffloadPool(cache, 5)
    assert pool.claim("a", at(3, 7, 5), generation=4)
    assert pool.settle("a", generation=4)
    cache[:, [3, 7, 5]] = 0  # others write there meanwhile
    pool.reload("a", at(1, 3, 9))
    assert torch.equal(bits(cache[:, [1, 3, 9]]), bits(before.view(dtype)[:, [3, 7, 5]]))
    untouched = [0, 2, 4, 6, 8, 10, 11]
    assert torch.equal(bits(cache[:, untouched]), bits(before.view(dtype)[:, untouched]))
    assert pool.num_free == 5
    pool.check()


def test_memory_that_the_host_does_not_have_is_refused():
    with pytest.raises(NoHostMemory, match=r"\d+ bytes, which cannot be allocated"):
        OffloadPool(filled(), 2**40)


@pytest.mark.parametrize(
    ("owner", "pages", "fields", "why"),
    [
        ("b", at(1, 2, 3), {}, "no room"),
        ("a", at(1), {}, "claimed already"),
        ("b", at(1), {"is_in_flight": True}, "a step is in flight"),
    ],
)
def test_a_refused_claim_takes_nothing(owner, pages, fields, why):
    pool = OffloadPool(filled(), 4)
    assert pool.claim("a", at(4, 5), 0)
    assert not pool.claim(owner, pages, 0, **fields), why
    assert pool.num_free == 2
    assert not pool.holds("b")
    assert pool.pages_held("a") == 2
    pool.check()


def test_a_stream_that_moved_on_meanwhile_keeps_its_pages():
    pool = OffloadPool(filled(), 4)
    pool.claim("a", at(4, 5), generation=1)
    assert not pool.settle("a", generation=2)
    assert not pool.holds("a")
    assert pool.num_free == 4
    pool.check()


def test_a_copy_is_of_the_time_of_the_claim():
    cache = filled()
    pool = OffloadPool(cache, 4)
    expected = bits(cache[:, 4]).clone()
    pool.claim("a", at(4), 0)
    pool.settle("a", 0)
    cache[:, 4] = 1
    pool.reload("a", at(6))
    assert torch.equal(bits(cache[:, 6]), expected)


def test_dropping_gives_the_room_back_and_forgets_unknown_owners():
    pool = OffloadPool(filled(), 4)
    pool.claim("a", at(4, 5), 0)
    pool.drop("a")
    pool.drop("a")
    assert pool.num_free == 4
    assert pool.claim("b", at(1, 2, 3, 4), 0)
    pool.check()


def test_a_stream_comes_back_to_as_many_pages_as_it_left():
    pool = OffloadPool(filled(), 4)
    pool.claim("a", at(4, 5), 0)
    with pytest.raises(AssertionError, match="as many pages"):
        pool.reload("a", at(4))


def test_a_claim_waits_for_whoever_marks_its_stream_in_flight():
    """The mark and the claim are made under one lock, so one of them comes first."""
    pool, claimed = OffloadPool(filled(), 4), []
    in_flight = False
    with pool.lock:
        thread = threading.Thread(target=lambda: claimed.append(pool.claim("a", at(1), 0)))
        thread.start()
        thread.join(0.05)
        assert not claimed
        in_flight = True
    thread.join()
    assert in_flight
    assert claimed == [True]


def test_random_moves_keep_every_stream_and_every_host_page():
    rng = np.random.default_rng(0)
    cache = filled()
    pool = OffloadPool(cache, 6)
    free = list(range(12))
    resident, away = {}, {}
    for step in range(400):
        name = step if not (resident or away) or rng.random() < 0.3 else None
        if name is not None and len(free) >= 2:
            pages = [free.pop() for _ in range(rng.integers(1, 3))]
            cache[:, pages] = torch.randn(3, len(pages), *SHAPE[2:])
            resident[name] = (pages, cache[:, pages].clone())
        elif resident and rng.random() < 0.5:
            name = int(rng.choice(list(resident)))
            pages, content = resident[name]
            if pool.claim(name, at(*pages), generation=step):
                assert pool.settle(name, step)
                away[name] = content
                free += resident.pop(name)[0]
                cache[:, pages] = -1
            else:
                assert len(pages) > pool.num_free
        elif away:
            name = int(rng.choice(list(away)))
            need = pool.pages_held(name)
            if len(free) >= need:
                pages = [free.pop(0) for _ in range(need)]
                pool.reload(name, at(*pages))
                resident[name] = (pages, away.pop(name))
            elif resident:
                free += resident.pop(next(iter(resident)))[0]
        pool.check()
        for pages, content in resident.values():
            assert torch.equal(cache[:, pages], content)
        assert pool.num_free == 6 - sum(pool.pages_held(name) for name in away)
