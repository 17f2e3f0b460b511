#!/usr/bin/env python3
"""Start a long answer, stop it after a few responses, and show that the server frees it and goes on serving.

    python client_examples/cancel.py --after 5

Needs: pip install "tritonclient[grpc]"
"""

import argparse
import queue
import sys
import time

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput


def inputs_of(prompt: str, max_tokens: int) -> list[InferInput]:
    text = InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([prompt.encode()], object))
    stream = InferInput("stream", [1], "BOOL")
    stream.set_data_from_numpy(np.array([True]))
    limit = InferInput("max_tokens", [1], "INT32")
    limit.set_data_from_numpy(np.array([max_tokens], np.int32))
    ignore_eos = InferInput("ignore_eos", [1], "BOOL")
    ignore_eos.set_data_from_numpy(np.array([True]))
    return [text, stream, limit, ignore_eos]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="localhost:8001", help="gRPC address of the server")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--after", type=int, default=5, help="responses to read before cancelling")
    args = parser.parse_args()

    responses: queue.Queue = queue.Queue()

    def receive(result, error):
        responses.put((result, error))

    with InferenceServerClient(args.url) as client:
        client.start_stream(receive)
        client.async_stream_infer(args.model, inputs_of("Count from one to a thousand: one, two,", 1000))
        for _ in range(args.after):
            result, error = responses.get(timeout=600)
            if error is not None:
                print(f"error: {error.message()}", file=sys.stderr)
                return 1
            print(result.as_numpy("text_output")[0].decode(), end="", flush=True)
        started = time.perf_counter()
        client.stop_stream(cancel_requests=True)
        print(f"\n[cancelled after {args.after} responses; the stream closed in {time.perf_counter() - started:.3f} s]")

    with InferenceServerClient(args.url) as client:  # the same server answers the next request
        responses = queue.Queue()
        client.start_stream(receive)
        client.async_stream_infer(args.model, inputs_of("Hello", 4))
        result, error = responses.get(timeout=600)
        if error is not None:
            print(f"error: {error.message()}", file=sys.stderr)
            return 1
        print("[the next request is answered]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
