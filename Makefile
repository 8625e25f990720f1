.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= python3
PYTEST_FLAGS ?=
# Tests wait for a third of their time: on two cores, three at once.
WORKERS ?= 3
# To collect all others only to leave them out takes ten seconds.
ALONE := $(shell grep -rl --include='test_*.py' 'mark\.alone' tests)
# With AGAIN=1, tests that fail are tried once more, without neighbours, and named in SECOND_TRIES.
AGAIN ?=
SECOND_TRIES := .pytest_cache/second-tries
LAST_FAILED := --last-failed --last-failed-no-failures none
# Status 1 says that all have run, and that pytest remembers which have failed. With any other (a crash, a test that
# cannot be imported) it is not known which have not run: then nothing is forgiven.
tested = $(BIN)/pytest $(1) $(PYTEST_FLAGS) || { test $$? = 1 && test -n "$(AGAIN)" && $(note_failed) && $(BIN)/pytest $(LAST_FAILED) $(PYTEST_FLAGS); }
note_failed = $(BIN)/python -c 'import json; print(*json.load(open(".pytest_cache/v/cache/lastfailed")), sep="\n")' >> $(SECOND_TRIES)

BIN := .venv/bin
STAMP := .venv/.stamp
# One place says which uv: the lock file.
UV_VERSION := $(shell sed -n '/^name = "uv"$$/{n;s/^version = "\(.*\)"/\1/p;}' uv.lock)
UV := env -u VIRTUAL_ENV UV_PROJECT_ENVIRONMENT=.venv $(BIN)/uv
export PIP_ROOT_USER_ACTION := ignore
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help
help: ## List the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS=$$'\t' read -r name text; do printf '%-12s %s\n' "$$name" "$$text"; done

.PHONY: setup
setup: $(STAMP) ## Create .venv with everything that is needed (Python 3.11 or newer is all that must be there)

