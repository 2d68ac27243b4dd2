# Everything a person or CI needs, in a virtual environment of its own (.venv).
#
#   make demo    train with two workers, then alone         make bench   compare with others
#   make test    run the tests                              make fmt     format the code
#   make check   lint, types, layers, prose                 make docs    build site/, strictly
#   make chaos   break jobs in every way (as root, long)    make clean   remove what was built
#   make cluster-test  run jobs on test hosts with ssh, Slurm and Ray (as root; prints what it skips)
#                      make .venv-ray/bin/ray installs Ray for them, and make .venv-schemas/bin/kubernetes-validate
#                      the schemas of Kubernetes (160 MB), each in an environment of its own
#   make device-test  build the test device testing/laggard (minutes the first time), run its tests and tests/device
#   make frameworks-test  install TensorFlow, Keras, JAX, Lightning, Transformers (3 GB) and test them
#   make simulate  break simulated jobs, many of them (SEEDS=10000, minutes)
#   make fuzz    give changed bytes to every decoder (SECONDS=10 for each; ARGS="--runs 10000000 frame_fuzz")
#   make wheel   build dist/*.whl, install it in an empty environment, run a job (ARGS=--matrix: each Python)
#
# The first call sets up .venv and builds the core (minutes); later calls start in seconds. Each verb
# is one line that also works by hand. ARGS is passed on: make test ARGS="-k launcher".

SHELL := /bin/sh
VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
CORE  := pyproject.toml CMakeLists.txt constraints.txt $(shell find cpp -type f 2>/dev/null)

.PHONY: demo test cluster-test device-test frameworks-test check docs chaos simulate fuzz fmt bench wheel clean
.DEFAULT_GOAL := demo

demo: $(STAMP)
	$(BIN)/python examples/demo/compare.py $(ARGS)

test: $(STAMP)
	$(BIN)/python tests/run.py $(ARGS)

# Hosts are namespaces on this machine (tests/support/cluster). `make test` runs those without the marker `cluster`.
cluster-test: $(STAMP)
	$(BIN)/python -m pytest -rs tests/cluster $(ARGS)

# A device for tests, a package of its own (testing/laggard/README.md). Only what changed is compiled again.
# `make test` runs tests/device on fewer schedules.
DEVICE := testing/laggard
# tests/equivalence/not_on_device.txt says which of its tests do not run there.
device-test: $(STAMP)
	$(BIN)/python $(DEVICE)/build.py
	PYTHONPATH=$(abspath $(DEVICE)) $(BIN)/python -m pytest -p laggard.pytest_plugin $(DEVICE) $(ARGS)
	PYTHONPATH=$(abspath $(DEVICE)) $(BIN)/python -m pytest -p laggard.pytest_plugin -rs tests/device $(ARGS)
	TEST_ON_DEVICE=lazy $(BIN)/python -m pytest -q -rs -m "not slow" -o timeout=900 tests/equivalence

# In an environment of its own: they are large, and nothing else needs them.
.venv-schemas/bin/kubernetes-validate: | $(STAMP)
	$(BIN)/python -m venv .venv-schemas
	.venv-schemas/bin/python -m pip install --quiet --disable-pip-version-check kubernetes-validate==1.37.0 kubeflow-trainer-api==2.3.0

# Ray is large and no dependency: an environment of its own, which sees the packages of .venv, too.
.venv-ray/bin/ray: | $(STAMP)
	$(BIN)/python -m venv .venv-ray
	.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check 'ray[default,data]==2.60.*'
	$(BIN)/python -c 'import pathlib, site; [p] = pathlib.Path(".venv-ray/lib").glob("python*/site-packages"); (p / "checkout.pth").write_text(f"import site; site.addsitedir({site.getsitepackages()[0]!r})\n")'

# The frameworks need 3 GB. Their environment sees the packages of .venv, so that torch is not installed twice. The
# tests themselves run in .venv, and start their jobs there.
FRAMEWORKS := .venv-frameworks/.installed
$(FRAMEWORKS): bench/framework_runs/requirements.txt | $(STAMP)
	[ -x .venv-frameworks/bin/python ] || $(BIN)/python -m venv .venv-frameworks
	$(BIN)/python -c 'import pathlib, site; [p] = pathlib.Path(".venv-frameworks/lib").glob("python*/site-packages"); (p / "checkout.pth").write_text(f"import site; site.addsitedir({site.getsitepackages()[0]!r})\n")'
	.venv-frameworks/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r bench/framework_runs/requirements.txt
	@touch $@

