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


def test_a_guide_that_does_not_compile_is_refused_before_anything_runs(llm):
    bad, counters = {"prompt": "One", "guided_regex": "(a"}, llm.driver.core.conductor.counters
    before = (counters.prompt_tokens, counters.failed)
    for attempt in (lambda: llm.check(bad), lambda: llm.generate(["One", bad], GREEDY)):
        with pytest.raises(InvalidArgument) as caught:
            attempt()
        assert caught.value.field == "guided_decoding_guide"
    assert (counters.prompt_tokens, counters.failed) == before
    llm.check({"prompt": "One", "guided_regex": "a+"})
    llm.check(bad, {"max_tokens": 0})  # runs no step


def test_constraints_that_leave_no_token_are_named_together(llm):
    (a,), (b,) = map(llm.front.tokenizer.encode, "ab")
    with pytest.raises(InvalidArgument, match=r"none at token 2$") as caught:
        llm.generate("One", {"guided_regex": "ab", "allowed_token_ids": [a, b], "stop_token_ids": [b]})
    assert caught.value.field.split(", ")[-2:] == ["stop_token_ids", "guided_decoding_guide"]


@pytest.mark.parametrize("stop", [{}, {"stop_token_ids": [5]}])
def test_the_fewest_tokens_give_way_where_only_an_end_is_left(llm, stop):
    ends = stop.get("stop_token_ids") or sorted(llm.front.eos_ids)
    (done,) = llm.generate("One", {"allowed_token_ids": ends, "min_tokens": 3, **stop})
    assert (done.output_ids, done.finish_reason) == ([], "stop")


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
     ({"prompt": "a", "temperature": "nan"}, {}, "temperature"), ("a", {"stop_token_ids": [49152]}, "stop_token_ids"),
     ("a", {"logit_bias": {"49152": 5}}, "logit_bias"), ("a", {"logprobs": 21}, "logprobs")],
)  # fmt: skip
def test_bad_input_is_refused_by_name_and_the_next_request_is_served(llm, prompt, params, field):
    if field is None:
        assert llm.generate(prompt, params) == []
        return
    with pytest.raises(InvalidArgument) as caught:
        llm.generate(prompt, params)
    assert caught.value.field == field
    assert len(llm.generate("One", {"max_tokens": 1, "ignore_eos": True})[0].output_ids) == 1


def test_texts_of_one_prompt_differ_and_the_first_is_the_one_that_a_single_one_would_be(llm):
    params = {"temperature": 1.2, "max_tokens": 12, "seed": 11, "ignore_eos": True}
    (alone,) = llm.generate("Once upon a time", params)
    texts = llm.generate(["Once upon a time", "One"], params | {"n": 3})
    assert [completion.index for completion in texts] == [0, 1, 2] * 2
    assert texts[0].output_ids == alone.output_ids
    assert len({tuple(completion.output_ids) for completion in texts}) == 6
    assert [c.output_ids for c in llm.generate("Once upon a time", params | {"n": 3})] == [
        c.output_ids for c in texts[:3]
    ]
    pieces = list(llm.stream("Once upon a time", params | {"n": 3}))
    for index, completion in enumerate(texts[:3]):
        assert "".join(piece.text for piece in pieces if piece.index == index) == completion.text


def test_logprobs_are_those_of_the_model_and_change_no_token(llm):
    plain, told = llm.generate(
        ["The capital of France is", {"prompt": "The capital of France is", "logprobs": 2}], GREEDY
    )
    assert told.output_ids == plain.output_ids
    assert len(told.logprobs) == 12
    total = 0.0
    for token, position in zip(told.output_ids, told.logprobs, strict=True):
        (first, own), (_, second) = position.items()
        assert (first, own.rank, second.rank) == (token, 1, 2)
        assert 0 >= own.logprob >= second.logprob
        assert own.decoded_token == llm.front.tokenizer.token_text(token)
        total += own.logprob
    assert told.cumulative_logprob == pytest.approx(total)


def test_the_distribution_that_is_told_is_that_before_any_change(llm):
    request = {"prompt": "The capital of France is", "max_tokens": 1, "logprobs": 3, "temperature": 0}
    (plain,) = llm.generate(request)
    barred = plain.output_ids[0]
    (changed,) = llm.generate(request | {"logit_bias": {barred: -100}, "repetition_penalty": 1.5})
    token = changed.output_ids[0]
    assert token != barred
    assert changed.logprobs[0][token].rank > 1
    assert changed.logprobs[0][barred] == pytest.approx(plain.logprobs[0][barred])


