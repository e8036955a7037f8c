# Two commands need nothing but Python 3.11+, make and a package index: `make demo` and `make test`.
# The first of them sets up .venv from the pins in requirements/cpu.txt; later ones find it ready.

PYTHON ?= python3
BIN := .venv/bin

# Each process would spend 20 to 40 s compiling imports that nobody keeps.
unexport PYTHONDONTWRITEBYTECODE
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-long test-all test-lowest test-random lint dist release-check bench gpu-proof gpu-wheels docs requirements

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name what; do \
		printf '  make %-14s%s\n' "$$name" "$$what"; done

setup: .venv/.ready  ## make .venv with the pinned packages and this one

# So small a model is fastest on one thread, and many threads stall when another program wants a core.
demo: setup  ## train a small VLM on rendered shapes, on the CPU; ends in runs/demo/report.html
	OMP_NUM_THREADS=1 $(BIN)/mm-grpo train examples/shapes/config.yaml run.dir=runs/demo run.overwrite=true

# Two processes run the tests, for two cores; each needs some 6 GB. tests/helpers/workers.py says what they keep together.
WORKERS ?= 2
PYTEST := -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder --durations=25
test: setup  ## run the tests that take some seconds at most, in about two minutes
	$(BIN)/python $(PYTEST) -m "not slow and not long"

test-long: setup  ## run the others
	$(BIN)/python $(PYTEST) -m "slow or long"

# Each process imports torch and vLLM once, builds the tiny models once and starts one fork server.
test-all: setup  ## run both
	$(BIN)/python $(PYTEST)

# pyproject.toml names the oldest version of each package that serves; nothing else would notice a wrong one. Tests with
# the mark `lowest` use one of these packages the most: pydantic and ruamel.yaml (config), typer and rich
# (cli), datasets, pillow and qwen-vl-utils (data), jinja2 (processors), transformers, torch and numpy (processors,
# rollout, learner, trainer), peft (learner, trained), bitsandbytes (learner), accelerate and deepspeed (distributed),
# safetensors, xxhash and tensorboard (run), httpx and websockets (environments, rollout), and jsonschema, openai and, in
# the examples of docstrings, math-verify and rapidfuzz (rewards). What is our own is the same with every version; vLLM
# and TRL are tested with the pins of requirements/cpu.txt alone.
LOWEST = $(shell grep -rl "pytest.mark.lowest" tests --include='test_*.py')
test-lowest: .venv-lowest/.ready  ## run the tests of our dependencies that are not long with the oldest packages allowed
	.venv-lowest/bin/python $(PYTEST) -m "lowest and not long" $(LOWEST)

# Those of tests/ whose examples hypothesis makes; `make test` takes the same ones each time.
RANDOM_FILES = $(shell grep -lE "^from hypothesis|^import hypothesis" $$(find tests -name 'test_*.py'))
test-random: setup  ## look for new examples that break a property, 2,000 of each, in about ten minutes
	RANDOM_EXAMPLES=1 $(BIN)/python $(PYTEST) $(RANDOM_FILES)

dist: setup  ## build sdist and wheel into dist/ from a copy of the tree; TAG=v0.1.0 has to be their version
	$(BIN)/python .ci/release_check.py build $(TAG)

# What the index gives today may be newer than every pin.
release-check: dist  ## try both on Python 3.11 to 3.13 in empty environments, with today's index and with the pins
	$(BIN)/python .ci/release_check.py check

lint: setup  ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# The figures of the last run stand in benchmarks/README.md, next to what they mean.
bench: export OMP_NUM_THREADS := 2
bench: setup  ## measure against TRL on the CPU, in about twenty minutes; ends in benchmarks/README.md
	$(BIN)/python benchmarks/learner.py --rounds 5 --json benchmarks/results/cpu/learner.json
	$(BIN)/python benchmarks/learner.py --rounds 5 --json benchmarks/results/cpu/learner.json --allocator keep
	$(BIN)/python benchmarks/hybrid.py --json benchmarks/results/cpu/hybrid.json
	$(BIN)/python benchmarks/memory.py --json benchmarks/results/cpu/memory.json
	$(BIN)/python benchmarks/step.py --rounds 5 --warm 1 --json benchmarks/results/cpu/step.json
	$(BIN)/python benchmarks/generation.py --json benchmarks/results/cpu/generation.json
	$(BIN)/python benchmarks/overhead.py --steps 30 --json benchmarks/results/cpu/overhead.json
	$(BIN)/python benchmarks/scaling.py --rounds 5 --json benchmarks/results/cpu/scaling.json
	$(BIN)/python benchmarks/images.py --json benchmarks/results/cpu/images.json
	$(BIN)/python benchmarks/images.py --frames 32 --prompts 16 --max-pixels 50176 --json benchmarks/results/cpu/clips.json
	$(BIN)/python benchmarks/videos.py --json benchmarks/results/cpu/videos.json
	$(BIN)/python benchmarks/packs.py --json benchmarks/results/cpu/packs.json
	$(BIN)/python benchmarks/spread.py --json benchmarks/results/cpu/spread.json
	$(BIN)/python benchmarks/turns.py --json benchmarks/results/cpu/turns.json
	$(BIN)/python benchmarks/readme.py

