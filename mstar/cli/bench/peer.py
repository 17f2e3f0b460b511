"""Other engines on the same weights and the same work, to measure side by side."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mstar.cli.bench.workloads import Workload
from mstar.model.checkpoint import Checkpoint
from mstar.model.weights import open_tensors
from mstar.utils.errors import MstarError

ATTENTIONS = ("sdpa", "eager")
TRIAL_TOKENS = 8


class TransformersPeer:
    """A transformers model holding the checkpoint's weights in ``dtype`` on ``device``, its KV cache on.

    Raises:
        MstarError: transformers is not installed.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, load_format: str = "auto"
    ) -> None:
        try:
            import transformers
        except ImportError as error:
            message = f"--compare transformers needs it (pip install 'mstar-triton[test]'): {error}"
            raise MstarError(message) from error
        transformers.logging.set_verbosity_error()
        self._device = device
        self._model = self._build(transformers, checkpoint, dtype, device, load_format).eval()
        self.name = f"transformers {transformers.__version__}"

    def warm_up(self, workload: Workload) -> None:
        """Takes the attention implementation that is faster on this work, each warmed up once."""
        seconds = {}
        for attention in ATTENTIONS:
            self._model.set_attn_implementation(attention)
            self._generate(workload, TRIAL_TOKENS)
            seconds[attention] = self.generate(workload)[1]
        self._model.set_attn_implementation(min(seconds, key=lambda name: seconds[name]))

    def generate(self, workload: Workload) -> tuple[np.ndarray, float]:
        """Continues prompts of one length -> (int64 [rows, output_len], seconds)."""
        return self._generate(workload, int(workload.output_lens[0]))

    def _generate(self, workload: Workload, output_len: int) -> tuple[np.ndarray, float]:
        ids = torch.from_numpy(np.stack(workload.prompts).astype(np.int64)).to(self._device)
        sampling = workload.sampling
        drawn: dict[str, Any] = {"do_sample": False}
        if sampling.temperature:
            drawn = {"do_sample": True, **sampling._asdict()}
        start = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=output_len,
                min_new_tokens=output_len,
                use_cache=True,
                pad_token_id=0,
                eos_token_id=None,
                **drawn,
            )
        tokens = out[:, ids.shape[1] :].cpu().numpy()
        return tokens, time.perf_counter() - start

    @staticmethod
    def _build(
        transformers: Any, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, load_format: str
    ) -> Any:
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
        model = transformers.AutoModelForCausalLM.from_config(settings).to(device=device, dtype=dtype)
        source = open_tensors(checkpoint, device, load_format)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                source.read_into(name, parameter)
        model.generation_config = transformers.GenerationConfig()
        return model


class VllmPeer:
    """vLLM on the same folder, with graphs and what else it does by default.

    Raises:
        MstarError: vllm is not installed.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, load_format: str = "auto"
    ) -> None:
        try:
            import vllm
        except ImportError as error:
            raise MstarError(f"--compare vllm needs it (pip install vllm): {error}") from error
        self._sampling_params = vllm.SamplingParams
        self._llm = vllm.LLM(
            model=str(checkpoint.path),
            dtype=str(dtype).removeprefix("torch."),
            load_format=load_format,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.4,  # beside this engine
            seed=0,
        )
        self.name = f"vllm {vllm.__version__}"

    def warm_up(self, workload: Workload) -> None:
        self.generate(workload)

    def generate(self, workload: Workload) -> tuple[np.ndarray, float]:
        """Continues prompts of one length -> (int64 [rows, output_len], seconds)."""
        prompts = [{"prompt_token_ids": prompt.tolist()} for prompt in workload.prompts]
        sampling = workload.sampling._asdict()
        params = [
            self._sampling_params(max_tokens=length, ignore_eos=True, detokenize=False, **sampling)
            for length in workload.output_lens.tolist()
        ]
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return np.array([output.outputs[0].token_ids for output in outputs], np.int64), seconds


PEERS: dict[str, Callable[[Checkpoint, torch.dtype, torch.device, str], Any]] = {
    "transformers": TransformersPeer,
    "vllm": VllmPeer,
}
