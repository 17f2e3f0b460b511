"""A model for the launcher's tests: it counts, and its stub and pretended engine can be made to vanish.

``text_input`` is the number of responses to send, one every 50 ms, or the name of a process to kill: stub, engine.
"""

import os
import signal
import subprocess
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

from mstar.runtime.presence import EngineRecord, open_engine_folder
from mstar.runtime.processes import start_ticks


class TritonPythonModel:
    def initialize(self, args):
        self._name = f"{args['model_instance_name']}-{os.getpid()}"
        self._folder = open_engine_folder(os.getppid(), "counter", "0")
        self._folder.sign_on(self._name)
        drains = ["env", "--ignore-signal=TERM"]  # as an engine that still has requests
        self._engine = subprocess.Popen([*drains, "sleep", "1000"], start_new_session=True)
        self._folder.write_engine(
            EngineRecord(pid=self._engine.pid, started=start_ticks(self._engine.pid), name="counter")
        )
        self._folder.log_path.write_text("the engine's last words\n")
        self._threads = []

    def execute(self, requests):
        for request in requests:
            word = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().reshape(-1)[0].decode()
            if word == "stub":
                os.kill(os.getpid(), signal.SIGKILL)
            if word == "engine":
                self._engine.kill()
                self._engine.wait()
            count = int(word) if word.isdigit() else 1
            self._threads.append(threading.Thread(target=self._send, args=(request.get_response_sender(), count)))
            self._threads[-1].start()

    def _send(self, sender, count):
        for number in range(count):
            text = pb_utils.Tensor("text_output", np.array([str(number).encode()], object))
            sender.send(pb_utils.InferenceResponse([text]), flags=int(number == count - 1))
            time.sleep(0.05)

    def finalize(self):
        for thread in self._threads:
            thread.join()
        engine = self._folder.engine()
        self._folder.write_engine(
            EngineRecord(pid=engine.pid, started=engine.started, name=engine.name, has_signed_off=True)
        )
        self._engine.kill()
        self._engine.wait()
        self._folder.sign_off(self._name)
