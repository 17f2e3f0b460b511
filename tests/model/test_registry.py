"""What a loaded model declares: walks, resources, captures, sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mstar.graph import END, compile_walks
from mstar.model.captures import dense_ladder, doubling_ladder, text_graph_configs
from mstar.model.options import ModelLoadOptions
from mstar.model.rope import context_length, parse_rope_scaling

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


def test_ladders_end_with_the_largest_size() -> None:
    assert dense_ladder(5) == [1, 2, 3, 4, 5]
    assert dense_ladder(100)[-5:] == [72, 80, 88, 96, 100]
    assert dense_ladder(1000)[-2:] == [992, 1000]
    assert doubling_ladder(1, 1) == [1]
    assert doubling_ladder(32, 100) == [32, 64, 100]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_captures_hold_the_largest_step(device: str) -> None:
    decode, prefill = text_graph_configs(torch.device(device), max_rows=48, max_tokens=500)
    assert max(decode.capture_batch_sizes) == max(prefill.capture_batch_sizes) == 48
    assert max(prefill.get_total_tokens(48)) == 500
    assert [row.input_seq_len for row in prefill.get_node_inputs(3, 0)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (None, 4096),
        ({"rope_type": "default"}, 4096),
        ({"type": "linear", "factor": 2.0}, 8192),
        ({"rope_type": "dynamic", "factor": 2.0}, 8192),
        ({"rope_type": "yarn", "factor": 4.0}, 16384),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            },
            4096,
        ),
    ],
)
def test_the_context_is_stretched_once_by_its_scalings_rule(raw: dict[str, object] | None, expected: int) -> None:
    assert context_length(4096, parse_rope_scaling(raw, 4096, "config.json")) == expected
