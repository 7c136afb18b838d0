# Everything runs in .venv, which the first target that needs it creates from $(PYTHON) and fills once.
# INNERLOOP_DATA, where set, tells the language-model experiments where The Time Machine lies.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.installed
OUT ?= report
# One process a core and one thread a process: the tests' tensors are too small to share.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

# `make fuzz COUNT=2000 SEED=7`; without a seed one is drawn and printed.
COUNT ?= 20000
FUZZ = OMP_NUM_THREADS=1 $(BIN)/python -m scripts.fuzz --count $(COUNT) $(if $(SEED),--seed $(SEED))

.DEFAULT_GOAL := help
# What a watched library is put through: everything that only kernels can get wrong, and the contract.
SANITIZED = tests/kernels/test_native.py tests/kernels/test_series.py tests/kernels/test_robustness.py tests/rules/test_contract.py

.PHONY: help report reproduce reproduce-check screenshots picture test test-slow check docs bench fuzz scoreboard sanitize wheel-test emulate kill-test mutants mutants-generic clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' $(MAKEFILE_LIST) | expand -t 14

report: $(SETUP)  ## the quick run of every experiment, as $(OUT)/index.html
	$(BIN)/innerloop reproduce --quick --out $(OUT)

reproduce: $(SETUP)  ## the full run of every experiment, as $(OUT)/index.html
	$(BIN)/innerloop reproduce --out $(OUT)

reproduce-check: $(SETUP)  ## the full run, failing when any claim's band is missed
	$(BIN)/innerloop reproduce --check --out $(OUT)

screenshots: $(SETUP)  ## the page as pictures: desktop and phone, light and dark (needs Chromium)
	$(BIN)/python scripts/screenshots.py $(OUT)/index.html $(OUT)/screenshots

picture:  ## take the README's picture from the report
	cp $(OUT)/figures/B1-1.svg docs/images/overwriting.svg

test: $(SETUP)  ## the tests, without the slow ones
	$(PYTEST) -m "not slow"

test-slow: $(SETUP)  ## the slow tests alone
	$(PYTEST) -m slow

kill-test: $(SETUP)  ## kill training runs at bad moments and at random ones, and see that each ends as if it had not
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/training/test_kill.py

check: $(SETUP)  ## style, types, layers and the examples in the documentation
	$(BIN)/ruff check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(PYTEST) --doctest-modules src

docs: $(SETUP)  ## write docs/rules.md from the list of rules
	$(BIN)/innerloop rules --markdown > docs/rules.md

bench: $(SETUP)  ## the kernels against the alternatives (ten minutes), as docs/benchmarks.md and benchmarks/results
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev,bench]"
	mkdir -p benchmarks/results
	$(BIN)/innerloop bench --json benchmarks/results --page docs/benchmarks.md

# Of a row. The documents' ten epochs take 37 hours of one core:
#   make scoreboard BOARD=build/ten_epochs BUDGET="--steps 490 --batch 1024 --rate 3e-4"
# Once it has begun, a second one with other LAYERS may run beside it; the last one without LAYERS writes the whole table.
BUDGET ?= --steps 300 --batch 64 --rate 3e-3
BOARD ?= build/scoreboard

scoreboard: $(SETUP)  ## LAYERS or all, three seeds, on INNERLOOP_DATA, to BOARD (hours of one core; goes on where it stopped)
	@test -n "$(INNERLOOP_DATA)" || { echo "make scoreboard needs INNERLOOP_DATA=FILE, the text of The Time Machine"; exit 2; }
	mkdir -p $(BOARD)
	$(BIN)/innerloop compare $(INNERLOOP_DATA) --out $(BOARD) $(if $(LAYERS),--layers $(LAYERS)) --seeds 3 $(BUDGET) \
		--tokenizer pairs --vocabulary 1027 --hold-out 0.2 --length 32 --width 128 --heads 2 --depth 2 --threads 1 \
		--set feed_forward_width=256 --set tied=false --set dropout=0.3 --train-set stride=1 --train-set part=64 \
		--train-set weight_decay=0.0 --train-set beta2=0.999 --train-set final_rate=1.0 --train-set warmup=0

fuzz: $(SETUP)  ## COUNT random calls (20,000: minutes) against the token loop
	$(FUZZ)

# The library once more, with bounds and arithmetic watched, in a folder of its own.
sanitize: $(SETUP)  ## the tests of the kernels under AddressSanitizer and UBSan
	cmake -S . -B build/sanitize -DINNERLOOP_SANITIZE=ON
	cmake --build build/sanitize -j
	OMP_NUM_THREADS=1 LD_PRELOAD=$$($(CXX) -print-file-name=libasan.so):$$($(CXX) -print-file-name=libubsan.so) \
		ASAN_OPTIONS=detect_leaks=0 INNERLOOP_LIBRARY=$(CURDIR)/build/sanitize/innerloop_cpu.so \
		$(BIN)/python -m pytest -q -m "not slow" $(SANITIZED)

wheel-test: $(SETUP)  ## wheels from a clean clone, with and without a compiler, each tried where only torch is
	$(BIN)/python scripts/wheel_check.py
emulate:  ## TRIALS random calls of the AVX-512 kernels, in an emulated processor (scripts/emulate/README.md)
	scripts/emulate/run.sh build/emulate $(or $(TRIALS),200) $(or $(SEED),1)

mutants: $(SETUP)  ## faults put in by hand, each of which the tests must catch
	$(BIN)/python -m scripts.mutants

mutants-generic: $(SETUP)  ## every small change of the code (an hour or two); docs/mutants.md answers what survives
	$(BIN)/python -m scripts.mutants --generic

$(SETUP): pyproject.toml constraints.txt src/innerloop/_version.py CMakeLists.txt $(wildcard src/innerloop/kernels/cpu/*.*pp src/innerloop/kernels/cpu/*.h)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:  ## remove what the other targets made
	rm -rf $(VENV) $(OUT) build .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	rm -rf .cmake .ninja_deps .ninja_log .skbuild-info.json CMakeCache.txt CMakeFiles CMakeInit.txt build.ninja
	rm -rf cmake_install.cmake src/innerloop/kernels/cpu/innerloop_cpu.so
