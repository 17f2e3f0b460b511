"""Requests that share: a prompt starts on the pages of an equal one, and leaves its own when they are full."""

import numpy as np
import pytest

from mstar.engine.resources.kv.config import Fork, KVReqConfig, KVStep, Retention
from mstar.engine.resources.step import SubmoduleStep

from .drive import Rig

KV_ONLY = SubmoduleStep({"kv_cache": KVStep()})
PROMPT = np.arange(100, 111)  # 11 tokens, page size 4


@pytest.fixture
def rig(monkeypatch):
    monkeypatch.setenv("MSTAR_KV_DEBUG_ASSERTS", "1")
    monkeypatch.setenv("MSTAR_KV_CHAIN_LAZY_STEPS", "1")
    return Rig(pages=20)


def join(rig, rid, prompt=PROMPT, row=None, **options):
    """Ingest, match and apply, as the engine does; returns the matched tokens."""
    row = rid if row is None else row
    config = KVReqConfig(prompt_tokens=len(prompt), max_tokens=4, prompt_ids=prompt, **options)
    rig.row_of[rid] = row
    rig.kv.ingest_request(rid, row, config)
    matched = rig.kv.resolve_cached_prefix(rid) if rig.kv.enable_prefix_cache(rid) else 0
    rig.kv.apply_cached_prefix(rid, row, matched)
    return matched


def leave(rig, rid):
    rig.kv.remove_request(rid, rig.row_of.pop(rid))
    rig.kv.check_pages()


def prefill(rig, rid, tokens):
    rig.run([rid], [tokens], step=KV_ONLY)


def test_an_equal_prompt_starts_on_the_first_ones_full_pages(rig):
    assert join(rig, 0) == 0
    prefill(rig, 0, 11)
    assert join(rig, 1) == 8
    assert rig.kv.stored_len[1] == 8
    assert rig.kv.page_table[1, :2].tolist() == rig.kv.page_table[0, :2].tolist()
    assert rig.kv.arena.owners(rig.kv.page_table[1, :2]).tolist() == [3, 3]
    prefill(rig, 1, 3)
    assert rig.kv.page_table[1, 2] != rig.kv.page_table[0, 2]
    assert rig.kv.counters["prefix_hit_tokens"] == 8


def test_the_last_token_of_a_prompt_fills_a_page_that_is_shared_beside_rows_with_more_tokens(monkeypatch):
    monkeypatch.setenv("MSTAR_KV_CHAIN_LAZY_STEPS", "64")
    rig = Rig(pages=20)
    join(rig, 0, PROMPT[:8])
    prefill(rig, 0, 7)
    join(rig, 1, PROMPT + 100)
    rig.run([0, 1], [1, 5], step=KV_ONLY)
    assert join(rig, 2) == 8, "both pages of request 0"
    assert join(rig, 3, PROMPT + 100) == 4


def test_a_prompt_of_whole_pages_leaves_its_last_token_to_run(rig):
    join(rig, 0, PROMPT[:8])
    prefill(rig, 0, 8)
    assert join(rig, 1, PROMPT[:8]) == 4


def test_pages_of_an_aborted_prefill_are_shared_as_far_as_they_were_committed(rig):
    join(rig, 0)
    prefill(rig, 0, 5)
    rig.run([0], [6], step=SubmoduleStep({"kv_cache": KVStep(commit=False)}))
    leave(rig, 0)
    assert join(rig, 1) == 4


def test_resolving_again_takes_no_second_lease_and_answers_the_same(rig):
    join(rig, 0)
    prefill(rig, 0, 11)
    config = KVReqConfig(prompt_tokens=11, prompt_ids=PROMPT)
    rig.kv.ingest_request(1, 1, config)
    assert [rig.kv.resolve_cached_prefix(1) for _ in range(3)] == [8, 8, 8]
    rig.kv.check_pages()
    rig.kv.apply_cached_prefix(1, 1, 8)
    assert rig.kv.resolve_cached_prefix(1) == 8
    rig.kv.check_pages()


def test_a_match_is_trimmed_to_what_all_resources_agree_on(rig):
    join(rig, 0)
    prefill(rig, 0, 11)
    rig.kv.ingest_request(1, 1, KVReqConfig(prompt_tokens=11, prompt_ids=PROMPT))
    rig.kv.resolve_cached_prefix(1)
    rig.kv.apply_cached_prefix(1, 1, 4)
    assert (rig.kv.stored_len[1], rig.kv.num_pages[1], rig.kv.resolve_cached_prefix(1)) == (4, 1, 4)
    rig.kv.check_pages()


