"""A tokenizer built from GGUF metadata gives the ids of the model it was converted from."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.text.chat_template import ChatTemplate
from mstar.text.gguf_tokenizer import tokenizer_from_gguf
from mstar.utils.errors import LoadError

from .conftest import byte_level_metadata, sentencepiece_metadata, spell

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "smollm2_135m_greedy.json"


@pytest.fixture(scope="module")
def golden_cases():
    return json.loads(GOLDEN.read_text())["cases"]


@pytest.mark.model
def test_prompt_ids_equal_the_reference_for_every_golden_case(smollm2, smollm2_metadata, golden_cases):
    chat = ChatTemplate(smollm2_metadata["tokenizer.chat_template"], "<|im_start|>", "<|im_end|>")
    assert len(golden_cases) == 16
    for case in golden_cases:
        if case["kind"] == "chat":
            assert chat.render(case["messages"]) == case["prompt"], case["name"]
            ids = smollm2.encode(case["prompt"], add_special_tokens=False)
        else:
            ids = smollm2.encode(case["prompt"])
        assert ids == case["prompt_ids"], case["name"]


@pytest.mark.model
def test_output_text_equals_the_reference_for_every_golden_case(smollm2, golden_cases):
    for case in golden_cases:
        assert smollm2.decode(case["output_ids"], skip_special_tokens=False) == case["output_text"], case["name"]


@pytest.mark.model
def test_flags_of_the_smollm2_file(smollm2):
    assert (smollm2.vocab_size, smollm2.bos_id, smollm2.eos_id, smollm2.add_bos) == (49152, 1, 2, False)
    assert [id for id in range(49152) if smollm2.is_special(id)] == list(range(17))


@pytest.mark.model
@settings(deadline=None, max_examples=200)
@given(text=st.text(alphabet=st.characters(exclude_categories=("Cs", "Cn", "Co", "Cc"), include_characters="\0\t\n\r")))
def test_decode_undoes_encode(smollm2, text):
    assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


def test_bytes_the_vocabulary_lacks_are_left_out_as_in_the_reference():
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.token_type"][0xF1] = 5  # no assigned character needs this byte; SmolLM2 lacks it
    assert tokenizer_from_gguf(metadata).encode("a\U00040000b") == [97, 0x80, 0x80, 0x80, 98]


def test_nul_and_what_follows_it_are_encoded():
    tokenizer = tokenizer_from_gguf(byte_level_metadata())
    assert tokenizer.encode("a\0b") == [97, 0, 98]
    assert tokenizer.encode("\0") == [0]


def test_special_tokens_in_the_text_are_recognised():
    tokenizer = tokenizer_from_gguf(byte_level_metadata())
    assert tokenizer.encode("a<|end|>b<tool>") == [97, 256, 98, 257]
    assert tokenizer.is_special(256)
    assert not tokenizer.is_special(257)


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["1", "2", "3", "4"]),
        ("gpt-2", ["1234"]),
        ("llama-bpe", ["123", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
    ],
)
def test_pre_tokenizer_decides_how_digits_merge(pre, expected):
    tokenizer = tokenizer_from_gguf(byte_level_metadata(["1234"], pre=pre))
    assert [tokenizer.token_bytes(id).decode() for id in tokenizer.encode("1234")] == expected


def test_qwen2_text_is_composed_first():
    tokenizer = tokenizer_from_gguf(byte_level_metadata(pre="qwen2"))
    assert tokenizer.encode("e\u0301") == list("\u00e9".encode())


def test_llama3_takes_a_whole_piece_before_it_merges():
    metadata = byte_level_metadata(["xyz"], pre="llama-bpe")
    metadata["tokenizer.ggml.merges"] = metadata["tokenizer.ggml.merges"][:1]
    assert len(tokenizer_from_gguf(metadata).encode("xyz")) == 1
    metadata["tokenizer.ggml.pre"] = "gpt-2"
    assert len(tokenizer_from_gguf(metadata).encode("xyz")) == 2


@pytest.mark.parametrize(
    ("metadata", "add_bos"),
    [
        (byte_level_metadata(pre="gpt-2", bos_token_id=256), False),
        (byte_level_metadata(pre="llama-bpe", bos_token_id=256), True),
        (byte_level_metadata(pre="llama-bpe", bos_token_id=256, add_bos_token=False), False),
        (byte_level_metadata(pre="gpt-2", bos_token_id=256, add_bos_token=True), True),
        (byte_level_metadata(pre="gpt-2", add_bos_token=True), False),
        (sentencepiece_metadata(), True),
    ],
)
def test_bos_follows_the_file_then_the_kind_of_tokenizer(metadata, add_bos):
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.add_bos is add_bos
    assert (tokenizer.encode("a")[0] == tokenizer.bos_id) is add_bos
    assert tokenizer.encode("a", add_special_tokens=False)[0] != tokenizer.bos_id


def test_eos_is_added_where_the_file_says_so():
    assert tokenizer_from_gguf(byte_level_metadata(add_eos_token=True)).encode("a") == [97, 256]


def test_unused_tokens_are_ids_without_text():
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"].append("[PAD258]")
    metadata["tokenizer.ggml.token_type"].append(5)
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.vocab_size == 259
    assert tokenizer.token_bytes(258) == b""
    assert 258 not in tokenizer.encode("[PAD258]")


def sentencepiece_reference(metadata: dict, text: str) -> list[str]:
    """SentencePiece's BPE as its paper states it: join the best-scored neighbours, leftmost first, until none fits."""
    scores = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], strict=True))
    normal = set(metadata["tokenizer.ggml.tokens"][259:])
    pieces = list("\u2581" + text.replace(" ", "\u2581")) if text else []
    while True:
        joined = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in normal]
        if not joined:
            break
        _, i = min(joined)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    spelt = []
    for piece in pieces:
        spelt += [piece] if piece in normal else [f"<0x{byte:02X}>" for byte in piece.encode()]
    return spelt


