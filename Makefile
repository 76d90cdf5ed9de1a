# Every target first sets up .venv if it is missing or older than pyproject.toml or constraints.txt.
# On Linux, PyPI's torch includes the CUDA libraries. Without a GPU, run this first:
#   export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
UNFINISHED := .venv/unfinished
STAMP := .venv/finished
SEVERAL := --numprocesses auto --maxprocesses 4 --dist worksteal
# Compiled tests and packages are kept in __pycache__, whatever the environment says: this halves what each process imports.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest

.DEFAULT_GOAL := help
.PHONY: help demo test slow check check-rest format train bench gpu notebooks docs

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(STAMP)  ## trace the shipped models and draw their sinks
	$(BIN)/sinklens demo $(ARGS)

test: $(STAMP)  ## run the tests that take minutes in all (ARGS="-k name" to choose)
	$(PYTEST) $(SEVERAL) $(ARGS)

slow: $(STAMP)  ## run the slow tests alone
	$(PYTEST) -m slow $(ARGS)

check: test check-rest  ## check everything: format, lint, types, all tests but the slow ones, documentation, wheel

check-rest: $(STAMP)  ## what `make check` does after `make test`
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python scripts/check_types.py
	$(PYTEST) $(SEVERAL) -m "extended and not slow"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	$(BIN)/python scripts/check_wheel.py

format: $(STAMP)  ## format the code and fix what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

train: $(STAMP)  ## train the shipped models again; resumes an interrupted run
	$(BIN)/python -m training tiny-llada
	$(BIN)/python -m training tiny-llama

bench: $(STAMP)  ## measure the cost of watching
	$(BIN)/python -m benchmarks.run $(ARGS)

gpu: $(STAMP)  ## measure sinklens on this machine's GPU and check it, in three minutes (a CPU reports what it cannot check)
	$(BIN)/python -m pytest -c tests/gpu/pytest.ini tests/gpu --stage figures --out sinklens-figures.json $(ARGS)
	$(BIN)/python -m pytest -c tests/gpu/pytest.ini tests/gpu --stage checks -n 4 $(ARGS)

notebooks: $(STAMP)  ## execute the tutorials that changed and write their notebooks
	$(BIN)/python scripts/make_notebooks.py $(ARGS)

docs: $(STAMP)  ## build the documentation into site/, which opens offline
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

# The marker of an unfinished setup is renamed to the stamp as the last step. A marker that still exists was left by a
# kill: packages that pip was writing can look installed but be incomplete, so that environment is deleted. After an
# error that pip reports (such as no network) all packages are complete, so only the marker is deleted.
$(STAMP): pyproject.toml constraints.txt
	@if [ -e $(UNFINISHED) ]; then rm -rf .venv; fi
	@mkdir -p .venv && rm -f $(STAMP) && touch $(UNFINISHED)
	@echo "setting up .venv; the first time this takes minutes"
	$(PYTHON) -m venv .venv || { rm -f $(UNFINISHED); exit 1; }
	$(BIN)/python -m pip install --quiet -c constraints.txt --upgrade pip || { rm -f $(UNFINISHED); exit 1; }
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,lab,ray,lm-eval]' || { rm -f $(UNFINISHED); exit 1; }
	@$(BIN)/python scripts/name_checkout.py
	@mv $(UNFINISHED) $(STAMP)