def test_a_request_that_leaves_before_its_match_is_applied_gives_its_lease_back(rig):
    join(rig, 0)
    prefill(rig, 0, 11)
    rig.kv.ingest_request(1, 1, KVReqConfig(prompt_tokens=11, prompt_ids=PROMPT))
    rig.kv.resolve_cached_prefix(1)
    leave(rig, 0)
    rig.kv.remove_request(1, 1)
    rig.kv.check_pages()
    assert rig.kv.free_pages == rig.kv.num_usable_pages


@pytest.mark.parametrize(
    "options",
    [{"use_prefix_cache": False}, {"prefix_salt": "tenant"}, {"needed_labels": {None: ("main", "cfg")}}],
)
def test_requests_that_do_not_share(rig, options):
    join(rig, 0)
    prefill(rig, 0, 11)
    assert join(rig, 1, **options) == 0


def test_a_cache_without_prefixes_shares_nothing():
    rig = Rig(prefix_cache=False)
    join(rig, 0)
    prefill(rig, 0, 11)
    leave(rig, 0)
    assert join(rig, 1) == 0
    assert rig.kv.arena.num_free == rig.kv.num_usable_pages


def test_generated_tokens_are_shared_with_the_conversations_next_turn(rig):
    join(rig, 0)
    prefill(rig, 0, 11)
    for token in (7, 8, 9, 10, 11):
        rig.kv.extend_prefix_chains(np.array([0]), np.array([token]))
        prefill(rig, 0, 1)
    leave(rig, 0)
    assert join(rig, 1, np.array([*PROMPT, 7, 8, 9, 10, 11, 55])) == 16


def test_the_page_that_the_last_sampled_token_would_fill_is_not_shared(rig):
    join(rig, 0)
    prefill(rig, 0, 11)
    rig.kv.extend_prefix_chains(np.array([0]), np.array([7]))  # sampled, and never written
    leave(rig, 0)
    assert join(rig, 1, np.array([*PROMPT, 7, 8])) == 8


def test_a_lazy_backlog_is_offered_after_a_flush_and_at_the_end(monkeypatch):
    monkeypatch.setenv("MSTAR_KV_CHAIN_LAZY_STEPS", "16")
    rig = Rig(pages=30)
    join(rig, 0)
    prefill(rig, 0, 11)
    for token in range(5):
        rig.kv.extend_prefix_chains(np.array([0]), np.array([token]))
        prefill(rig, 0, 1)
    turn = np.array([*PROMPT, 0, 1, 2, 3, 4, 5])
    assert join(rig, 1, turn) == 8
    rig.kv.flush_chain_backlog()
    rig.kv.extend_prefix_chains(np.array([0]), np.array([5]))
    prefill(rig, 0, 1)
    assert join(rig, 2, turn) == 16
    rig.kv.extend_prefix_chains(np.array([0]), np.array([6]))
    leave(rig, 0)
    assert join(rig, 3, np.array([*turn, 6, 7, 8, 9])) == 16


def test_idle_pages_are_free_and_evicted_exactly_as_needed(rig):
    join(rig, 0)
    prefill(rig, 0, 11)
    leave(rig, 0)
    assert rig.kv.free_pages == rig.kv.num_usable_pages == 19
    assert rig.kv.arena.num_free == 17
    join(rig, 1, np.arange(500, 572))
    prefill(rig, 1, 72)
    assert rig.kv.counters["prefix_evictions"] == 1
    rig.kv.check_pages()


def test_a_refusal_evicts_nothing(rig):
    join(rig, 0)
    prefill(rig, 0, 11)
    leave(rig, 0)
    join(rig, 1, np.arange(500, 511))
    outcome = rig.kv.admit(KVStep(), rig.context([1], [80]))
    assert (outcome.ok, outcome.reason.pages_short) == (False, 1)
    assert rig.kv.counters["prefix_evictions"] == 0


@pytest.mark.parametrize(
    "step",
    [
        KVStep(retention=Retention(protected_tokens=0, keep_tokens=4)),
        KVStep(post_forks=(Fork(0, "other", "main"),)),
        KVStep(pre_forks=(Fork(0, "other", "main"),)),
    ],
    ids=["retention", "post_fork", "pre_fork"],
)
def test_a_stream_that_is_no_longer_its_prompt_offers_nothing_more(rig, step):
    join(rig, 0)
    prefill(rig, 0, 5)
    rig.run([0], [6], step=SubmoduleStep({"kv_cache": step}))
    shared = len(rig.kv._sharing.index)
    for _ in range(3):
        prefill(rig, 0, 4)
    leave(rig, 0)
    assert len(rig.kv._sharing.index) == shared