# MXNet needs an old numpy: an environment of its own, for its recipe.
MXNET := .venv-mxnet/.installed
$(MXNET): | $(STAMP)
	[ -x .venv-mxnet/bin/python ] || $(BIN)/python -m venv .venv-mxnet
	$(BIN)/python -c 'import pathlib, site; [p] = pathlib.Path(".venv-mxnet/lib").glob("python*/site-packages"); (p / "checkout.pth").write_text(f"import site; site.addsitedir({site.getsitepackages()[0]!r})\n")'
	.venv-mxnet/bin/python -m pip install --quiet --disable-pip-version-check --no-deps mxnet==1.9.1 numpy==1.23.5
	@touch $@

frameworks-test: $(FRAMEWORKS) $(MXNET)
	$(BIN)/python -m pytest -rs tests/frameworks $(ARGS)

CPP  := $(shell find cpp testing src/paceline/jax -name '*.cc' -o -name '*.h')
# What the core is compiled with, for clang-tidy; the bindings need nanobind's headers and are left out.
TIDY := -std=c++20 -Icpp $(if $(filter x86_64,$(shell uname -m)),-mavx2 -mf16c -mpopcnt -msse4.2)

check: $(STAMP)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports
	$(BIN)/stubtest paceline._core --allowlist tests/stubtest_allowlist.txt --ignore-disjoint-bases
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	find cpp/paceline -name '*.cc' | xargs -P 2 -n 4 sh -c '$(BIN)/clang-tidy --quiet "$$@" -- $(TIDY)' sh
	$(BIN)/codespell README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md docs src cpp bench examples testing

# Writes docs/failures.md. ARGS="--rows 1 3" runs some rows, ARGS=--quick leaves out the long tests.
chaos: $(STAMP)
	$(BIN)/python tests/fault/stories/table.py $(ARGS)

SEEDS ?= 10000
simulate: $(STAMP)
	cd tests && ../$(BIN)/python -m simulation --seeds $(SEEDS) $(ARGS)

# Installs atheris, if there is one for this Python; clang comes from the system. Without them: a replay.
SECONDS ?= 10
fuzz: $(STAMP)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check 'atheris>=3.0' || true
	cd tests && ../$(BIN)/python -m fuzz --seconds $(SECONDS) $(ARGS)

fmt: $(STAMP)
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format . ; $(BIN)/clang-format -i $(CPP)

bench: $(STAMP)
	$(BIN)/python bench/allreduce.py $(ARGS)

# Open site/index.html; to search, serve it: python -m http.server -d site. Nothing is fetched.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet $(ARGS)

# No compiler is used after the build: the wheel is repaired by auditwheel and tried where only it is installed.
wheel: $(STAMP)
	$(BIN)/python tests/wheel.py --python $(BIN)/python $(ARGS)

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache

# --- set-up ---------------------------------------------------------------------------------------

# The plain python3 when it fits, else whichever versioned one is there.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10; do \
	"$$p" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	&& echo "$$p" && break; done)

# A trial beats a version number: the compiler must really build C++20 here.
TRIAL := "\#include <span>\n\#if !defined(__clang__) && __GNUC__ < 11\n\#error\n\#endif\nint main() {}\n"
SUITABLE_CXX = $(shell for c in $$CXX c++ g++ clang++ g++-14 g++-13 g++-12 g++-11; do \
	printf $(TRIAL) | "$$c" -std=c++20 -x c++ - -o /dev/null 2>/dev/null && echo "$$c" && break; done)

refuse = { echo "make: $(1)" >&2; exit 1; }

$(STAMP): $(CORE)
	@[ -n "$(PYTHON)" ] || $(call refuse,no Python 3.10 to 3.13 found: install one (Debian: apt install python3 python3-venv python3-dev))
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || $(call refuse,$(PYTHON) cannot make environments: install its venv package (Debian: apt install python3-venv))
	@"$(PYTHON)" -c 'import os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' 2>/dev/null || $(call refuse,$(PYTHON) has no headers: install them (Debian: apt install python3-dev))
	@[ -n "$(SUITABLE_CXX)" ] || $(call refuse,no C++20 compiler found: install g++ 11 or newer (Debian: apt install g++) or clang)
	@[ -x $(BIN)/python ] || { echo "make: setting up $(VENV) (minutes the first time)"; "$(PYTHON)" -m venv $(VENV); }
	CXX="$(SUITABLE_CXX)" $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,demo]'
	@touch $@
