#!/usr/bin/env python3
"""Ask over HTTP with the Python standard library: one JSON answer, or with --stream one event per piece of text.

python client_examples/http_generate.py --chat "What is the capital of France?"
python client_examples/http_generate.py --prompt "Once upon a time" --stream
"""

import argparse
import json
import sys
import urllib.error
import urllib.request


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="localhost:8000", help="HTTP address of the server")
    parser.add_argument("--model", default="smollm2")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="text to continue")
    prompt.add_argument("--chat", help="a question; the model's chat template is applied")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--stream", action="store_true")
    args = parser.parse_args()

    request_body: dict = {"stream": args.stream, "max_tokens": args.max_tokens, "temperature": args.temperature}
    if args.chat is not None:
        request_body["messages"] = json.dumps([{"role": "user", "content": args.chat}])
    else:
        request_body["text_input"] = args.prompt
    endpoint = "generate_stream" if args.stream else "generate"
    request = urllib.request.Request(
        f"http://{args.url}/v2/models/{args.model}/{endpoint}",
        data=json.dumps(request_body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            if not args.stream:
                print(json.load(response)["text_output"])
                return 0
            for line in response:  # server-sent events: "data: {json}", then an empty line
                if line.startswith(b"data:"):
                    event = json.loads(line.removeprefix(b"data:"))
                    if "error" in event:
                        print(f"error: {event['error']}", file=sys.stderr)
                        return 1
                    print(event["text_output"], end="", flush=True)
    except urllib.error.HTTPError as error:
        body = json.loads(error.read().removeprefix(b"data:"))  # a refused stream answers with an event
        print(f"error {error.code}: {body['error']}", file=sys.stderr)
        return 1
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
