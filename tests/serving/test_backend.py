"""The hooks Triton calls, without a server: what older servers than those that ask for it cannot show."""

from __future__ import annotations

import sys
import threading
from queue import SimpleQueue
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from serving_fakes import wait_until

from mstar.model.front import ModelFront
from mstar.runtime.options import FrontOptions
from mstar.serving.intake import Intake
from mstar.serving.parse import RawRequest
from mstar.serving.readers import ReaderPool


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


class Request:
    """What Triton hands over; without tensors, which is no request of ours."""

    def __init__(self, outbox: SimpleQueue[Any]) -> None:
        self._outbox = outbox

    def get_response_sender(self) -> Request:
        return self

    def send(self, response: Any, flags: int = 0) -> None:
        self._outbox.put((response, flags))

    def requested_output_names(self) -> list[str]:
        return []

    def inputs(self) -> list[Any]:
        return []

    def parameters(self) -> str:
        return "{}"

    def request_id(self) -> str:
        return ""


@pytest.fixture
def model(backend, engine, tokenizer):
    utils = sys.modules["triton_python_backend_utils"]
    utils.TritonError = type("TritonError", (), {"INTERNAL": 1, "__new__": lambda cls, message, code: message})
    utils.InferenceResponse = lambda error: error
    model = backend.TritonPythonModel()
    model._frontend = engine.frontend
    model._intake = Intake(ModelFront("bytes", 257, 64, frozenset(), tokenizer), FrontOptions(), engine.frontend)
    model._client = SimpleNamespace(close=lambda: None)
    model._readers = ReaderPool(model._read)
    return model


def test_execute_waits_for_no_reading_and_every_bad_request_gets_one_last_response(model):
    outbox: SimpleQueue[Any] = SimpleQueue()
    reading, take = threading.Event(), model._intake.take

    def take_later(*given: Any) -> None:
        assert reading.wait(5)
        take(*given)

    model._intake.take = take_later
    model.execute([Request(outbox) for _ in range(5)])
    assert outbox.empty()
    reading.set()
    answers = [outbox.get(timeout=5) for _ in range(5)]
    model.finalize()
    assert outbox.empty()
    assert {flags for _, flags in answers} == {1}
    assert all("exactly one of text_input" in message for message, _ in answers)


def test_what_was_not_read_before_an_unload_is_refused(model):
    outbox: SimpleQueue[Any] = SimpleQueue()
    unloading, take = threading.Event(), model._intake.take
    text = np.array([b"abc"], np.object_)

    def take_later(raw: RawRequest, *given: Any) -> None:
        assert unloading.wait(5)
        take(RawRequest({"text_input": text}), *given)

    model._intake.take = take_later
    model.execute([Request(outbox)])
    ending = threading.Thread(target=model.finalize)
    ending.start()
    wait_until(lambda: not model.is_ready())
    unloading.set()
    ending.join(5)
    assert outbox.get(timeout=5) == ("the server is shutting down", 1)
    assert outbox.empty()
