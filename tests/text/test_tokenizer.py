"""A tokenizer.json folder is read as transformers reads it."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mstar.text.chat_template import ChatTemplate
from mstar.text.tokenizer import Tokenizer
from mstar.utils.errors import InvalidArgument, LoadError

from .conftest import ALPHABET

BOS, EOS = "<|bos|>", "<|eos|>"


def save(folder, config=None, *, bos_in_template=False, decoder=None, padded=False):
    """A byte-level tokenizer.json with two special tokens, and a tokenizer_config.json; returns the folder."""
    vocab = {letter: byte for byte, letter in ALPHABET.items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoder or decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    if bos_in_template:
        backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 256)])
    if padded:
        backend.enable_truncation(4)
        backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


NAMED = {"bos_token": BOS, "eos_token": {"__type": "AddedToken", "content": EOS, "special": True}}


def test_named_tokens_come_from_the_config(tmp_path):
    tokenizer = Tokenizer.from_file(save(tmp_path, NAMED))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (256, 257, 258)
    assert tokenizer.is_special(256)
    assert Tokenizer.from_file(tmp_path / "tokenizer.json").eos_id == 257


def test_a_tokenizer_without_config_has_no_named_tokens(tmp_path):
    tokenizer = Tokenizer.from_file(save(tmp_path))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (None, None, False)


def test_stored_truncation_and_padding_do_not_touch_prompts(tmp_path):
    tokenizer = Tokenizer.from_file(save(tmp_path, padded=True))
    assert tokenizer.encode("abcdef") == list(b"abcdef")
    assert tokenizer.encode("a") == [97]


@pytest.mark.parametrize("config", [NAMED, NAMED | {"add_bos_token": True}, NAMED | {"add_bos_token": False}])
def test_a_stored_post_processor_decides_as_in_transformers(tmp_path, config):
    tokenizer = Tokenizer.from_file(save(tmp_path, config, bos_in_template=True))
    assert tokenizer.encode("a") == AutoTokenizer.from_pretrained(tmp_path)("a")["input_ids"] == [256, 97]
    assert tokenizer.add_bos
    assert tokenizer.encode("a", add_special_tokens=False) == [97]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (NAMED, [97]),
        (NAMED | {"add_bos_token": True}, [256, 97]),
        (NAMED | {"add_bos_token": True, "add_eos_token": True}, [256, 97, 257]),
        ({"add_bos_token": True}, [97]),
    ],
)
def test_flags_decide_where_no_post_processor_is_stored(tmp_path, config, expected):
    tokenizer = Tokenizer.from_file(save(tmp_path, config))
    assert tokenizer.encode("a") == expected
    assert tokenizer.add_bos is (expected[0] == 256)
    assert tokenizer.encode("a", add_special_tokens=False) == [97]


@pytest.mark.parametrize("config", [NAMED | {"add_bos_token": True}, NAMED])
def test_a_chat_whose_template_writes_bos_gets_one(tmp_path, config):
    tokenizer = Tokenizer.from_file(save(tmp_path, config, bos_in_template=True))
    chat = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", BOS, EOS)
    prompt = chat.render([{"role": "user", "content": "hi"}])
    assert tokenizer.encode(prompt, add_special_tokens=False) == [256, *b"hi"]


def test_a_raw_prompt_that_spells_bos_gets_another_as_in_the_reference(tmp_path):
    tokenizer = Tokenizer.from_file(save(tmp_path, NAMED | {"add_bos_token": True}))
    assert tokenizer.encode(f"{BOS}a") == [256, 256, 97]


def test_tokens_that_only_the_config_lists_are_added(tmp_path):
    listed = {"258": {"content": "<extra>", "special": True}, "259": {"content": "<tool>", "special": False}}
    tokenizer = Tokenizer.from_file(save(tmp_path, {"added_tokens_decoder": listed}))
    assert tokenizer.encode("<extra><tool>") == [258, 259]
    assert (tokenizer.is_special(258), tokenizer.is_special(259)) == (True, False)


def test_a_named_token_of_the_vocabulary_becomes_special(tmp_path):
    tokenizer = Tokenizer.from_file(save(tmp_path, {"eos_token": "z"}))
    assert tokenizer.is_special(tokenizer.eos_id)
    assert tokenizer.decode(tokenizer.encode("xyz")) == "xy"


def test_lone_surrogates_are_refused(byte_level):
    with pytest.raises(InvalidArgument, match="text: must be valid Unicode"):
        byte_level.encode("a\ud800")


def test_encoding_from_many_threads_gives_the_same_ids(byte_level):
    texts = [f"text {n} of <|end|>" * 20 for n in range(50)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(byte_level.encode, texts)) == [byte_level.encode(text) for text in texts]


@pytest.mark.parametrize("content", ["", "{}", '{"version": "1.0"', "\ufffd"])
def test_a_broken_file_is_refused_by_name(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(LoadError, match=r"tokenizer\.json"):
        Tokenizer.from_file(tmp_path)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(LoadError, match=r"tokenizer\.json: no such file"):
        Tokenizer.from_file(tmp_path)


LISTED = [
    [1],
    {"x": {"content": "<t>"}},
    {"258": "<t>"},
    {"258": {"special": True}},
]


@pytest.mark.parametrize("listed", LISTED)
def test_a_malformed_list_of_tokens_is_refused_by_name(tmp_path, listed):
    with pytest.raises(LoadError, match=r"tokenizer_config\.json: added_tokens_decoder"):
        Tokenizer.from_file(save(tmp_path, {"added_tokens_decoder": listed}))


@pytest.mark.parametrize("config", ["{", "[]", "\x00"])
def test_a_broken_config_is_refused_by_name(tmp_path, config):
    save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(LoadError, match=r"tokenizer_config\.json"):
        Tokenizer.from_file(tmp_path)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence([decoders.Fuse(), decoders.Replace(tokenizers.Regex(" +"), " ")]),
        decoders.Sequence([decoders.Fuse(), decoders.WordPiece()]),
        decoders.Sequence([decoders.BPEDecoder(), decoders.Strip(" ", 1, 0)]),
    ],
)
def test_a_decoder_that_cannot_stream_is_refused_by_name(tmp_path, decoder):
    with pytest.raises(LoadError, match=r"tokenizer\.json: .*decode"):
        Tokenizer.from_file(save(tmp_path, decoder=decoder))


@pytest.mark.parametrize("clean_up", [True, False, None])
@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram", "unigram with bytes"])
def test_decode_equals_transformers_with_its_clean_up_of_spaces(tmp_path, kind, clean_up):
    words = ["Do", "n't", "'", "s", ".", ",", "##s", "!", "we", "re", "?", "n", "\u2581'", "\u2581."]
    if kind == "bpe":
        save(tmp_path)
    else:
        backend = tokenizers.Tokenizer(
            models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="Do")
            if kind == "wordpiece"
            else models.Unigram([(word, -float(rank)) for rank, word in enumerate([*words, "we"])], 0)
        )
        bytes_too = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
        backend.decoder = {
            "wordpiece": decoders.WordPiece(cleanup=False),
            "unigram": decoders.Metaspace(),
            "unigram with bytes": bytes_too,
        }[kind]
        backend.add_special_tokens([AddedToken("[S]", special=True)])
        backend.save(str(tmp_path / "tokenizer.json"))
    config = {} if clean_up is None else {"clean_up_tokenization_spaces": clean_up}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer, reference = Tokenizer.from_file(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    vocab = range(tokenizer.vocab_size)
    for seed in range(50):
        ids = random.Random(seed).choices(vocab, k=12)
        ids = [*b"a . b n't", *ids] if kind == "bpe" else ids
        for skip in (True, False):
            expected = reference.decode(ids, skip_special_tokens=skip)
            detokenizer = tokenizer.detokenizer(skip)
            assert "".join(detokenizer.push([id]) for id in ids) + detokenizer.flush() == expected
            assert tokenizer.decode(ids, skip) == expected


def test_all_pieces_are_the_bytes_of_every_id(byte_level):
    assert byte_level.all_pieces() == [byte_level.token_bytes(id) for id in range(byte_level.vocab_size)]
    assert byte_level.all_pieces()[:256] == [bytes([byte]) for byte in range(256)]
    assert byte_level.special_ids == {256}


def test_text_of_one_token(byte_level, sentencepiece):
    assert [byte_level.token_text(id) for id in (97, 256, 257, 0xE9, 10**6)] == ["a", "<|end|>", "<tool>", "\ufffd", ""]
    assert sentencepiece.token_text(sentencepiece._backend.token_to_id("\u2581is")) == " is"


def test_other_threads_run_while_a_long_text_is_encoded(tmp_path):
    tokenizer = Tokenizer.from_file(save(tmp_path))
    with ThreadPoolExecutor(1) as pool:
        started = last = time.perf_counter()
        longest = 0.0
        encoding = pool.submit(tokenizer.encode, "some words " * 200_000)
        while not encoding.done():
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        whole = time.perf_counter() - started
    assert longest < whole / 2
