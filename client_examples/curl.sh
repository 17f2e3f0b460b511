#!/usr/bin/env bash
# Ask over HTTP with curl: one JSON answer, then the same answer as a stream of server-sent events.
#
#   bash client_examples/curl.sh [host:port] [model]
set -euo pipefail
url=${1:-localhost:8000}
model=${2:-smollm2}
question='[{"role": "user", "content": "What is the capital of France?"}]'

# "messages" is a string tensor that holds JSON, hence the quoting; jq would do it too.
body() {
  printf '{"messages": "%s", "max_tokens": 32, "temperature": 0, "stream": %s}' "${question//\"/\\\"}" "$1"
}

echo "POST /v2/models/$model/generate"
curl -sS --fail-with-body "http://$url/v2/models/$model/generate" -d "$(body false)"
echo
echo "POST /v2/models/$model/generate_stream"
curl -sS --fail-with-body -N "http://$url/v2/models/$model/generate_stream" -d "$(body true)"
