# Everything happens in .venv; whichever target needs it first makes it (scripts/setup.sh).
# On Linux, MLX_BACKEND=cuda12 or cuda13 takes the place of cpu: make setup MLX_BACKEND=cuda13

.PHONY: help setup setup-run run demo test test-all lint format check-mac
.NOTPARALLEL:

help:
	@echo "make run       install what is missing, then watch a small model learn (about 2 minutes)"
	@echo "make demo      fetch a model of 135M parameters (93 MB), then watch it learn to add (about 6 minutes)"
	@echo "make test      install what is missing, then run the tests"
	@echo "make test-all  the same with the slow tests"
	@echo "make lint      style, types, and who may import whom"
	@echo "make format    put the code into the style that lint checks"
	@echo "make check-mac compare and time everything on this machine: one JSON to post (about 2 minutes)"
	@echo "make setup     only install: the package, editable, and the tools, into .venv"

setup:
	@sh scripts/setup.sh dev

setup-run:
	@sh scripts/setup.sh

run: setup-run
	.venv/bin/python -m mlxrl_runs algorithm=gigpo env=recurring group_size=4

demo: setup-run
	@sh scripts/setup.sh smollm2
	.venv/bin/python -m mlxrl_runs experiment=grpo_smollm2_arithmetic

check-mac: setup-run
	.venv/bin/python scripts/check_mac.py

test: setup
	.venv/bin/python -m pytest

test-all: setup
	.venv/bin/python -m pytest -m "slow or not slow"

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

format: setup
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .
