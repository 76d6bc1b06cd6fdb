# Every target sets up its own virtual environment when it is missing.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
RUNS   := $(VENV)/.runs

.DEFAULT_GOAL := help
.PHONY: help setup demo test nightly slow leaks integrations docs lint format bench results figures build clean

help: ## Show this help
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

$(RUNS): pyproject.toml experiments/pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . -e experiments
	@touch $(RUNS)

$(READY): $(RUNS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]" -e "experiments[dev]"
	@touch $(READY)

setup: $(READY) ## Create the virtual environment and install everything into it

demo: $(RUNS) ## Two minutes: digits, where a support gains nothing, and a wide table, where it gains much
	$(BIN)/python -m sparsedp_experiments demo

test: $(READY) ## Run the tests that decide, on all cores
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not nightly"

nightly: slow leaks integrations ## Run everything else: slow tests, planted leaks, other packages' models

slow: $(READY) ## Run the slow tests: statistics at full strength, kills, ranks, real data, notebooks
	$(BIN)/python -m pytest -n 2 --dist worksteal -m nightly

leaks: $(READY) ## Plant leaks and see that all are caught
	$(BIN)/python -m mutation_tests

integrations: $(READY) ## Run the tests against other packages' models, in an environment of their own
	@test -x $(VENV)-integrations/bin/python || $(PYTHON) -m venv $(VENV)-integrations
	$(VENV)-integrations/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[integrations]" -e experiments
	$(VENV)-integrations/bin/python -m pytest tests/integrations

docs: $(READY) ## Build the documentation site into build/site, in an environment of its own
	@test -x $(VENV)-docs/bin/python || $(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "mkdocs-material>=9.5" "mkdocstrings[python]>=0.26" "mkdocs-jupyter>=0.25" ruff
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/python -m mkdocs build --strict

lint: $(READY) ## Check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY) ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) ## Time one step against SGD and Opacus
	$(BIN)/python -m benchmarks.step
	$(BIN)/python -m benchmarks.tables
	$(BIN)/python -m benchmarks.models
	$(BIN)/python -m benchmarks.ranks
	$(BIN)/python -m benchmarks.heads
	$(BIN)/python -m benchmarks.sweeps

results: $(READY) ## Make experiments/RESULTS.md from the records
	$(BIN)/python -m sparsedp_experiments page

figures: $(READY) ## Draw the papers' figures from the records
	$(BIN)/python -m sparsedp_experiments figures build/figures

build: $(READY) ## Build the wheel, by way of the source distribution
	$(BIN)/python -m build

clean: ## Remove the environment and everything built
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache
