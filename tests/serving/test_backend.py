"""The hooks Triton calls, without a server: what older servers than those that ask for it cannot show."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    utils = ModuleType("triton_python_backend_utils")
    monkeypatch.setattr(utils, "TRITONSERVER_RESPONSE_COMPLETE_FINAL", 1, raising=False)
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    for name in ("mstar.serving.triton", "mstar.serving.backend"):
        monkeypatch.setitem(sys.modules, name, utils)  # so that what is imported below is forgotten again
        del sys.modules[name]
    import mstar.serving.backend

    return mstar.serving.backend


@pytest.mark.parametrize("loss", ["process", "told", "drain"])
def test_a_model_is_ready_until_its_engine_is_gone_or_it_drains(backend, engine, loss):
    model = backend.TritonPythonModel()
    model._frontend = engine.frontend
    assert model.is_ready() is True
    match loss:
        case "process":
            engine.alive = False
        case "told":
            engine.frontend.on_engine_lost("killed by signal 9")
        case "drain":
            engine.frontend.drain()
    assert model.is_ready() is False
