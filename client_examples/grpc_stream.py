#!/usr/bin/env python3
"""Stream one answer over gRPC and print it as it comes.

    python client_examples/grpc_stream.py --chat "What is the capital of France?"
    python client_examples/grpc_stream.py --prompt "Once upon a time" --temperature 0.8 --seed 7

Needs: pip install "tritonclient[grpc]"
"""

import argparse
import json
import queue
import sys
import time

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput


def tensor(name: str, datatype: str, value) -> InferInput:
    """One input tensor of one element; strings travel as BYTES."""
    array = np.array([value.encode()], object) if datatype == "BYTES" else np.array([value], datatype_of[datatype])
    result = InferInput(name, [1], datatype)
    result.set_data_from_numpy(array)
    return result


datatype_of = {"BOOL": np.bool_, "INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="localhost:8001", help="gRPC address of the server")
    parser.add_argument("--model", default="smollm2")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="text to continue")
    prompt.add_argument("--chat", help="a question; the model's chat template is applied")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stats", action="store_true", help="print time to first token and tokens/s at the end")
    args = parser.parse_args()

    inputs = [
        tensor("stream", "BOOL", True),
        tensor("max_tokens", "INT32", args.max_tokens),
        tensor("temperature", "FP32", args.temperature),
    ]
    if args.chat is not None:
        inputs.append(tensor("messages", "BYTES", json.dumps([{"role": "user", "content": args.chat}])))
    else:
        inputs.append(tensor("text_input", "BYTES", args.prompt))
    if args.seed is not None:
        inputs.append(tensor("seed", "UINT64", args.seed))

    responses: queue.Queue = queue.Queue()
    with InferenceServerClient(args.url) as client:
        client.start_stream(lambda result, error: responses.put((result, error)))
        started = time.perf_counter()
        client.async_stream_infer(args.model, inputs)
        first = last = started
        tokens = 0
        final = False
        while not final:
            result, error = responses.get(timeout=600)
            if error is not None:
                print(f"error: {error.message()}", file=sys.stderr)
                return 1
            last = time.perf_counter()
            first = last if tokens == 0 else first
            tokens += int(result.as_numpy("num_output_tokens")[0])
            print(result.as_numpy("text_output")[0].decode(), end="", flush=True)
            final = result.get_response().parameters["triton_final_response"].bool_param
    print()
    if args.stats:
        speed = f", {(tokens - 1) / (last - first):.1f} tokens/s" if tokens > 1 and last > first else ""
        print(f"[{tokens} tokens; first after {(first - started) * 1000:.0f} ms{speed}]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
