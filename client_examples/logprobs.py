#!/usr/bin/env python3
"""How sure the model was: each generated token with its probability and what else it might have been.

    python client_examples/logprobs.py --prompt "The capital of France is" --top 3
    python client_examples/logprobs.py --prompt "The capital of France is" --of-prompt

Needs nothing but Python; over gRPC the same values come in the outputs of the same names.
"""

import argparse
import json
import math
import sys
import urllib.error
import urllib.request


def show(positions: list) -> None:
    """One line per token: its text, its probability and rank, and the other candidates."""
    for position in positions:
        if position is None:  # nothing comes before a prompt's first token
            continue
        own, *others = position.values()  # the token itself stands first
        line = f"{own['decoded_token']!r:>16}  {math.exp(own['logprob']):6.1%}  rank {own['rank']}"
        rest = ", ".join(f"{other['decoded_token']!r} {math.exp(other['logprob']):.1%}" for other in others)
        print(f"{line}  {rest}".rstrip())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="localhost:8000", help="HTTP address of the server")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--top", type=int, default=2, help="most likely tokens to show beside each, at most 20")
    parser.add_argument("--of-prompt", action="store_true", help="show the prompt's tokens too")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()

    body = {
        "text_input": args.prompt,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "logprobs": args.top,
        "return_cumulative_logprob": True,
    }
    if args.of_prompt:
        body["prompt_logprobs"] = args.top
    request = urllib.request.Request(f"http://{args.url}/v2/models/{args.model}/generate", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        print(f"error {error.code}: {json.loads(error.read())['error']}", file=sys.stderr)
        return 1
    if args.of_prompt:
        print("prompt:")
        show(json.loads(answer["prompt_logprobs"]))
        print("answer:")
    show(json.loads(answer["logprobs"]))
    print(f"[{answer['num_output_tokens']} tokens, {answer['cumulative_logprob']:.3f} in all]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