$(STAMP): pyproject.toml uv.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Cloche needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@test "$$($(BIN)/uv --version 2>/dev/null | cut -d' ' -f2)" = "$(UV_VERSION)" || { \
		if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then \
			$(PYTHON) -m venv --clear .venv && $(BIN)/python -m pip install --quiet uv==$(UV_VERSION); \
		elif $(PYTHON) -m pip --version >/dev/null 2>&1; then \
			$(PYTHON) -m venv --clear --without-pip .venv && $(PYTHON) -m pip --python $(BIN)/python install --quiet uv==$(UV_VERSION); \
		else \
			echo "$(PYTHON) has neither ensurepip nor pip. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; \
		fi; }
	@$(UV) sync --locked --quiet
	@touch $@

.PHONY: serve
serve: setup ## Serve sandboxes on http://127.0.0.1:8000; others with SERVE_FLAGS="--port 9000"
	@exec $(BIN)/cloche serve $(SERVE_FLAGS)

.PHONY: check
check: setup ## Lint, check formatting, types, the direction of imports, the prose and generated code
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/tree_metrics.py --prose-limit 5
	$(BIN)/python tools/generate_blocking.py --check

.PHONY: generate
generate: setup ## Generate the blocking library from the awaiting one
	$(BIN)/python tools/generate_blocking.py

.PHONY: format
format: setup ## Format the code and fix what can be fixed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

.PHONY: test
test: setup agents-env ## Run all tests but those that take long (the first run builds the built-in template)
	$(call tested,-n $(WORKERS) --dist worksteal -m "not alone and not long")
	$(call tested,-m "alone and not long" $(ALONE))

# The OpenAI Agents SDK pins older clients of E2B than the tests' own: 75 MB.
.PHONY: agents-env
agents-env: .venv-agents/.stamp

.venv-agents/.stamp: tests/agents_sdk/requirements.txt | $(STAMP)
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-agents
	@$(BIN)/uv pip install --quiet --python .venv-agents/bin/python -r tests/agents_sdk/requirements.txt
	@touch $@

.PHONY: test-all
test-all: test test-long ## Run those tests too that take long: faults, fuzzing, hostile programs with patience

.PHONY: test-long
test-long: setup litellm-env jupyter-env open-terminal-env
	$(call tested,-n $(WORKERS) --dist worksteal -m "long and not alone")
	$(call tested,-m "long and alone" $(ALONE))

.PHONY: test-again
test-again: setup ## Try what failed last, without neighbours
	$(BIN)/pytest $(LAST_FAILED) $(PYTEST_FLAGS)

# No package of a distribution is as new. The version is the newest that Go's module proxy had.
RUNSC_VERSION := v0.0.0-20260905035102-160fafc42237
RUNSC_HOME := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/cloche-tests/gvisor

.PHONY: runsc
runsc: $(RUNSC_HOME)/runsc-$(RUNSC_VERSION) ## Build gVisor's runsc for the tests of the backend gvisor; needs Go

$(RUNSC_HOME)/runsc-$(RUNSC_VERSION):
	@mkdir -p $(RUNSC_HOME)
	GOBIN=$(RUNSC_HOME) CGO_ENABLED=0 GOFLAGS="-buildvcs=false -trimpath" go install -ldflags "-s -w -X gvisor.dev/gvisor/runsc/version.version=$(RUNSC_VERSION)" gvisor.dev/gvisor/runsc@$(RUNSC_VERSION)
	@touch $@

.PHONY: test-clients
test-clients: setup ## Try LibreChat's client in older releases too: 3.6.15, 3.1.77 and 2.4.85 (npm fetches 500 MB, once)
	OLD_CLIENTS=1 $(BIN)/pytest tests/librechat/test_clients.py $(PYTEST_FLAGS)

# How long the mixed load goes on, and how many sandboxes are made and killed before it.
SOAK_MINUTES ?= 20
SOAK_CYCLES ?= 2000

.PHONY: soak
soak: setup ## A mixed load with faults for SOAK_MINUTES=20, which fails on anything left over or lost; SOAK_FLAGS="--seed 1"
	SOAK_CYCLES=$(SOAK_CYCLES) SOAK_ALIVE=200 $(BIN)/pytest tests/endurance/test_leaks.py $(PYTEST_FLAGS)
	PYTHONPATH=tools $(BIN)/python -m soak --minutes $(SOAK_MINUTES) $(SOAK_FLAGS)

.PHONY: fuzz
fuzz: setup .venv-fuzz/.stamp ## Try the decoders and the API by chance, for minutes: FUZZ_EXAMPLES=2000, E2B_REPO=, OPENSANDBOX_REPO= checkouts
	FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(BIN)/pytest -n $(WORKERS) tests/fuzz $(PYTEST_FLAGS)
	PYTHONPATH=tools $(BIN)/python tools/schema_fuzz.py $(if $(E2B_REPO),--e2b-repo "$(E2B_REPO)") $(if $(OPENSANDBOX_REPO),--opensandbox-repo "$(OPENSANDBOX_REPO)")

FUZZ_EXAMPLES ?= 2000

.venv-fuzz/.stamp: tests/fuzz/requirements.txt | $(STAMP)
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-fuzz
	@$(BIN)/uv pip install --quiet --python .venv-fuzz/bin/python -r tests/fuzz/requirements.txt
	@touch $@

.PHONY: e2b-suite
e2b-suite: setup ## Run E2B's own suites: CI_REPO=checkout of code-interpreter, E2B_REPO=checkout of E2B
	@test -n "$(CI_REPO)" -a -n "$(E2B_REPO)" || { echo "make e2b-suite CI_REPO=path/to/code-interpreter E2B_REPO=path/to/E2B" >&2; exit 1; }
	$(BIN)/python tools/e2b_suite.py --ci-repo "$(CI_REPO)" --e2b-repo "$(E2B_REPO)" $(if $(SUITES),--suites $(SUITES)) $(if $(MATCH),--match "$(MATCH)")

.PHONY: e2b-network
e2b-network: setup ## Run E2B's own tests of a sandbox's network, as root, in a little internet: E2B_REPO=checkout of E2B
	@test -n "$(E2B_REPO)" || { echo "make e2b-network E2B_REPO=path/to/E2B" >&2; exit 1; }
	$(BIN)/python tools/e2b_suite.py --e2b-repo "$(E2B_REPO)" --suites S3 S4 --prepare
	$(BIN)/python tools/e2b_world.py --port 8140 $(BIN)/python tools/e2b_suite.py --e2b-repo "$(E2B_REPO)" --suites S3 S4 --port 8140 --files network internet_access internetAccess host
	$(BIN)/python tools/e2b_world.py --port 8140 $(BIN)/python tools/e2b_suite.py --e2b-repo "$(E2B_REPO)" --suites S3 S4 --port 8140 --files test_create lifecycle sandbox/snapshot --match http

.PHONY: opensandbox-suite
opensandbox-suite: setup ## Run OpenSandbox's own end-to-end tests, as root, in a little internet: OPENSANDBOX_REPO=checkout of OpenSandbox
	@test -n "$(OPENSANDBOX_REPO)" || { echo "make opensandbox-suite OPENSANDBOX_REPO=path/to/OpenSandbox" >&2; exit 1; }
	$(BIN)/python tools/opensandbox_suite.py --repo "$(OPENSANDBOX_REPO)" $(if $(SUITES),--suites $(SUITES)) --prepare
	$(BIN)/python tools/e2b_world.py --port 8142 $(BIN)/python tools/opensandbox_suite.py --repo "$(OPENSANDBOX_REPO)" --port 8142 $(if $(SUITES),--suites $(SUITES)) $(if $(MATCH),--match "$(MATCH)")

.PHONY: litellm-test
litellm-test: setup litellm-env ## Try LiteLLM with Cloche: as a client, an upstream, a proxy in front, an interceptor
	$(BIN)/pytest tests/openai/test_litellm.py $(PYTEST_FLAGS)

# LiteLLM pins what Cloche's environment does not have: 0.6 GB.
.PHONY: litellm-env
litellm-env: .venv-litellm/.stamp

.venv-litellm/.stamp: tests/litellm/requirements.txt tests/litellm/overrides.txt | $(STAMP)
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-litellm
	@$(BIN)/uv pip install --quiet --python .venv-litellm/bin/python --override tests/litellm/overrides.txt -r tests/litellm/requirements.txt
	@touch $@

.PHONY: jupyter-test
jupyter-test: setup jupyter-env ## Try JupyterLab, papermill, jupyter_kernel_test and AutoGen's suites with Cloche's kernels
	$(BIN)/pytest tests/jupyter/test_programs.py $(PYTEST_FLAGS)

.PHONY: jupyter-env
jupyter-env: .venv-jupyter/.stamp

# AutoGen's tests are in the source distribution only.
.venv-jupyter/.stamp: tests/jupyter/requirements.txt | $(STAMP)
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-jupyter
	@$(BIN)/uv pip install --quiet --python .venv-jupyter/bin/python -r tests/jupyter/requirements.txt
	@.venv-jupyter/bin/python -m pip download --quiet --no-deps --no-binary :all: --no-build-isolation --dest .venv-jupyter/sdist autogen-ext==0.7.5
	@tar -xzf .venv-jupyter/sdist/autogen_ext-0.7.5.tar.gz -C .venv-jupyter/sdist
	@touch $@

.PHONY: open-terminal-env
open-terminal-env: .venv-open-terminal/.stamp

.venv-open-terminal/.stamp: tests/open_terminal/requirements.txt | $(STAMP)
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-open-terminal
	@$(BIN)/uv pip install --quiet --python .venv-open-terminal/bin/python -r tests/open_terminal/requirements.txt
	@touch $@

.PHONY: openai-suite
openai-suite: setup ## Run public suites of OpenAI's API: checkouts as OPENRESPONSES_REPO=, OPENAI_REPO=, LITELLM_REPO=
	@test -n "$(OPENRESPONSES_REPO)$(OPENAI_REPO)$(LITELLM_REPO)" || { echo "make openai-suite [OPENRESPONSES_REPO=path/to/openresponses] [OPENAI_REPO=path/to/openai-python] [LITELLM_REPO=path/to/litellm]" >&2; exit 1; }
	$(BIN)/python tools/openai_suites.py $(if $(OPENRESPONSES_REPO),--openresponses-repo "$(OPENRESPONSES_REPO)") $(if $(OPENAI_REPO),--openai-repo "$(OPENAI_REPO)") $(if $(LITELLM_REPO),--litellm-repo "$(LITELLM_REPO)")

.PHONY: screenshots
screenshots: setup ## Take pictures of the console's pages into docs/images, light and dark: [ONLY="playground network"]
	$(BIN)/python tools/console_screenshots.py $(if $(ONLY),--only $(ONLY))

.PHONY: bench
bench: setup .venv-peers/.stamp ## Measure against the peers that need no Docker, in one run: [CI_REPO=checkout of code-interpreter] [BENCH_FLAGS=--quick]
	@mkdir -p .bench
	$(BIN)/cloche bench $(BENCH_FLAGS) --json .bench/library.json
	PYTHONPATH=tools $(BIN)/python -m bench $(BENCH_FLAGS) --peers .venv-peers/bin/python $(if $(CI_REPO),--checkout "$(CI_REPO)") --json .bench/http.json --plot .bench/peers.svg

.venv-peers/.stamp: tools/bench/peers.txt | $(STAMP)
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-peers
	@$(BIN)/uv pip install --quiet --python .venv-peers/bin/python -r tools/bench/peers.txt
	@touch $@

.PHONY: clean
clean: ## Remove what the other targets made
	rm -rf .venv .venv-litellm .venv-jupyter .venv-open-terminal .venv-agents .venv-fuzz .data dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
