#!/usr/bin/env python3
"""Stream an answer that follows a JSON schema (or a regular expression, or a list of choices) over gRPC.

    python client_examples/structured_output.py --chat "Invent a person."
    python client_examples/structured_output.py --chat "Is water wet?" --choice yes no
    python client_examples/structured_output.py --chat "A date, please." --regex "[0-9]{4}-[0-9]{2}-[0-9]{2}"

Needs: pip install "tritonclient[grpc]"
"""

import argparse
import json
import queue
import sys

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"type": "string", "maxLength": 16}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


def text_tensor(name: str, text: str) -> InferInput:
    tensor = InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], object))
    return tensor


def guide_of(args: argparse.Namespace) -> tuple[str, str]:
    """The kind of guide and its text."""
    if args.choice:
        return "choice", json.dumps(args.choice)
    if args.regex:
        return "regex", args.regex
    return "json_schema", json.dumps(PERSON)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="localhost:8001", help="gRPC address of the server")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--chat", required=True, help="a question; the model's chat template is applied")
    guide = parser.add_mutually_exclusive_group()
    guide.add_argument("--choice", nargs="+", help="the answer is one of these")
    guide.add_argument("--regex", help="the answer matches this")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=-1)
    args = parser.parse_args()

    kind, guide_text = guide_of(args)
    stream = InferInput("stream", [1], "BOOL")
    stream.set_data_from_numpy(np.array([True]))
    options = {"max_tokens": args.max_tokens, "temperature": args.temperature, "seed": args.seed}
    inputs = [
        stream,
        text_tensor("messages", json.dumps([{"role": "user", "content": args.chat}])),
        text_tensor("guided_decoding_guide_type", kind),
        text_tensor("guided_decoding_guide", guide_text),
        text_tensor("sampling_parameters", json.dumps(options)),
    ]
    responses: queue.Queue = queue.Queue()
    pieces = []
    with InferenceServerClient(args.url) as client:
        client.start_stream(lambda result, error: responses.put((result, error)))
        client.async_stream_infer(args.model, inputs)
        final = False
        while not final:
            result, error = responses.get(timeout=600)
            if error is not None:
                print(f"error: {error.message()}", file=sys.stderr)
                return 1
            pieces.append(result.as_numpy("text_output")[0].decode())
            print(pieces[-1], end="", flush=True)
            final = result.get_response().parameters["triton_final_response"].bool_param
    print()
    if result.as_numpy("finish_reason")[0] == b"length":
        print("cut at --max-tokens: the text is not complete", file=sys.stderr)
        return 1
    if kind == "json_schema":
        print(f"[parsed: {json.loads(''.join(pieces))}]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
