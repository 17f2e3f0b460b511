# What a user or developer of mstar runs. `make help` lists it.
PYTHON ?= python3
VENV := .venv/bin
GPU_PYTHON ?= $(PYTHON)
GPU_TESTS = $(shell grep -rl --include='*.py' 'mark\.gpu' tests | sed 's|/conftest.py$$||' | sort -u)
PORTS ?= --http-port 8000 --grpc-port 8001 --metrics-port 8002

.PHONY: help demo serve test test-gpu check format bench perf clean python env test-env

help: ## This list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 10

demo: env ## Install, start a server, ask it one question over gRPC and HTTP, stop it
	@$(VENV)/python build/demo.py

serve: env ## Start a server on ports 8000 (HTTP), 8001 (gRPC), 8002 (metrics); Ctrl-C drains and stops it
	@exec $(VENV)/python build/foreground.py $(VENV)/mstar serve $(PORTS) $(SERVE_FLAGS)

test: test-env ## All tests, real servers included, by two workers (PYTEST_FLAGS=-n0: in one process)
	@$(VENV)/python -m pytest -n 2 $(PYTEST_FLAGS)

test-gpu: ## Tests that need an NVIDIA GPU, by eight workers, under GPU_PYTHON: a Python (python3) whose torch has CUDA
	@$(GPU_PYTHON) -m pytest -m gpu -n 8 --dist worksteal $(GPU_TESTS) $(PYTEST_FLAGS)

check: test-env ## Lint and types
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy
	$(VENV)/yamllint --strict -d '{extends: default, rules: {line-length: {max: 120}}}' docker-compose.yml
	$(VENV)/shellcheck .ci/run client_examples/*.sh
	$(VENV)/hadolint build/Dockerfile

format: test-env ## Fix what the linter can, and the format
	$(VENV)/ruff check --fix .
	$(VENV)/ruff format .

bench: env ## Speed of the engine alone, on the demo model
	@$(VENV)/mstar bench offline --model smollm2-135m $(BENCH_FLAGS)

perf: env ## NVIDIA's perf_analyzer against a server, at concurrency 1, 8 and 32
	@$(VENV)/python build/perf.py $(PERF_FLAGS)

clean: ## Remove the environment and everything fetched
	rm -rf .venv .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info

python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "Missing: $(PYTHON) (3.11 to 3.13). Install with:"; \
	  echo "  sudo apt-get install -y python3 python3-venv libpython3-dev make curl"; exit 1; }

env: python
	@$(PYTHON) build/setup_env.py

test-env: python
	@$(PYTHON) build/setup_env.py --extras test