# A GPU machine has its own torch, which the pins of requirements/cpu.txt would replace: PYTHON runs with what it has,
# and with the wheels of WHEELS. PART=1 to 3 is ten minutes of it.
FOLDER ?= benchmarks/results/gpu
gpu-proof: export PYTHONPATH := $(CURDIR)$(if $(WHEELS),:$(abspath $(WHEELS))/site)$(if $(PYTHONPATH),:$(PYTHONPATH))
gpu-proof: $(if $(DRY),setup)  ## measure on a GPU with the packages of PYTHON, in 40 minutes; DRY=1 tries it on a CPU
ifdef DRY
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/gpu_proof.py --dry $(if $(PART),--part $(PART))
else
	$(if $(WHEELS),$(PYTHON) -m pip install -q --no-index --no-deps --upgrade --target $(WHEELS)/site $(WHEELS)/*.whl)
	$(PYTHON) benchmarks/gpu_proof.py --folder $(FOLDER) $(if $(PART),--part $(PART)); status=$$?; \
	$(PYTHON) benchmarks/readme.py benchmarks/results/cpu $(FOLDER) && exit $$status
endif

gpu-wheels:  ## download what gpu-proof needs on a GPU machine without an index (VLLM=0.25.1: with vLLM)
	$(PYTHON) benchmarks/gpu_wheels.py $(or $(WHEELS),build/gpu-wheels) $(if $(VLLM),--vllm $(VLLM))

# The reference is read out of the source without importing it, so none of our own dependencies are installed.
docs: .venv-docs/.ready  ## build the site of docs/ in build/docs, links checked
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	@echo "open build/docs/index.html"

EXTRAS := $(addprefix --extra ,qlora math text json judge openenv tensorboard)
CUDA := $(EXTRAS) $(addprefix --extra ,vllm flash-linear-attention ray)
requirements: setup  ## compile the .txt of requirements/ from their .in and from pyproject.toml
	$(BIN)/uv pip compile --python-version 3.11 --no-emit-index-url \
		--override requirements/overrides.txt requirements/cpu.in -o requirements/cpu.txt
	rm -f requirements/lowest.txt  # its pins would be kept where they still fit
	$(BIN)/uv pip compile --python-version 3.11 --no-emit-index-url --resolution lowest-direct \
		$(EXTRAS) --extra dev --constraint requirements/lowest.in pyproject.toml -o requirements/lowest.txt
	for set in cuda-vllm-0.25 cuda-vllm-0.33; do \
		$(BIN)/uv pip compile --python-version 3.11 --python-platform linux --no-emit-index-url --no-annotate \
			$(CUDA) --constraint requirements/$$set.in pyproject.toml -o requirements/$$set.txt || exit; done
	$(BIN)/uv pip compile --python-version 3.11 --no-emit-index-url requirements/docs.in -o requirements/docs.txt

# $(call install,PINS): makes the environment of the target's folder from the pins.
#
# uv does not read pip's settings, so an index that only pip knows of is handed on to it. `uv pip sync`
# takes the pins as they stand, without resolving, and removes what is not among them: this package
# too, which is therefore installed after it.
define install
	@index="$${UV_DEFAULT_INDEX:-$${UV_INDEX_URL:-$${PIP_INDEX_URL:-$$($(BIN)/pip config get global.index-url 2>/dev/null)}}}"; \
	if [ -n "$$index" ]; then export UV_DEFAULT_INDEX="$$index"; fi; \
	set -ex; \
	$(BIN)/uv pip sync --python $(@D)/bin/python --compile-bytecode $(1); \
	$(BIN)/uv pip install --python $(@D)/bin/python --no-deps --no-build-isolation -e .
	@touch $@
endef

.venv/.ready: requirements/cpu.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"mm_grpo needs Python 3.11 or newer, and $(PYTHON) is %s; name another with: make PYTHON=python3.11" \
		% sys.version.split()[0])'
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^uv==' requirements/cpu.txt)"
	$(call install,requirements/cpu.txt)

.venv-lowest/.ready: requirements/lowest.txt pyproject.toml | setup
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-lowest
	$(call install,requirements/lowest.txt)

.venv-docs/.ready: requirements/docs.txt
	$(PYTHON) -m venv --clear .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/docs.txt
	@touch $@
