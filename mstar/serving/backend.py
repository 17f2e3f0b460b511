"""The ``TritonPythonModel`` of every repository entry: Triton's hooks over a front end and an engine client."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from mstar.model.front import open_front
from mstar.runtime.client import EngineClient
from mstar.runtime.options import parse_options
from mstar.serving.frontend import Frontend
from mstar.serving.intake import Intake, room_of
from mstar.serving.readers import ReaderPool
from mstar.serving.triton import Arrival, TritonReply, answer_error, complete_config, read_request


class TritonPythonModel:
    """One instance: it reads requests, hands them to the engine process, and answers as tokens come."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """The contract's tensors, which config.pbtxt has too: a model loads with and without this hook."""
        return complete_config(auto_complete_model_config)

    def initialize(self, args: Mapping[str, str]) -> None:
        """Wait for the engine to be ready; what is raised here is the load error an operator sees."""
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
        parameters = json.loads(args["model_config"]).get("parameters", {})
        engine_options, options = parse_options({key: value["string_value"] for key, value in parameters.items()})
        # Prompts are tokenised one by one, by threads of ours: the library's own would only cost their start.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        front = open_front(engine_options.model)
        self._client = EngineClient(
            os.getppid(), options.engine or args["model_name"], engine_options, load_timeout_s=options.load_timeout_s
        )
        self._frontend = Frontend(
            self._client, num_senders=options.response_threads, drain_timeout_s=engine_options.drain_timeout_s
        )
        try:
            self._client.start(self._frontend)
        except BaseException:
            self._frontend.close()
            self._client.close()
            raise
        info = self._client.info
        self._intake = Intake(front, options, self._frontend, info.max_seq_len, room_of(info, engine_options))
        self._readers = ReaderPool(self._read)

    def execute(self, requests: list[Any]) -> None:
        """Take requests in. Never raises (one raise would close every sender of the call) nor waits for anything."""
        arrival_ns = time.monotonic_ns()
        for request in requests:
            reply = TritonReply(request)
            try:
                self._frontend.check_accepting()
                self._readers.put(Arrival(read_request(request), reply, arrival_ns))
            except Exception as error:
                answer_error(reply, error)

    def _read(self, arrival: Arrival) -> None:
        """On a reader's thread."""
        try:
            self._intake.take(arrival.raw, arrival.reply, arrival.monotonic_ns)
        except Exception as error:
            answer_error(arrival.reply, error)

    def is_ready(self) -> bool:
        """For servers that ask (newer than 2.51): false once the engine is gone."""
        return self._frontend.is_ready

    def finalize(self) -> None:
        """Drain, end what is left, and leave no thread behind: a server loads and unloads models repeatedly."""
        self._frontend.drain()
        self._readers.close()  # from the drain on whatever it reads is refused
        self._frontend.close()
        self._client.close()
