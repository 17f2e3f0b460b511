"""The end of a text model's step on a GPU: the tokens that the CPU draws, with every feature in one batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mstar.engine.resources.base import EngineResourceInfo
from mstar.engine.resources.grammar.config import GrammarReqConfig, Vocabulary
from mstar.engine.resources.logit_edits.config import LogitEditsReqConfig
from mstar.engine.resources.logprobs.config import LogprobsReqConfig
from mstar.engine.resources.runner import StepRunner, build_resources
from mstar.engine.resources.sampler.config import SamplerStep, SamplingReqConfig
from mstar.engine.resources.step import StepContext, SubmoduleStep
from mstar.model.text_sampling import FULL, sample, sampling_specs, sampling_steps

VOCAB, STEPS, EOS = 512, 12, 0
PIECES = [b"", *(bytes([i]) for i in range(1, 256)), *(str(i).encode() for i in range(256, VOCAB))]
IDS = np.arange(40, 90)


def sampled(seed: int, **settings: object) -> SamplingReqConfig:
    config = SamplingReqConfig(**({"temperature": 1.0} | settings))  # type: ignore[arg-type]
    config.apply_conductor_config(seed=seed)
    return config


GREEDY = SamplingReqConfig(temperature=0)
ROWS = [
    {"sampler": GREEDY},
    {"sampler": sampled(1)},
    {"sampler": sampled(2, top_k=20, top_p=0.9, min_p=0.02)},
    {"sampler": SamplingReqConfig(temperature=0, repetition_penalty=1.5)},
    {"sampler": SamplingReqConfig(temperature=0, repetition_penalty=1.5, repetition_window=3)},
    {"sampler": sampled(3, min_tokens=6)},
    {"sampler": GREEDY, "logit_edits": LogitEditsReqConfig(presence_penalty=1.0, frequency_penalty=0.5)},
    {"sampler": sampled(4), "logit_edits": LogitEditsReqConfig(allowed_ids=IDS, bad_words=((50,), (51, 52)))},
    {"sampler": GREEDY, "grammar": GrammarReqConfig(kind="regex", text="([0-9]{2} )+x")},
    {"sampler": sampled(5), "logprobs": LogprobsReqConfig(num_top=5)},
]


def play(device: str) -> list[dict[str, np.ndarray]]:
    """What every step tells, from the same logits on every device."""
    specs = sampling_specs({"LLM"}, VOCAB, (EOS,), lambda: Vocabulary(PIECES, special_ids=(EOS,), eos_ids=(EOS,)))
    info = EngineResourceInfo(torch.device(device), torch.float32, torch.float32, len(ROWS), 0, 2)
    resources = build_resources(specs, info)
    runner = StepRunner(resources, specs)
    for row, configs in enumerate(ROWS):
        for key, resource in resources.items():
            resource.ingest_request(row, row, configs.get(key))
    step = SubmoduleStep(steps=sampling_steps(SamplerStep(), FULL), cg_key_info=FULL)
    random, rows, told = torch.Generator().manual_seed(0), np.arange(len(ROWS)), []
    for _ in range(STEPS):
        ctx = StepContext("decode", tuple(rows.tolist()), rows, np.ones(rows.size, np.int64))
        logits = (torch.randn(rows.size, VOCAB, generator=random) * 3).to(device)
        runner.plan(step, ctx)
        outputs = {name: value.cpu().numpy() for name, value in sample(resources, logits, FULL).items()}
        runner.commit(step, ctx)
        resources["grammar"].accept_tokens(rows, outputs["new_token"])
        told.append(outputs)
    return told


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_the_tokens_of_the_cpu_with_every_feature_in_one_batch() -> None:
    for on_cpu, on_gpu in zip(play("cpu"), play("cuda"), strict=True):
        for name in ("new_token", "fault", "logprob_rank", "top_ids"):
            assert on_gpu[name].tolist() == on_cpu[name].tolist(), name
        for name in ("logprob", "top_logprobs"):
            np.testing.assert_allclose(on_gpu[name], on_cpu[name], atol=1e-5)


def test_the_features_of_the_batch_show_in_its_tokens() -> None:
    told = np.stack([outputs["new_token"] for outputs in play("cpu")])
    assert EOS not in told[:6, 5]
    assert set(told[:, 7].tolist()) <= set(IDS.tolist()) - {50}
    text = b"".join(PIECES[token] for token in told[:, 8].tolist())
    assert text.replace(b" ", b"").rstrip(b"x").isdigit()
    assert len(set(told[:, 3].tolist())) > 8, "no token comes again soon"
