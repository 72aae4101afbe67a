# `make` alone lists what there is. Needs Python 3.11 or newer, nothing else.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PORT ?= 8000
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
PYTEST ?= $(BIN)/python -m pytest -n auto --maxprocesses 4

# A stamp carries the hash of the locks that it was made from: a changed lock makes a new one.
RUN_STAMP := .venv/.aftercall-run-$(shell cksum < requirements.txt | cut -d' ' -f1)
DEV_STAMP := .venv/.aftercall-dev-$(shell cat requirements.txt requirements-dev.txt | cksum | cut -d' ' -f1)

.PHONY: help run test bench drill lint env dev-env browser lock clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

run: env ## run the console with the order-desk example; PORT=8000
	@exec $(BIN)/python manage.py start --example --port $(PORT) --end-with-parent

test: dev-env browser ## run the whole suite; ARGS="-k name" for a part
	@$(PYTEST) $(ARGS)

bench: dev-env ## measure against plain psycopg, pgbench and DBOS
	@exec $(BIN)/python -m benchmarks

drill: dev-env ## break it everywhere and report; ARGS="--quick" for a sample
	@exec $(BIN)/python -m drill $(ARGS)

lint: dev-env ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy .

env: $(RUN_STAMP) ## make .venv with what Aftercall runs on

dev-env: $(DEV_STAMP) ## make .venv with what tests and checks need, too

browser: ## install Chromium where that is possible without asking
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "Installing Chromium for the browser tests"; \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium; } >/dev/null </dev/null \
			|| echo "Chromium could not be installed from the system's packages."; \
	fi

lock: dev-env ## write the exact versions and hashes of the requirements
	@for name in requirements requirements-dev; do \
		$(BIN)/python -m uv pip compile --universal --python-version 3.11 --generate-hashes --quiet \
			--no-emit-index-url --custom-compile-command "make lock" $$name.in -o $$name.txt; done

clean: ## remove what can be made again; data in var/ stays
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage htmlcov test-results
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Aftercall needs Python 3.11 or newer; none was found on the path."; exit 1; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; \
		echo "Python could not make .venv; where venv is a package of its own (python3-venv), install it."; exit 1; }

$(RUN_STAMP): requirements.txt | $(BIN)/python
	@echo "Installing what Aftercall runs on into .venv"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.txt
	@rm -f .venv/.aftercall-run-* && touch $@

$(DEV_STAMP): requirements.txt requirements-dev.txt | $(BIN)/python
	@echo "Installing what Aftercall, its tests and checks need into .venv"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes \
		-r requirements.txt -r requirements-dev.txt
	@rm -f .venv/.aftercall-* && touch $(RUN_STAMP) $@