@settings(deadline=None)
@given(text=st.text(alphabet="Daenrys tkhKl\u00e9\U0001f336", max_size=40))
def test_sentencepiece_ids_equal_its_definition(sentencepiece, text):
    metadata = sentencepiece_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = sentencepiece.encode(text, add_special_tokens=False)
    assert [tokens[id] for id in ids] == sentencepiece_reference(metadata, text)


def test_sentencepiece_merges_in_the_file_win_over_scores():
    metadata = sentencepiece_metadata(merges=["s i"])
    assert len(tokenizer_from_gguf(metadata).encode("is", add_special_tokens=False)) == 3


def without(name: str, metadata: dict) -> dict:
    return {key: value for key, value in metadata.items() if key != f"tokenizer.ggml.{name}"}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (byte_level_metadata(pre="tekken"), r"tokenizer\.ggml\.pre: one of .*smollm.* got 'tekken'"),
        (without("pre", byte_level_metadata()), r"tokenizer\.ggml\.pre: .* got None"),
        (byte_level_metadata(model="bert"), r"tokenizer\.ggml\.model: .* got 'bert'"),
        (without("tokens", byte_level_metadata()), r"tokenizer\.ggml\.tokens"),
        (without("merges", byte_level_metadata()), r"tokenizer\.ggml\.merges"),
        (without("scores", sentencepiece_metadata()), r"tokenizer\.ggml\.scores"),
        (byte_level_metadata(merges=["ab"]), r"tokenizer\.ggml\.merges: .*'ab'"),
        (byte_level_metadata(merges=[f"{spell(b'x')} zzz"]), r"tokenizer\.ggml\.merges: do not fit"),
        (byte_level_metadata(token_type=[1, 1]), r"tokenizer\.ggml\.token_type: 258 values"),
        (byte_level_metadata(eos_token_id=258), r"tokenizer\.ggml\.eos_token_id: .*258"),
        (sentencepiece_metadata(scores=[0.0] * 5), r"tokenizer\.ggml\.scores: "),
    ],
)
def test_what_cannot_be_built_faithfully_is_refused_by_name(metadata, message):
    with pytest.raises(LoadError, match=message):
        tokenizer_from_gguf(metadata)


def test_scores_that_give_no_order_are_refused():
    metadata = sentencepiece_metadata()
    metadata["tokenizer.ggml.scores"] = [0.0] * len(metadata["tokenizer.ggml.tokens"])
    with pytest.raises(LoadError, match=r"scores: the score of each piece"):
        tokenizer_from_gguf(metadata)
