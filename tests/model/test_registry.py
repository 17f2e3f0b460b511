"""What a loaded model declares: walks, resources, captures, sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mstar.graph import END, compile_walks
from mstar.model.options import ModelLoadOptions

from .driver import load_small
from .small_checkpoints import random_model, save


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model("llama", tie_word_embeddings=True), tmp_path_factory.mktemp("model"))


def test_a_request_takes_prefill_then_decode(folder: Path) -> None:
    model = load_small(folder)
    assert [model.next_walk(None), model.next_walk("prefill"), model.next_walk("decode")] == ["prefill", "decode", None]
    with pytest.raises(ValueError, match="mixed"):
        model.next_walk("mixed")


def test_decode_is_one_loop_bounded_by_the_context(folder: Path) -> None:
    model = load_small(folder, options=ModelLoadOptions(max_seq_len=100, kv_memory_bytes=1 << 22))
    walks = compile_walks(model.walks, model.submodules.keys())
    prefill, decode = walks.state_id("prefill", "LLM"), walks.state_id("decode", "LLM")
    assert walks.next_state[prefill] == END
    assert walks.next_state[decode] == decode
    assert walks.exit_state[decode] == END
    assert walks.max_iters.tolist() == [100]


def test_weights_are_counted_once(folder: Path) -> None:
    model = load_small(folder)
    reference = random_model("llama", tie_word_embeddings=True)
    assert model.num_parameters == sum(weight.numel() for weight in reference.parameters())
    assert model.weight_bytes == 4 * model.num_parameters


def kv_of(folder: Path, **options: int) -> object:
    specs = {spec.resource_key: spec for spec in load_small(folder, options=ModelLoadOptions(**options)).resource_specs}
    return specs["kv_cache"].config


def test_the_cache_fills_its_budget_but_takes_no_more_than_rows_can_use(folder: Path) -> None:
    page = 2 * 2 * 16 * 2 * 64 * 4  # K and V, layers, tokens, heads, head_dim, bytes
    assert kv_of(folder, kv_memory_bytes=10 * page + 5).max_num_pages == 10
    assert kv_of(folder, kv_memory_bytes=1 << 40, max_running_requests=2).max_num_pages == 1 + 2 * 512 // 16
    assert kv_of(folder, max_running_requests=2, max_seq_len=17).max_num_pages == 1 + 2 * 2
    assert kv_of(folder, kv_host_memory_bytes=10 * page + 5).cpu_offload_pages == 10
    assert kv_of(folder, kv_host_memory_bytes=1 << 40, max_running_requests=2).cpu_offload_pages == 2 * 512 // 16
