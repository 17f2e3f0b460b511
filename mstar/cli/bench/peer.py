"""transformers' ``generate`` on the same weights and threads, to measure side by side."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from mstar.model.checkpoint import Checkpoint
from mstar.model.weights import open_tensors
from mstar.utils.errors import MstarError

ATTENTIONS = ("sdpa", "eager")


class TransformersPeer:
    """A transformers model holding the checkpoint's weights in ``dtype``, its KV cache on.

    Raises:
        MstarError: transformers is not installed.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        try:
            import transformers
        except ImportError as error:
            raise MstarError(f"--compare needs transformers (pip install 'mstar-triton[test]'): {error}") from error
        transformers.logging.set_verbosity_error()
        self._model = self._build(transformers, checkpoint).to(dtype).eval()
        self.name = f"transformers {transformers.__version__}"

    def generate(self, prompts: np.ndarray, output_len: int, attention: str) -> tuple[np.ndarray, float]:
        """Greedy continuation of ``prompts`` int64 [rows, tokens] -> (int64 [rows, output_len], seconds)."""
        self._model.set_attn_implementation(attention)
        ids = torch.from_numpy(prompts)
        start = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=output_len,
                min_new_tokens=output_len,
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
                eos_token_id=None,
            )
        return out[:, ids.shape[1] :].numpy(), time.perf_counter() - start

    @staticmethod
    def _build(transformers: Any, checkpoint: Checkpoint) -> Any:
        config = checkpoint.config
        rope: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
        settings = transformers.AutoConfig.for_model(
            config.family,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=config.tie_word_embeddings,
            rope_parameters=rope | dict(config.rope_scaling or {}),
        )
        model = transformers.AutoModelForCausalLM.from_config(settings)
        source = open_tensors(checkpoint)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                source.read_into(name, parameter)
        model.generation_config = transformers.GenerationConfig()
        return model
