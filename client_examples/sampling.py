#!/usr/bin/env python3
"""Several texts for one prompt, with sampling and stop rules, streamed side by side over gRPC.

    python client_examples/sampling.py --prompt "Once upon a time" --n 3 --seed 7 --stop "." --min-tokens 4
    python client_examples/sampling.py --prompt "A list: red, red," --repetition-penalty 1.3 --timeout-ms 2000

Needs: pip install "tritonclient[grpc]"
"""

import argparse
import json
import queue
import sys

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput


def tensor(name: str, datatype: str, values: list) -> InferInput:
    types = {"BYTES": object, "BOOL": np.bool_}
    result = InferInput(name, [len(values)], datatype)
    result.set_data_from_numpy(np.array(values, types[datatype]))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="localhost:8001", help="gRPC address of the server")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--n", type=int, default=1, help="texts for the prompt")
    parser.add_argument("--stop", nargs="*", default=[], help="strings that end a text")
    parser.add_argument("--keep-stop", action="store_true", help="leave the stop string in the text")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--min-tokens", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--timeout-ms", type=int, default=0, help="end with what there is after so long")
    parser.add_argument("--seed", type=int, default=-1)
    args = parser.parse_args()

    # Every name here is an input tensor too; one JSON object is shorter.
    names = (
        "n",
        "max_tokens",
        "min_tokens",
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "timeout_ms",
        "seed",
    )
    options = {name: getattr(args, name) for name in names}
    options["include_stop_str_in_output"] = args.keep_stop
    inputs = [
        tensor("text_input", "BYTES", [args.prompt.encode()]),
        tensor("stream", "BOOL", [True]),
        tensor("sampling_parameters", "BYTES", [json.dumps(options).encode()]),
    ]
    if args.stop:
        inputs.append(tensor("stop_words", "BYTES", [word.encode() for word in args.stop]))

    responses: queue.Queue = queue.Queue()
    texts, endings = [""] * args.n, [""] * args.n
    with InferenceServerClient(args.url) as client:
        client.start_stream(lambda result, error: responses.put((result, error)))
        client.async_stream_infer(args.model, inputs)
        final = False
        while not final:
            result, error = responses.get(timeout=600)
            if error is not None:
                print(f"error: {error.message()}", file=sys.stderr)
                return 1
            index = result.as_numpy("sequence_index")  # absent with n = 1
            index = 0 if index is None else int(index[0])
            texts[index] += result.as_numpy("text_output")[0].decode()
            finish, stop = result.as_numpy("finish_reason"), result.as_numpy("stop_reason")
            if finish is not None:
                endings[index] = finish[0].decode() + ("" if stop is None else f" at {stop[0].decode()!r}")
            final = result.get_response().parameters["triton_final_response"].bool_param
    for text, ending in zip(texts, endings, strict=True):
        print(f"{text!r} [{ending}]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
