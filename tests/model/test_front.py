"""Prompts to ids without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mstar.model.front import open_front
from mstar.utils.errors import LoadError, Unsupported

from .small_checkpoints import random_model, save

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "smollm2_135m_greedy.json"
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save(random_model("llama"), tmp_path_factory.mktemp("model"))
    words = {"<s>": 0, "</s>": 1, "hello": 2, "world": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_chat_is_the_templates_own_text_with_one_begin_token(folder: Path) -> None:
    front = open_front(str(folder))
    assert front.encode_chat([{"role": "user", "content": "hello world"}]).tolist() == [0, 2, 3]


def test_a_raw_prompt_gets_the_begin_token_even_if_it_spells_it(folder: Path) -> None:
    front = open_front(str(folder))
    assert front.encode("hello").tolist() == [0, 2]
    assert front.encode("<s>hello").tolist() == [0, 0, 2]


def test_the_vocabulary_counts_embedding_rows_not_the_tokenizers_entries(folder: Path) -> None:
    front = open_front(str(folder))
    assert front.vocab_size == 160
    assert front.context_length == 512
    assert front.eos_ids == {1}


def test_without_a_template_a_chat_is_unsupported_and_text_is_not(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    front = open_front(str(tmp_path))
    assert front.chat is None
    with pytest.raises(Unsupported, match="messages"):
        front.encode_chat([{"role": "user", "content": "hello"}])
    assert front.encode("hello").tolist() == [2]


def test_a_missing_tokenizer_is_refused_by_its_path(tmp_path: Path) -> None:
    save(random_model("llama"), tmp_path)
    with pytest.raises(LoadError, match=r"tokenizer\.json"):
        open_front(str(tmp_path))


def test_opening_a_front_imports_no_torch(folder: Path) -> None:
    code = (
        "import sys; from mstar.model.front import open_front; open_front(sys.argv[1]); print('torch' in sys.modules)"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.model
def test_smollm2_prompts_and_chats_give_the_reference_ids() -> None:
    front = open_front("smollm2-135m")
    for case in json.loads(GOLDEN.read_text())["cases"]:
        ids = front.encode(case["prompt"]) if case["kind"] == "raw" else front.encode_chat(case["messages"])
        assert ids.tolist() == case["prompt_ids"], case["name"]
