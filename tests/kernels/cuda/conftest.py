"""Kernels run in Triton's interpreter on the CPU, their memory checked, and for real where there is a GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off where there is a GPU")
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def checked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
        from checked_memory import CheckedMemory

        CheckedMemory(monkeypatch)
