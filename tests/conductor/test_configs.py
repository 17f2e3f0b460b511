"""From a request's fields to each resource's config, and what is refused before anybody runs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mstar.conductor.configs import RequestConfigs
from mstar.conductor.request import EngineRequest, Guide, LogitEdits
from mstar.engine.resources.grammar.config import GrammarReqConfig, GrammarSpec
from mstar.engine.resources.kv.config import PagedKVConfig, PagedKVSpec
from mstar.engine.resources.logit_edits.config import LogitEditsSpec
from mstar.engine.resources.logprobs.config import LogprobsSpec
from mstar.engine.resources.sampler.config import SamplerSpec, derive_seed
from mstar.utils.errors import ErrorCode, InvalidArgument

from .toy import Bench

VOCAB, NODES = 64, {"LLM"}
KV = PagedKVSpec(
    "kv_cache", NODES, PagedKVConfig(num_layers=1, num_kv_heads=1, head_dim=1, max_seq_len=64, page_size=16)
)
SAMPLER = SamplerSpec(
    "sampler",
    NODES,
    vocab_size=VOCAB,
    enable_min_p=True,
    max_repetition_window=8,
    min_tokens_stop_ids=(0, 2),
    enable_top_p_first=True,
)
ALL = [
    KV,
    SAMPLER,
    LogitEditsSpec("logit_edits", NODES, VOCAB),
    GrammarSpec("grammar", NODES, VOCAB, list),
    LogprobsSpec("logprobs", NODES, VOCAB),
]


def request(**fields) -> EngineRequest:
    values = {"prompt_ids": np.array([1, 2, 3], "<i4").tobytes(), "max_tokens": 9, "temperature": 0.5} | fields
    return EngineRequest(**values)


def configs_of(specs=ALL, eos_ids=(0, 2), limit=9, **fields):
    return RequestConfigs(specs, VOCAB, eos_ids).describe(7, request(**fields), limit).resource_configs


def ids(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def test_every_sampling_field_reaches_the_sampler():
    fields = {
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "repetition_window": 4,
        "penalize_prompt": False,
        "top_p_first": True,
        "top_p_min_keep": 2,
        "min_tokens": 3,
        "ignore_eos": False,
    }
    config = configs_of(seed=5, **fields)["sampler"]
    assert {name: getattr(config, name) for name in fields} == fields
    assert config.seed == derive_seed(5, "sampler")


def test_without_a_seed_requests_draw_apart():
    configs = RequestConfigs(ALL, VOCAB, ())
    seeds = {configs.describe(rid, request(), 9).resource_configs["sampler"].seed for rid in range(5)}
    assert len(seeds) == 5


def test_a_plain_request_needs_nothing_but_sampler_and_cache():
    configs = configs_of()
    assert configs.keys() == {"sampler", "kv_cache"}
    assert not any(config.needs_full_variant or config.needs_preparation for config in configs.values())
    assert configs["kv_cache"].use_prefix_cache


def test_prefixes_are_shared_under_equal_tenant_and_salt_only():
    names = ["", "a", "b", "ab", "1:a", "0:", "a:", "1:", ":"]
    salts = {
        configs_of(tenant=tenant, cache_salt=salt)["kv_cache"].prefix_salt
        for tenant, salt in itertools.product(names, repeat=2)
    }
    assert len(salts) == len(names) ** 2
    assert configs_of()["kv_cache"].prefix_salt == ""


def test_no_cache_keeps_it_from_the_prefix_cache():
    assert not configs_of(no_cache=True)["kv_cache"].use_prefix_cache


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"min_tokens": 4}, 4),
        ({"min_tokens": 4, "ignore_eos": True}, 0),
        ({"min_tokens": 4, "eos_ids": ()}, 0),
        pytest.param({"min_tokens": 4, "stop_ids": (5,)}, 0, id="barred with the request's own, as one set"),
    ],
)
def test_the_sampler_bars_end_tokens_only_where_they_end_the_request(fields, expected):
    assert configs_of(**fields)["sampler"].min_tokens == expected


def test_the_requests_own_stop_ids_are_barred_until_min_tokens():
    for ignore_eos, barred in ((True, [5, 6]), (False, [5, 6, 0, 2])):
        config = configs_of(min_tokens=4, stop_ids=(5, 6), ignore_eos=ignore_eos)["logit_edits"]
        assert (config.stop_ids.tolist(), config.min_tokens) == (barred, 4)
        assert config.stop_ids.dtype == np.int64
    assert "logit_edits" not in configs_of(stop_ids=(5, 6))


def test_every_edit_reaches_its_resource():
    edits = LogitEdits(
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        bias=((3, 1.5), (63, -100.0)),
        bad_words=((1, 2), (3,)),
        allowed_ids=ids(4, 5),
    )
    config = configs_of(edits=edits)["logit_edits"]
    assert (config.presence_penalty, config.frequency_penalty, config.bad_words) == (0.5, -0.25, ((1, 2), (3,)))
    assert (config.bias_ids.tolist(), config.bias.tolist()) == ([3, 63], [1.5, -100.0])
    assert config.allowed_ids.tolist() == [4, 5]
    assert {config.bias_ids.dtype, config.allowed_ids.dtype} == {np.dtype(np.int64)}
    assert config.bias.dtype == np.float32


def test_a_grammar_knows_what_ends_the_text():
    config = configs_of(guide=Guide("regex", "a+"), stop_ids=(9,), ignore_eos=True)["grammar"]
    assert config == GrammarReqConfig(kind="regex", text="a+", stop_ids=(9,), ignore_eos=True)


def test_logprobs_of_a_prompt_keep_it_from_the_prefix_cache():
    configs = configs_of(num_logprobs=0)
    assert (configs["logprobs"].num_top, configs["logprobs"].num_prompt_top) == (0, -1)
    assert configs["logprobs"].prompt_ids is None
    assert configs["kv_cache"].use_prefix_cache
    configs = configs_of(num_prompt_logprobs=3)
    assert (configs["logprobs"].num_top, configs["logprobs"].num_prompt_top) == (-1, 3)
    assert configs["logprobs"].prompt_ids.tolist() == [1, 2, 3]
    assert not configs["kv_cache"].use_prefix_cache


REFUSED = [
    ({"temperature": -1.0}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"min_p": 2.0}, "min_p"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"repetition_window": 9}, "repetition_window"),
    ({"top_p_min_keep": 0}, "top_p_min_keep"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"stop_ids": (64,)}, "stop_token_ids"),
    ({"stop_ids": (-1,)}, "stop_token_ids"),
    ({"stop_ids": (2**31,), "min_tokens": 1}, "stop_token_ids"),
    ({"stop_ids": (2**70,)}, "stop_token_ids"),
    ({"stop_ids": tuple([1] * 1025)}, "stop_token_ids"),
    ({"edits": LogitEdits(presence_penalty=2.5)}, "presence_penalty"),
    ({"edits": LogitEdits(presence_penalty=float("nan"))}, "presence_penalty"),
    ({"edits": LogitEdits(frequency_penalty=-3.0)}, "frequency_penalty"),
    ({"edits": LogitEdits(bias=((64, 5.0),))}, "logit_bias"),
    ({"edits": LogitEdits(bias=((-1, 5.0),))}, "logit_bias"),
    ({"edits": LogitEdits(bias=((1, float("inf")),))}, "logit_bias"),
    ({"edits": LogitEdits(bad_words=((1, 64),))}, "bad_words"),
    ({"edits": LogitEdits(bad_words=((),))}, "bad_words"),
    ({"edits": LogitEdits(allowed_ids=ids(1, 64))}, "allowed_token_ids"),
    ({"edits": LogitEdits(allowed_ids=b"123")}, "allowed_token_ids"),
    ({"num_logprobs": 21}, "logprobs"),
    ({"num_logprobs": -2}, "logprobs"),
    ({"num_prompt_logprobs": 21}, "prompt_logprobs"),
    ({"num_prompt_logprobs": 0, "limit": 0}, "max_tokens"),
]


@pytest.mark.parametrize(("fields", "field"), REFUSED)
def test_what_is_outside_its_range_is_refused_by_its_name(fields, field):
    with pytest.raises(InvalidArgument, match=rf"^{field}: .*, got ") as refused:
        configs_of(**fields)
    assert refused.value.code is ErrorCode.INVALID_ARG
    assert refused.value.field == field


UNHONOURED = [
    ({"temperature": 0.5}, "temperature"),
    ({"top_k": 3}, "top_k"),
    ({"top_p_first": True}, "top_p_first"),
    ({"min_tokens": 3}, "min_tokens"),
    ({"min_tokens": 3, "stop_ids": (5,)}, "min_tokens"),
    ({"edits": LogitEdits(presence_penalty=1.0)}, "presence_penalty"),
    ({"edits": LogitEdits(bias=((1, 1.0),))}, "logit_bias"),
    ({"edits": LogitEdits(bad_words=((1,),))}, "bad_words"),
    ({"edits": LogitEdits(allowed_ids=ids(1))}, "allowed_token_ids"),
    ({"guide": Guide("json", "")}, "guided_decoding_guide_type"),
    ({"num_logprobs": 0}, "logprobs"),
    ({"num_prompt_logprobs": 0}, "prompt_logprobs"),
]


@pytest.mark.parametrize(("fields", "field"), UNHONOURED)
def test_what_no_resource_honours_is_refused_by_its_name(fields, field):
    with pytest.raises(InvalidArgument, match=rf"^{field}\b") as refused:
        configs_of(specs=[KV], **{"temperature": 0.0} | fields)
    assert refused.value.field == field


def test_a_sampler_is_asked_for_no_more_than_it_can():
    plain = SamplerSpec("sampler", NODES, vocab_size=VOCAB, enable_repetion_penalty=False)
    for fields in ({"min_p": 0.1}, {"repetition_penalty": 1.1}, {"repetition_window": 1}, {"min_tokens": 1}):
        with pytest.raises(InvalidArgument, match=next(iter(fields))):
            configs_of(specs=[KV, plain], **fields)
    with pytest.raises(InvalidArgument, match="min_tokens"):  # by whom the stop ids would have to be barred
        configs_of(specs=[KV, SAMPLER], min_tokens=1, stop_ids=(5,))


def test_no_edits_are_edits_that_do_nothing():
    assert configs_of(specs=[KV], edits=LogitEdits(), temperature=0.0).keys() == {"kv_cache"}


@pytest.mark.parametrize("fields", [{"stop_ids": (100,), "min_tokens": 1}, {"stop_ids": (-1,)}, {"num_logprobs": 21}])
def test_a_refused_request_leaves_its_neighbours_alone(fields):
    bench = Bench()
    neighbour = bench.submit([5, 6], 4)
    bench.step()
    with pytest.raises(InvalidArgument):
        bench.submit([5, 6], 4, **fields)
    bench.run()
    assert bench.outcomes[neighbour].tokens == [5, 6, 5, 6]
    bench.assert_idle()
