# Every target sets itself up: in the active virtual environment, else in .venv.
PYTHON ?= python3
VENV ?= $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV),.venv)
BIN := $(abspath $(VENV))/bin
# cython-lint starts pycodestyle by its bare name.
export PATH := $(BIN):$(PATH)
SOURCES := $(wildcard moecache/*.pyx moecache/*.pxd moecache/*/*.pyx moecache/*/*.pxd)
STUBBED := $(subst /,.,$(basename $(wildcard moecache/*.pyi moecache/*/*.pyi)))
PROJECT := pyproject.toml setup.py constraints.txt
# More extras to install, such as EXTRAS=transformers; CI does.
EXTRAS ?=
comma := ,
# Part of the stamps' names: other extras are another installation.
stamp = $(VENV)/.moecache-$1$(if $(EXTRAS),-$(subst $(comma),-,$(EXTRAS)))
install = PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet --editable

.PHONY: demo build prepare test check dist docs debug sanitize bench bench-small gpu notebooks clean

demo: build ## generate text with the tiny model, a quarter of its experts in memory
	$(BIN)/moecache demo

build: $(call stamp,base)

prepare: $(call stamp,dev) ## install all that the other targets need

# Two processes; in each a BLAS of one thread, as threads spin while they wait for a core. What one
# process compiles, the others and their children load.
test: $(call stamp,test) ## run all tests
	OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= \
		$(BIN)/python -m pytest -q -n 2

check: $(call stamp,dev) ## lint, types, stubs, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/cython-lint $(SOURCES)
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest --mypy-config-file pyproject.toml $(STUBBED)
	$(BIN)/codespell

bench: $(call stamp,test) ## compare with other caches, in one run
	$(BIN)/python -m pytest bench

bench-small: $(call stamp,test) ## run each benchmark once, small
	$(BIN)/python -m pytest bench --bench-size=small -q

# Nothing is installed: where there is a GPU, there may be no network.
gpu: ## build, tests, benchmarks and sanitizer on a GPU; ARGS=--quick in about 10 minutes
	bench/gpu.sh --python $(PYTHON) $(ARGS)

docs: ## the documentation as a site, in build/site
	$(MAKE) build EXTRAS=$(if $(findstring docs,$(EXTRAS)),$(EXTRAS),docs)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

notebooks: ## execute the notebooks in place; nothing of this machine stays in them
	$(MAKE) build EXTRAS=study,notebooks
	$(BIN)/python -m notebooks.execute

# The wheel is built from the source distribution, and runs in an environment with nothing else.
dist: $(call stamp,dev) ## source distribution and wheel, in dist; the wheel installed and tried
	rm -rf dist build/installed
	$(BIN)/python -m build --outdir dist
	$(PYTHON) -m venv build/installed
	PIP_CONSTRAINT=constraints.txt build/installed/bin/pip install --quiet dist/*.whl
	cd build && installed/bin/moecache demo --max-new-tokens 32 --memory 2MiB
	cd build && installed/bin/python -c "from moecache.study import example_trace as e; print(e())"

# A copy of the package beside the release build, for the tests of the compiled core.
# Whole traces, the pre-fault's pure functions and how processes start take minutes there and touch
# no memory that the others do not. Nor do most of the examples of hypothesis, which the release
# build runs all.
CORE_TESTS = $(filter-out tests/test_echo_traces.py tests/test_prefault_gate.py \
	tests/test_kernels_startup.py, $(wildcard tests/test_policy*.py \
	tests/test_slru*.py tests/test_profiler.py tests/test_cache*.py tests/test_echo*.py \
	tests/test_prefault*.py tests/test_reader*.py tests/test_route_log.py tests/test_replay.py \
	tests/test_replay_policies.py tests/test_foresight.py tests/test_engines.py \
	tests/test_interrupts.py tests/test_kernels*.py))
# The first line fails if another build than the one just made would be tested.
CHECK_BUILD = PYTHONPATH=build/$@ $(BIN)/python -c "import moecache.cache._cache as c; assert 'build/$@' in c.__file__, c"
RUN_CORE_TESTS = $(BIN)/python -m pytest -q -o pythonpath="build/$@ ." $(CORE_TESTS)

debug: $(call stamp,dev) ## the compiled core unoptimised, with C assertions and symbols
	MOECACHE_BUILD=debug $(BIN)/python setup.py -q build --build-base build/$@-objects --build-lib build/$@
	$(CHECK_BUILD)
	$(RUN_CORE_TESTS)

sanitize: $(call stamp,dev) ## the compiled core under ASan and UBSan
	MOECACHE_BUILD=sanitize $(BIN)/python setup.py -q build --build-base build/$@-objects --build-lib build/$@
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
		PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 $(RUN_CORE_TESTS) --hypothesis-profile=brief

clean:
	rm -rf build dist *.egg-info moecache/*.c moecache/*/*.c moecache/*.so moecache/*/*.so .venv .pytest_cache .mypy_cache .ruff_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(call stamp,base): $(BIN)/python $(SOURCES) $(PROJECT)
	$(install) '.$(if $(EXTRAS),[$(EXTRAS)])'
	touch $@

$(call stamp,test): $(BIN)/python $(SOURCES) $(PROJECT)
	$(install) '.[test$(if $(EXTRAS),$(comma)$(EXTRAS))]'
	touch $@ $(call stamp,base)

$(call stamp,dev): $(BIN)/python $(SOURCES) $(PROJECT)
	$(install) '.[dev,test$(if $(EXTRAS),$(comma)$(EXTRAS))]'
	touch $@ $(call stamp,test) $(call stamp,base)
