"""Requests that have left: nobody can tell that their streams are emptied later, together."""

import numpy as np
import pytest

from mstar.engine.resources.kv.config import KVReqConfig, KVStep
from mstar.engine.resources.step import SubmoduleStep

from .drive import Rig

KV_ONLY = SubmoduleStep({"kv_cache": KVStep()})


@pytest.fixture(params=["together", "each alone"])
def rig(request):
    """Requests 0 to 3 of 9 tokens (three pages) on 20 pages; 1 and 2 have left."""
    rig = Rig(pages=21)
    for rid in range(4):
        prompt = np.arange(9) + 100 * rid
        rig.join(rid, rid, kv=KVReqConfig(prompt_tokens=9, max_tokens=7, prompt_ids=prompt))
        rig.kv.resolve_cached_prefix(rid)
        rig.kv.apply_cached_prefix(rid, rid, 0)
        rig.run([rid], [9], step=KV_ONLY)
    rig.leave(1)
    if request.param == "each alone":
        assert rig.kv.num_pages[1] == 0
    rig.leave(2)
    return rig


LOOKS = {
    "free pages": (lambda kv: kv.free_pages, 14),
    "promised pages": (lambda kv: kv.promised_pages, 2),
    "tokens": (lambda kv: kv.stored_len[:4].tolist(), [9, 0, 0, 9]),
    "pages": (lambda kv: kv.num_pages[:4].tolist(), [3, 0, 0, 3]),
    "page table": (lambda kv: kv.page_table[1:3].any(), False),
    "arena": (lambda kv: (kv.arena.num_free, kv.arena.num_idle), (10, 4)),
    "a request of twelve pages": (lambda kv: kv.can_join(KVReqConfig(prompt_tokens=40, max_tokens=8)), True),
    "a request of thirteen pages": (lambda kv: kv.can_join(KVReqConfig(prompt_tokens=40, max_tokens=9)), False),
}


@pytest.mark.parametrize("look", LOOKS)
def test_every_look_finds_them_gone(rig, look):
    read, expected = LOOKS[look]
    assert read(rig.kv) == expected


def test_a_version_that_was_read_before_they_left_is_outdated(rig):
    before = rig.kv.admission_version
    rig.leave(3)
    assert rig.kv.admission_version != before


def test_their_pages_serve_the_next_step(rig):
    rig.join(7, 7)
    assert rig.kv.admit(KVStep(), rig.context([7], [56])).ok  # all fourteen, four of them out of the index


def test_their_prompts_are_shared_by_the_next_request_even_on_their_own_row(rig):
    prompt = np.append(np.arange(8) + 100, 7)
    rig.join(8, 1, kv=KVReqConfig(prompt_tokens=9, prompt_ids=prompt))
    assert rig.kv.resolve_cached_prefix(8) == 8
    rig.kv.apply_cached_prefix(8, 1, 8)
    assert rig.kv.stored_len[:3].tolist() == [9, 8, 0]
    rig.kv.check_pages()
