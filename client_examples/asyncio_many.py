#!/usr/bin/env python3
"""Many prompts at once with asyncio, each on a gRPC stream of its own; answers are printed as they finish.

    python client_examples/asyncio_many.py "The sun is" "Water boils at" "A prime number is"
    python client_examples/asyncio_many.py --count 32

Needs: pip install "tritonclient[grpc]"
"""

import argparse
import asyncio
import sys
import time

import numpy as np
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient


def request_of(model: str, prompt: str, max_tokens: int) -> dict:
    text = InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([prompt.encode()], object))
    stream = InferInput("stream", [1], "BOOL")
    stream.set_data_from_numpy(np.array([True]))
    limit = InferInput("max_tokens", [1], "INT32")
    limit.set_data_from_numpy(np.array([max_tokens], np.int32))
    return {"model_name": model, "inputs": [text, stream, limit]}


async def ask(client: InferenceServerClient, request: dict, prompt: str) -> tuple[str, str, int]:
    async def requests():
        yield request

    pieces, tokens = [], 0
    async for result, error in client.stream_infer(requests()):
        if error is not None:
            raise error
        pieces.append(result.as_numpy("text_output")[0].decode())
        tokens += int(result.as_numpy("num_output_tokens")[0])
    return prompt, "".join(pieces), tokens


async def run(args: argparse.Namespace) -> int:
    prompts = args.prompts or [f"Here are {n} facts about the number {n}:" for n in range(1, args.count + 1)]
    started = time.perf_counter()
    total = failed = 0
    async with InferenceServerClient(args.url) as client:
        asks = [ask(client, request_of(args.model, prompt, args.max_tokens), prompt) for prompt in prompts]
        for finished in asyncio.as_completed(asks):
            try:
                prompt, answer, tokens = await finished
            except Exception as error:
                failed += 1
                print(f"error: {error}", file=sys.stderr)
                continue
            total += tokens
            print(f"{prompt!r} -> {answer!r}")
    seconds = time.perf_counter() - started
    print(f"[{len(prompts) - failed} answers, {total} tokens in {seconds:.1f} s: {total / seconds:.1f} tokens/s]")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="*", help="default: --count made-up ones")
    parser.add_argument("--url", default="localhost:8001", help="gRPC address of the server")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--count", type=int, default=16)
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