def test_a_reset_stream_gives_up_sealed_pages(rig):
    join(rig, 0)
    prefill(rig, 0, 11)
    rig.kv.reset_rows([0], [0])
    assert (rig.kv.num_pages[0], rig.kv.stored_len[0]) == (0, 0)
    prefill(rig, 0, 11)
    rig.kv.check_pages()


def test_pages_that_others_hold_are_lent_and_need_no_room():
    rig = Rig(pages=9)
    join(rig, 0)
    prefill(rig, 0, 11)  # 3 pages held, 1 more promised: 4 are left
    equal = KVReqConfig(prompt_tokens=11, max_tokens=8, prompt_ids=PROMPT)
    other = KVReqConfig(prompt_tokens=11, max_tokens=8, prompt_ids=PROMPT + 1)
    assert rig.kv.can_join(equal)
    assert not rig.kv.can_join(other)


# What is about to come.


def coming(rig, prompt, **options):
    config = KVReqConfig(prompt_tokens=len(prompt), max_tokens=4, prompt_ids=prompt, **options)
    found = rig.kv.prefixes.coming(config)
    return None if found is None else (found.row, found.num_pages)


def test_pages_of_a_prompt_that_runs_are_told_of_until_they_are_there(rig):
    prompt, other = np.arange(30), np.concatenate((np.arange(8), np.arange(50, 60)))
    join(rig, 0, prompt)
    assert (coming(rig, prompt), coming(rig, other), coming(rig, prompt[:8])) == ((0, 7), (0, 2), (0, 1))
    prefill(rig, 0, 10)
    assert (coming(rig, prompt), coming(rig, other)) == ((0, 5), None)
    prefill(rig, 0, 20)
    assert coming(rig, prompt) is None
    assert not len(rig.kv.prefixes.chains.coming)


def test_a_request_that_leaves_brings_nothing_more(rig):
    prompt = np.arange(30)
    join(rig, 0, prompt)
    key = rig.kv.prefixes.coming(KVReqConfig(prompt_tokens=30, prompt_ids=prompt)).key
    assert rig.kv.prefixes.row_bringing(key) == 0
    prefill(rig, 0, 10)
    leave(rig, 0)
    assert coming(rig, prompt) is None
    assert rig.kv.prefixes.row_bringing(key) is None


def test_of_two_who_share_a_beginning_each_brings_its_own_part(rig):
    first, second = np.arange(16), np.concatenate((np.arange(12), np.arange(40, 60)))
    join(rig, 0, first)
    join(rig, 1, second)
    assert coming(rig, second) == (0, 3)
    config = KVReqConfig(prompt_tokens=32, prompt_ids=second)
    assert rig.kv.prefixes.coming(config, row=0) is None
    prefill(rig, 0, 16)
    assert coming(rig, second) == (1, 4)


@pytest.mark.parametrize("options", [{"prefix_salt": "x"}, {"use_prefix_cache": False}])
def test_nobody_is_told_of_pages_that_are_not_for_it(rig, options):
    join(rig, 0, np.arange(30))
    assert coming(rig, np.arange(30), **options) is None


@pytest.mark.parametrize(("tokens", "pages"), [(7, 0), (8, 1), (15, 1), (16, 2), (30, 3)])
def test_the_middle_of_a_prompt_is_where_its_first_half_ends(rig, tokens, pages):
    prompt = np.arange(tokens)
    config = KVReqConfig(prompt_tokens=tokens, prompt_ids=prompt)
    keys = rig.kv.prefixes.index.keys(prompt)[1]
    assert rig.kv.prefixes.middle_key(config) == (keys[pages - 1] if pages else None)


def test_watched_keys_are_told_of_as_their_pages_come(rig):
    index = rig.kv.prefixes.index
    keys = index.keys(np.arange(30))[1]
    for key in keys[1:4]:
        index.watch(key)
    index.unwatch(keys[2])
    join(rig, 0, np.arange(30))
    prefill(rig, 0, 8)
    assert index.take_arrived() == {keys[1]}
    prefill(rig, 0, 22)
    assert index.holds(keys[2])
    assert index.take_arrived() == {keys[3]}
    assert index.take_arrived() == set()
