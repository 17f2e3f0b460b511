"""A checkpoint that loads in no time, and a listener that remembers."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from mstar.runtime.messages import EngineRequest, FinishReason

VOCAB, HIDDEN, INNER, LAYERS, CONTEXT = 64, 32, 48, 1, 4096


def write_checkpoint(folder: Path) -> Path:
    """A random Llama in a Hugging Face folder."""
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (HIDDEN,),
                "post_attention_layernorm": (HIDDEN,),
                "self_attn.q_proj": (HIDDEN, HIDDEN),
                "self_attn.k_proj": (HIDDEN, HIDDEN),
                "self_attn.v_proj": (HIDDEN, HIDDEN),
                "self_attn.o_proj": (HIDDEN, HIDDEN),
                "mlp.gate_proj": (INNER, HIDDEN),
                "mlp.up_proj": (INNER, HIDDEN),
                "mlp.down_proj": (HIDDEN, INNER),
            }.items()
        }
    folder.mkdir(parents=True, exist_ok=True)
    save_file({n: rng.normal(0, 0.3, s).astype(np.float32) for n, s in shapes.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "eos_token_id": None,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}}))
    return folder


def greedy(prompt: list[int], max_tokens: int) -> EngineRequest:
    return EngineRequest(
        prompt_ids=np.array(prompt, "<i4").tobytes(), max_tokens=max_tokens, temperature=0.0, ignore_eos=True
    )


class Recorder:
    """Everything an engine said, by ticket."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, list[object]] = {}
        self.logprobs: dict[int, list[np.void]] = {}
        self.prompt_logprobs: dict[int, np.ndarray] = {}
        self.lost: list[str] = []
        self._changed = threading.Condition()

    def on_tokens(self, rows) -> None:
        with self._changed:
            columns = rows.tickets.tolist(), rows.tokens.tolist(), rows.finish.tolist()
            for ticket, token, code in zip(*columns, strict=True):
                if token >= 0:
                    self.tokens.setdefault(ticket, []).append(token)
                if code:
                    self.ends.setdefault(ticket, []).append(FinishReason(code))
            if rows.logprob_rows is not None:
                for row, record in zip(rows.logprob_rows.tolist(), rows.logprobs, strict=True):
                    self.logprobs.setdefault(int(rows.tickets[row]), []).append(record)
            self._changed.notify_all()

    def on_prompt_logprobs(self, ticket, records) -> None:
        with self._changed:
            assert ticket not in self.tokens, "told after the first token"
            self.prompt_logprobs[ticket] = records

    def on_failed(self, ticket, code, message) -> None:
        with self._changed:
            self.ends.setdefault(ticket, []).append((code, message))
            self._changed.notify_all()

    def on_engine_lost(self, message) -> None:
        with self._changed:
            self.lost.append(message)
            self._changed.notify_all()

    def wait(self, condition, timeout_s: float = 60.0) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, timeout_s), (self.ends, self.lost)


def wait_until(condition, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)
