"""Every family computes what transformers computes, in prefill and in every decode step."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from mstar.engine.accelerator_graph_backend import CpuGraphBackend, EagerBackend
from mstar.engine.batch import Batch
from mstar.engine.inputs import ARNodeInputs
from mstar.engine.resources.logit_edits.config import LogitEditsReqConfig
from mstar.engine.resources.logprobs.config import LogprobsReqConfig
from mstar.engine.resources.sampler.config import SamplingReqConfig
from mstar.engine.resources.step import BucketKey, SlotLease
from mstar.model.options import ModelLoadOptions
from mstar.model.text_sampling import FULL

from .driver import GREEDY, build_engine, generate, load_small, request, step
from .small_checkpoints import (
    CLASSES,
    GGUF_FAMILIES,
    dequantised,
    edit_config,
    edit_tensors,
    random_model,
    save,
    write_gguf,
)

PROMPTS = [[5, 99, 42, 7, 7, 130, 21, 3, 64], [11], list(range(40, 73))]
STEPS = 6
FLOAT_ERROR = 5e-5
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "smollm2_135m_greedy.json"


def assert_equals(checkpoint: Path, reference: PreTrainedModel, error: float = FLOAT_ERROR) -> None:
    """Logits of all steps and greedy tokens through the engine equal the reference's over the same tokens."""
    run = generate(load_small(checkpoint), PROMPTS, STEPS)
    assert not run.faults.any()
    for row, prompt in enumerate(PROMPTS):
        ids = torch.tensor([[*prompt, *run.tokens[row, :-1].tolist()]])
        with torch.no_grad():
            expected = reference(ids).logits[0, len(prompt) - 1 :]
        torch.testing.assert_close(run.logits[:, row], expected, atol=error, rtol=0)
        assert run.tokens[row].tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({}, id="untied"),
        pytest.param({"tie_word_embeddings": True}, id="tied"),
        pytest.param({"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 16}, id="8-heads-share-1"),
        pytest.param({"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2}, id="3-heads-share-1"),
        pytest.param({"hidden_size": 256, "head_dim": 128}, id="head-dim-128"),
        pytest.param({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, id="theta"),
        pytest.param({"rope_parameters": LLAMA3}, id="llama3-rope"),
        pytest.param({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, id="linear-rope"),
    ],
)
def test_logits_and_greedy_tokens_equal_transformers(family: str, shape: dict[str, Any], tmp_path: Path) -> None:
    model = random_model(family, **shape)
    assert_equals(save(model, tmp_path), model)


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_optional_biases_and_a_head_dim_of_its_own_are_honoured(
    family: str, shape: dict[str, Any], tmp_path: Path
) -> None:
    model = random_model(family, **shape)
    assert_equals(save(model, tmp_path), model)


def test_sharded_safetensors_give_the_same_model(tmp_path: Path) -> None:
    model = random_model("llama")
    save(model, tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_equals(tmp_path, model)


def test_rope_settings_in_their_old_spelling_are_read(tmp_path: Path) -> None:
    model = random_model("llama", rope_parameters=LLAMA3)
    save(model, tmp_path)
    old = {key: value for key, value in LLAMA3.items() if key not in ("rope_theta", "rope_type")} | {"type": "llama3"}
    edit_config(tmp_path, remove=("rope_parameters",), rope_theta=LLAMA3["rope_theta"], rope_scaling=old)
    assert_equals(tmp_path, model)


# BC-41: four checkpoints of one model.


def test_a_tied_checkpoint_without_a_head_uses_its_embedding(tmp_path: Path) -> None:
    model = random_model("llama", tie_word_embeddings=True)
    save(model, tmp_path)
    edit_tensors(tmp_path, remove=("lm_head.weight",))
    assert_equals(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path))


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_tied_checkpoint_with_a_head_follows_transformers(is_equal: bool, tmp_path: Path) -> None:
    model = random_model("llama", tie_word_embeddings=True)
    save(model, tmp_path)
    head = model.get_input_embeddings().weight.detach().clone()
    edit_tensors(tmp_path, lm_head__weight=head if is_equal else head.flip(0).contiguous())
    assert_equals(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path))


def test_without_the_key_a_head_of_its_own_is_used_as_transformers_does_by_default(tmp_path: Path) -> None:
    save(random_model("llama", tie_word_embeddings=False), tmp_path)
    edit_config(tmp_path, remove=("tie_word_embeddings",))
    assert_equals(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path))


# BC-44: GGUF.


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_1")])
@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_a_gguf_computes_what_its_dequantised_weights_do(
    family: str, kind: gguf.GGMLQuantizationType, tmp_path: Path
) -> None:
    model = random_model(family)
    file = write_gguf(tmp_path / "model.gguf", model, kind)
    assert_equals(file, dequantised(model, kind))


def test_an_f16_gguf_stays_within_a_hundredth_of_the_model_it_was_exported_from(tmp_path: Path) -> None:
    model = random_model("llama")
    file = write_gguf(tmp_path / "model.gguf", model, gguf.GGMLQuantizationType.F16)
    assert_equals(file, model, error=1e-2)


def test_a_gguf_without_a_head_is_tied(tmp_path: Path) -> None:
    model = random_model("llama", tie_word_embeddings=True)
    file = write_gguf(tmp_path / "model.gguf", model, gguf.GGMLQuantizationType.F32)
    assert_equals(file, model)


@pytest.mark.parametrize("value", [1.0, 3.0])
def test_rotary_factors_that_are_no_llama3_scaling_are_ignored_by_name(value: float, tmp_path: Path) -> None:
    model = random_model("llama")
    extra = {"rope_freqs.weight": np.full(32, value, np.float32)}
    file = write_gguf(tmp_path / "model.gguf", model, gguf.GGMLQuantizationType.F32, extra=extra)
    assert_equals(file, model)


def test_rotary_factors_of_llama3_in_a_gguf_are_applied(tmp_path: Path) -> None:
    model = random_model("llama", rope_parameters=LLAMA3)
    plain = random_model("llama", rope_parameters={"rope_type": "default", "rope_theta": LLAMA3["rope_theta"]})
    factors = plain.model.rotary_emb.inv_freq / model.model.rotary_emb.inv_freq
    extra = {"rope_freqs.weight": factors.numpy()}
    file = write_gguf(tmp_path / "model.gguf", model, gguf.GGMLQuantizationType.F32, extra=extra)
    assert_equals(file, model)


# BC-43: dtypes.


def test_a_bfloat16_checkpoint_run_as_float16_faults_instead_of_talking_nonsense(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = random_model("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1e5)
    save(model.to(torch.bfloat16), tmp_path)
    with caplog.at_level(logging.WARNING, logger="mstar.model"):
        run = generate(load_small(tmp_path, dtype=torch.float16), PROMPTS, 2)
    assert run.faults.all()
    assert (run.tokens == 0).all()
    assert any("torch.bfloat16 and served as torch.float16" in record.getMessage() for record in caplog.records)


def test_the_cpu_serves_a_bfloat16_checkpoint_in_float32(tmp_path: Path) -> None:
    save(random_model("llama").to(torch.bfloat16), tmp_path)
    loaded = load_small(tmp_path, dtype=None)
    assert loaded.dtype == loaded.kv_dtype == torch.float32
    assert_equals(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_dtype_is_served_when_asked_for(dtype: torch.dtype, tmp_path: Path) -> None:
    model = random_model("qwen3")
    save(model, tmp_path)
    run = generate(load_small(tmp_path, dtype=dtype), PROMPTS, 3)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPTS[0]])).logits[0, -1]
    assert run.logits.dtype == dtype
    assert not run.faults.any()
    torch.testing.assert_close(run.logits[0, 0].float(), expected, atol=0.2, rtol=0)


# The protocol.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model("llama"), tmp_path_factory.mktemp("model"))


def test_only_the_last_row_of_each_prompt_reaches_the_head(folder: Path) -> None:
    model = load_small(folder)
    assert generate(model, PROMPTS, 1).logits.shape == (1, len(PROMPTS), model.vocab_size)


def test_declare_step_is_pure_and_leaves_every_row_its_tokens(folder: Path) -> None:
    submodule = load_small(folder).submodules["LLM"]
    inputs = [ARNodeInputs(input_seq_len=3), ARNodeInputs(input_seq_len=1)]
    step = submodule.declare_step("prefill", [4, 9], inputs)
    assert step == submodule.declare_step("prefill", [4, 9], inputs)
    assert all(part.segments is None for part in step.steps.values())
    assert step.get("sampler").kept_rids is None


@pytest.mark.parametrize("walk", ["prefill", "decode"])
@pytest.mark.parametrize("variant", [None, FULL, "eager"])
def test_a_plain_step_has_the_sampler_alone_behind_its_head(variant: str | None, walk: str, folder: Path) -> None:
    submodule = load_small(folder).submodules["LLM"]
    row = ARNodeInputs(input_seq_len=2, input_ids=torch.tensor([5, 6])) if walk == "prefill" else ARNodeInputs()
    lease = None if variant == "eager" else SlotLease(0, BucketKey(walk, 1, 2, variant))
    step = submodule.declare_step(walk, [4], [row], slot_lease=lease)
    behind = set(step.keys()) - {"kv_cache", "attn", "rope"}
    if variant is None:
        assert behind == {"sampler"}
        assert not step.get("sampler").apply_penalty
        assert step.cg_key_info is None
        return
    assert behind == {"sampler", "logprobs", "logit_edits", "grammar"}
    assert step.get("sampler").apply_penalty
    assert step.cg_key_info == FULL
    tracked = step.get("sampler").prefill_tracked_tokens
    assert {i: ids.tolist() for i, ids in tracked.items()} == ({4: [5, 6]} if walk == "prefill" else {})


def test_one_row_that_needs_it_takes_its_step_to_the_full_variant(folder: Path) -> None:
    engine = build_engine(load_small(folder), 3, CpuGraphBackend(strict=True))
    plain, penalised = request(1, [5, 6, 7], 8, GREEDY), request(2, [5, 6], 8, SamplingReqConfig(repetition_penalty=2))
    for info in (plain, penalised):
        engine.ingest(info)
    for infos, variant in (([plain], None), ([penalised], FULL)):
        assert engine.exec(Batch("LLM", "prefill", infos)).bucket.cg_key_info == variant
    for infos, variant in (([plain], None), ([plain, penalised], FULL), ([plain], None)):
        assert engine.exec(Batch("LLM", "decode", infos)).bucket.cg_key_info == variant


def test_a_prompt_that_is_asked_about_runs_eager_and_tells_of_every_token_but_the_first(folder: Path) -> None:
    engine = build_engine(load_small(folder), 3, CpuGraphBackend(strict=True))
    asking, other = request(1, [5, 6, 7, 8], 8, GREEDY), request(2, [9, 6], 8, GREEDY)
    asking.resource_configs["logprobs"] = LogprobsReqConfig(num_prompt_top=2, prompt_ids=np.array([5, 6, 7, 8]))
    for info in (asking, other):
        engine.ingest(info)
    result = engine.exec(Batch("LLM", "prefill", [other, asking]))
    assert engine.eager_steps == {("LLM", "prefill", "prompt_logprobs"): 1}
    assert result.outputs[1]["prompt_logprob"][0].shape == (3,)
    assert "prompt_logprob" not in result.outputs.get(2, {})
    assert engine.exec(Batch("LLM", "decode", [other, asking])).captured


def test_logprobs_are_of_the_models_own_logits_whatever_was_made_of_them(folder: Path) -> None:
    model = load_small(folder)
    engine = build_engine(model, 1, CpuGraphBackend(strict=True))
    edits = LogitEditsReqConfig(allowed_ids=np.array([3, 9]), bias_ids=np.array([9]), bias=np.array([50.0]))
    asking = request(1, [5, 6, 7], 8, SamplingReqConfig(temperature=0.7, repetition_penalty=3.0))
    asking.resource_configs |= {"logit_edits": edits, "logprobs": LogprobsReqConfig(num_top=2)}
    engine.ingest(asking)
    raw: list[torch.Tensor] = []
    hook = model.submodules["LLM"].decoder.register_forward_hook(lambda *call: raw.append(call[-1].clone()))
    for walk in ("prefill", "decode", "decode"):
        host = step(engine, Batch("LLM", walk, [asking]))
        expected = raw[-1][0].double().log_softmax(-1)
        assert host["new_token"] == [9]
        assert host["logprob"][0] == pytest.approx(expected[9].item(), abs=1e-5)
        assert host["logprob_rank"][0] == 1 + (expected > expected[9]).sum()
        assert host["top_ids"][0, :2].tolist() == expected.topk(2).indices.tolist()
    hook.remove()


def test_only_the_last_part_of_a_prompt_keeps_its_draw(folder: Path) -> None:
    submodule = load_small(folder).submodules["LLM"]
    head, rest = submodule.split_inputs(submodule.prepare_inputs("prefill", request(1, [5, 6, 7], 1)), 2)
    assert (head.input_ids.tolist(), rest.input_ids.tolist()) == ([5, 6], [7])
    assert submodule.declare_step("prefill", [1], [head]).get("sampler").kept_rids == frozenset()
    assert submodule.declare_step("prefill", [1], [rest]).get("sampler").kept_rids is None


@pytest.mark.parametrize("loopback", ["1", "0"])
def test_decode_rows_are_one_object_only_where_their_tokens_stay_in_the_sampler(
    loopback: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MSTAR_DEVICE_LOOPBACK", loopback)
    submodule = load_small(folder).submodules["LLM"]
    uniform = submodule.uniform_row_inputs("decode")
    assert (uniform is not None) == submodule.reads_device_loopback == (loopback == "1")
    assert submodule.uniform_row_inputs("prefill") is submodule.uniform_row_inputs("mixed") is None
    row = submodule.prepare_inputs("decode", request(1, [5], 1))
    assert (row.input_ids, row.input_seq_len) == (None, 1)


# Mixed steps.


def test_a_mixed_step_may_combine_decode_and_prefill_rows_in_that_order(folder: Path) -> None:
    engine = build_engine(load_small(folder), 3)
    assert engine.combined_graph_walks() == {"LLM": {"mixed": ("decode", "prefill")}}


@pytest.mark.parametrize("backend", ["captured", "eager"])
@pytest.mark.parametrize("scatter", ["0", "1"])
@pytest.mark.parametrize("loopback", ["1", "0"])
def test_rows_of_a_mixed_step_give_the_tokens_they_give_alone(
    loopback: str, scatter: str, backend: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MSTAR_DEVICE_LOOPBACK", loopback)
    monkeypatch.setenv("MSTAR_SAMPLER_INGRAPH_SCATTER", scatter)
    model = load_small(folder)
    sampling = [GREEDY, SamplingReqConfig(temperature=0.8, _seed=7), SamplingReqConfig(temperature=1.0, top_k=9)]
    backends = {"captured": lambda: CpuGraphBackend(strict=True), "eager": EagerBackend}
    infos = [request(i, prompt, 8, config) for i, (prompt, config) in enumerate(zip(PROMPTS, sampling, strict=True))]
    alone: dict[int, list[int]] = {}
    for info in infos:
        engine = build_engine(model, 3, backends[backend]())
        engine.ingest(info)
        walks = ["prefill"] + ["decode"] * 6
        alone[info.request_id] = [int(step(engine, Batch("LLM", w, [info]))["new_token"][0]) for w in walks]
        engine.remove(info.request_id)
    engine = build_engine(model, 3, backends[backend]())
    first, second, third = infos
    together: dict[int, list[int]] = {info.request_id: [] for info in infos}
    for info in infos:
        engine.ingest(info)
    for batch in (
        Batch("LLM", "prefill", [first]),
        Batch("LLM", "mixed", [first, second], row_walks=["decode", "prefill"]),
        Batch("LLM", "decode", [second, first]),
        Batch("LLM", "mixed", [second, first, third], row_walks=["decode", "decode", "prefill"]),
        Batch("LLM", "decode", [third, first, second]),
        Batch("LLM", "decode", [third, first, second]),
    ):
        for info, token in zip(batch.infos, step(engine, batch)["new_token"].tolist(), strict=True):
            together[info.request_id].append(token)
    assert together == {i: tokens[: len(together[i])] for i, tokens in alone.items()}
    counters = engine.resources["sampler"].counters
    assert counters["loopback_steps"] == (5 if loopback == "1" else 0)
    assert counters["ingraph_scatter_steps"] == (6 if (scatter, backend) == ("1", "captured") else 0)
    assert bool(engine.eager_steps) == (backend == "eager")


# The real model.


@pytest.mark.model
def test_smollm2_repeats_the_reference_up_to_its_first_tie() -> None:
    cases = json.loads(GOLDEN.read_text())["cases"]
    options = ModelLoadOptions(kv_memory_bytes=256 << 20, max_running_requests=len(cases))
    model = load_small("smollm2-135m", dtype=None, options=options)
    steps = len(cases[0]["output_ids"])
    run = generate(model, [case["prompt_ids"] for case in cases], steps, strict=False)
    for row, case in enumerate(cases):
        settled = min([*case["tie_steps"], steps])
        assert run.tokens[row, :settled].tolist() == case["output_ids"][:settled], case["name"]