def test_a_prompts_logprobs_are_those_its_tokens_had_as_output(llm):
    (done,) = llm.generate("The capital of France is", {"temperature": 0, "max_tokens": 4, "logprobs": 0})
    prompt = [*llm.front.encode("The capital of France is").tolist(), *done.output_ids]
    (told,) = llm.generate([prompt], {"temperature": 0, "max_tokens": 1, "prompt_logprobs": 1})
    assert len(told.prompt_logprobs) == len(prompt)
    assert told.prompt_logprobs[0] is None
    for token, position, before in zip(done.output_ids, told.prompt_logprobs[-4:], done.logprobs, strict=True):
        assert position[token].rank == 1
        assert position[token].logprob == pytest.approx(before[token].logprob, abs=1e-3)


def test_stop_ids_of_a_request_end_it_also_with_ignore_eos(llm):
    (whole,) = llm.generate("One two three", GREEDY)
    stop = whole.output_ids[4]
    at = whole.output_ids.index(stop)
    request = {"prompt": "One two three", "stop_token_ids": [stop], "ignore_eos": True}
    cut, kept = llm.generate([request, request | {"include_stop_str_in_output": True}], GREEDY)
    assert (cut.output_ids, cut.finish_reason, cut.stop_reason) == (whole.output_ids[:at], "stop", str(stop))
    assert (kept.output_ids, kept.finish_reason, kept.stop_reason) == (whole.output_ids[: at + 1], "stop", str(stop))
    assert kept.text == llm.front.tokenizer.decode(kept.output_ids)


def test_no_end_comes_before_the_fewest_tokens(llm):
    case = next(case for case in CASES if case.get("eos_at") is not None and not case["tie_steps"])
    (done,) = llm.generate([case["prompt_ids"]], {"temperature": 0, "max_tokens": 48, "min_tokens": 40})
    assert len(done.output_ids) >= 40
    assert done.output_ids[: case["eos_at"]] == case["output_ids"][: case["eos_at"]]
    assert not llm.front.eos_ids & set(done.output_ids)


def test_allowed_and_barred_tokens(llm):
    (plain,) = llm.generate("One two three", GREEDY)
    word = llm.front.tokenizer.decode(plain.output_ids[:1])
    requests = [
        {"allowed_token_ids": [42, 43]}, {"logit_bias": {"42": 100}}, {"bad_words": [word]}, {},
    ]  # fmt: skip
    allowed, biased, barred, beside = llm.generate([{"prompt": "One two three"} | own for own in requests], GREEDY)
    assert set(allowed.output_ids) <= {42, 43}
    assert set(biased.output_ids) == {42}
    assert plain.output_ids[0] not in barred.output_ids
    assert beside == plain


@pytest.mark.parametrize(
    ("guide", "is_right"),
    [
        ({"guided_choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"guided_regex": "[0-9]{3}"}, lambda text: text.isdigit() and len(text) == 3),
        ({"guided_json": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
                          "additionalProperties": False}}, lambda text: list(json.loads(text)) == ["a"]),
    ],
)  # fmt: skip
def test_a_guided_text_is_what_it_must_be(llm, guide, is_right):
    (done,) = llm.generate({"prompt": "Answer:", "max_tokens": 200, "temperature": 0} | guide)
    assert done.finish_reason == "stop"
    assert is_right(done.text)


def test_a_text_whose_time_is_over_ends_with_what_exists(llm):
    (done,) = llm.generate("Once", {"temperature": 0, "ignore_eos": True, "max_tokens": 5000, "timeout_ms": 400})
    assert done.finish_reason == "timeout"
    assert 0 < len(done.output_ids) < 5000
    assert llm.driver.core.conductor.num_running == 0


def test_the_example_of_the_readme_gives_two_texts(capsys):
    blocks = (Path(__file__).parents[1] / "README.md").read_text().split("```python\n")[1:]
    (example,) = [block.partition("```")[0] for block in blocks if "from mstar import" in block]
    exec(compile(example, "README.md", "exec"), {})
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert len(lines) == 2
    for line in lines:
        *_, reason, logprob = line.split()
        assert reason in ("stop", "length")
        assert float(logprob) < 0


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


def test_texts_that_find_no_row_in_time_end_empty_beside_one_that_ran():
    small = LLM("smollm2-135m", device="cpu", max_running_requests=1)
    params = {"n": 3, "temperature": 1, "ignore_eos": True, "max_tokens": 5000, "timeout_ms": 400}
    done = small.generate("Once", params)
    assert [c.finish_reason for c in done] == ["timeout"] * 3
    assert [bool(c.output_ids) for c in done] == [bool(c.text) for c in done] == [True, False, False]
    assert len(small.generate("Once", {"max_tokens": 2, "ignore_eos": True})[0].output_ids) == 2


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
