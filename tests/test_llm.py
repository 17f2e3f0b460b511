"""Offline use, over the real model."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mstar import LLM, SamplingParams
from mstar.utils.errors import InvalidArgument, LoadError

pytestmark = pytest.mark.model
GOLDEN = json.loads((Path(__file__).parent / "data" / "golden" / "smollm2_135m_greedy.json").read_text())
CASES = GOLDEN["cases"] if isinstance(GOLDEN, dict) else GOLDEN
GREEDY = SamplingParams(temperature=0, max_tokens=12)
PAGE_BYTES = 2 * 30 * 16 * 3 * 64 * 4  # of SmolLM2-135M in float32, 16 tokens


@pytest.fixture(scope="module")
def llm():
    return LLM("smollm2-135m", device="cpu", kv_memory_bytes="256MiB", max_running_requests=32)


def agrees(case, ids):
    """Equal up to the first step where the reference itself is undecided."""
    until = min(case["tie_steps"], default=len(ids))
    return ids[:until] == case["output_ids"][:until]


def test_the_package_imports_without_torch_and_finds_its_names():
    code = "import sys, mstar; assert 'torch' not in sys.modules; from mstar import LLM, SamplingParams; print(LLM)"
    assert "mstar.llm.LLM" in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout


def test_a_batch_of_ids_texts_and_chats_gives_the_reference_outputs(llm):
    requests = []
    for index, case in enumerate(CASES):
        prompt = {"messages": case["messages"]} if case.get("messages") else {"prompt": case["prompt"]}
        requests.append({"prompt_ids": case["prompt_ids"]} if index % 2 else prompt)
    done = llm.generate(requests, {"temperature": 0, "max_tokens": 48, "ignore_eos": True})
    for case, completion in zip(CASES, done, strict=True):
        assert completion.num_input_tokens == len(case["prompt_ids"])
        assert (len(completion.output_ids), completion.finish_reason) == (48, "length")
        assert agrees(case, completion.output_ids)


def test_the_end_token_stops_and_is_in_neither_ids_nor_text(llm):
    cases = [case for case in CASES if case.get("eos_at") is not None and not case["tie_steps"]]
    assert cases
    done = llm.generate([case["prompt_ids"] for case in cases], {"temperature": 0, "max_tokens": 48})
    for case, completion in zip(cases, done, strict=True):
        assert completion.finish_reason == "stop"
        assert completion.output_ids == case["output_ids"][: case["eos_at"]]
        assert "<|im_end|>" not in completion.text


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_budgets_of_zero_and_one_are_exact_fifty_times(llm, max_tokens):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    done = llm.generate([list(range(100, 110))] * 50, params)
    assert {(len(c.output_ids), c.finish_reason) for c in done} == {(max_tokens, "length")}
    assert max_tokens or {c.text for c in done} == {""}
    pools = llm.driver.core.conductor.pools
    assert pools.num_pages_used == 0


def test_a_stop_string_ends_the_text_before_it(llm):
    whole = llm.generate("One two three", GREEDY)[0]
    stop = whole.text[6:9]
    cut = llm.generate({"prompt": "One two three", "stop": stop}, GREEDY)[0]
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert whole.output_ids[: len(cut.output_ids)] == cut.output_ids
    assert llm.driver.core.conductor.num_running == 0


def test_streamed_pieces_join_to_the_completion(llm):
    for params in ({"stop": "zzz"}, {}):
        merged = {"temperature": 0, "max_tokens": 12} | params
        whole = llm.generate("The capital of France is", merged)[0]
        pieces = list(llm.stream("The capital of France is", merged))
        assert "".join(piece.text for piece in pieces) == whole.text
        assert [token for piece in pieces for token in piece.output_ids] == whole.output_ids
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]


def test_a_prompt_that_ends_inside_a_character_is_not_repeated(llm):
    tokenizer = llm.front.tokenizer
    byte_ids = {
        tokenizer.token_bytes(id): id for id in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(id)) == 1
    }
    ids = [*tokenizer.encode("Hello world "), *(byte_ids[bytes([byte])] for byte in b"\xf0\x9f\x8c")]
    params = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    (whole,) = llm.generate([{"prompt_ids": ids}], params)
    pieces = list(llm.stream({"prompt_ids": ids}, params))
    assert len(whole.output_ids) == 8
    assert whole.text == "".join(piece.text for piece in pieces) == tokenizer.decode(whole.output_ids)
    assert not whole.text.startswith(("Hello", "\ufffd"))


def test_top_k_from_the_vocabulary_up_is_off(llm):
    shared = {"temperature": 1, "max_tokens": 8, "seed": 3, "ignore_eos": True}
    values = [0, None, -1, llm.front.vocab_size, llm.front.vocab_size + 1, 2**31 - 1, 2**31, 2**63 - 1]
    done = llm.generate([{"prompt": "Once upon a time", "top_k": value} for value in values], shared)
    assert len({tuple(completion.output_ids) for completion in done}) == 1
    with pytest.raises(InvalidArgument, match=r"^top_k: "):
        llm.generate({"prompt": "One", "top_k": 2**63})


def test_a_closed_stream_frees_its_row_and_others_go_on(llm):
    beside = llm.stream("One two three", GREEDY)
    first = next(beside)
    stream = llm.stream("The capital of France is", {"temperature": 0, "max_tokens": 500})
    next(stream)
    stream.close()
    assert llm.driver.core.conductor.num_running == 1
    text = first.text + "".join(piece.text for piece in beside)
    assert text == llm.generate("One two three", GREEDY)[0].text


def test_a_seed_repeats_and_no_seed_does_not(llm):
    def ids(seed, count=2):
        params = SamplingParams(temperature=1.5, max_tokens=16, seed=seed, ignore_eos=True)
        return [tuple(c.output_ids) for c in llm.generate(["Once upon a time"] * count, params)]

    assert len({*ids(5), *ids(5, 1), *ids("5", 5), *ids(5.0), *ids(np.int64(5))}) == 1
    assert len({*ids(5), *ids(6)}) == 2
    assert len(set(ids(None, 3))) == 3


def test_parameters_of_a_request_win_over_the_shared_ones(llm):
    done = llm.generate(
        [{"prompt": "One", "max_tokens": "3"}, {"prompt": "One", "sampling_parameters": '{"max_tokens": 4}'}, "One"],
        [GREEDY, GREEDY, {"max_tokens": 2, "temperature": "0"}],
    )
    assert [len(c.output_ids) for c in done] == [3, 4, 2]


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [("", {}, "text_input"), ([], {}, None), ([-1], {}, "input_ids"), ([49152], {}, "input_ids"),
     ({"input_ids": []}, {}, "input_ids"), ({"messages": []}, {}, "messages"), ({}, {}, "prompt"),
     ({"prompt": "a", "prompt_ids": [1]}, {}, "prompt"), ("a", {"top_k": -2}, "top_k"), ("a", {"foo": 1}, "foo"),
     ({"prompt": "a", "temperature": "nan"}, {}, "temperature")],
)  # fmt: skip
def test_bad_input_is_refused_by_name_and_the_next_request_is_served(llm, prompt, params, field):
    if field is None:
        assert llm.generate(prompt, params) == []
        return
    with pytest.raises(InvalidArgument) as caught:
        llm.generate(prompt, params)
    assert caught.value.field == field
    assert len(llm.generate("One", {"max_tokens": 1, "ignore_eos": True})[0].output_ids) == 1


def test_the_context_limit_is_exact():
    small = LLM("smollm2-135m", device="cpu", max_seq_len=64, max_running_requests=4)
    for length, max_tokens, expected in (
        (62, 5, 2),
        (63, 1, 1),
        (63, 5, 1),
        (62, 1, 1),
        (10, 2**40, 54),
        (10, None, 54),
    ):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        completion = small.generate(list(range(100, 100 + length)), params)[0]
        assert (len(completion.output_ids), completion.finish_reason) == (expected, "length")
    for length in (64, 65):
        with pytest.raises(InvalidArgument, match=f"limit of 64, got {length}"):
            small.generate(list(range(100, 100 + length)), GREEDY)


def test_what_the_cache_can_never_hold_is_refused_and_blocks_nobody():
    small = LLM("smollm2-135m", device="cpu", kv_memory_bytes=9 * PAGE_BYTES, max_running_requests=4)
    with pytest.raises(InvalidArgument, match=r"8 pages of 16 tokens, got '130 \+ 5 tokens = 9 pages'"):
        small.generate(list(range(100, 230)), {"max_tokens": 5})
    with pytest.raises(InvalidArgument, match=r"100 \+ 60 tokens = 10 pages"):
        small.generate(list(range(100, 200)), {"max_tokens": 60})
    assert len(small.generate(list(range(100, 105)), {"max_tokens": 3, "ignore_eos": True})[0].output_ids) == 3


def test_more_prompts_than_the_queue_takes_all_run(llm):
    small = LLM("smollm2-135m", device="cpu", max_seq_len=64, max_running_requests=2, max_queued_requests=1)
    done = small.generate(["One two"] * 7, {"max_tokens": 2, "temperature": 0})
    assert len({tuple(c.output_ids) for c in done}) == 1


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("smollm2-135m", {"page_size": 0}, "page_size"),
        ("smollm2-135m", {"nope": 1}, "nope"),
        ("/no/where", {}, "/no/where"),
    ],
)
def test_load_errors_name_what_is_wrong(model, options, message):
    with pytest.raises(LoadError, match=message):
        LLM(model, **options)


def test_a_child_engine_gives_the_same_outputs(llm):
    with LLM("smollm2-135m", engine="process", device="cpu", kv_memory_bytes="64MiB", max_running_requests=8) as child:
        prompts = ["One two three", [{"role": "user", "content": "Hi"}], {"prompt": "One", "stop": "three"}]
        assert child.generate(prompts, GREEDY) == llm.generate(prompts, GREEDY)
        assert list(child.stream("One", GREEDY))[-1].finish_reason == "length"
        with pytest.raises(InvalidArgument, match="pages of 16 tokens"):
            child.generate(list(range(2, 8000)), {"max_tokens": 100})
