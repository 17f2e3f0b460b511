"""A tokenizer of single bytes and a front end over an engine driven by the test."""

from __future__ import annotations

import pytest
import tokenizers
from serving_fakes import ManualEngine

from mstar.serving.frontend import Frontend
from mstar.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """One id per byte, and one special token, ``<end>``, as id 256."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken("<end>", special=True)])
    return Tokenizer(backend)


@pytest.fixture
def engine():
    engine = ManualEngine()
    engine.frontend = Frontend(engine, drain_timeout_s=0.2)
    yield engine
    engine.frontend.drain()
    engine.frontend.close()
