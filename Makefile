# Every target sets up .venv first where it is missing or older than pyproject.toml or constraints.txt.
# On Linux, PyPI's torch brings the CUDA libraries along. Without a GPU, say beforehand:
#   export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
UNFINISHED := .venv/unfinished
STAMP := .venv/finished
SEVERAL := --numprocesses auto --maxprocesses 4

.DEFAULT_GOAL := help
.PHONY: help demo test slow check format train bench gpu notebooks docs

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(STAMP)  ## trace the shipped models and draw their sinks
	$(BIN)/sinklens demo $(ARGS)

test: $(STAMP)  ## run the tests, without the slow ones (ARGS="-k name" to choose)
	$(BIN)/pytest $(SEVERAL) $(ARGS)

slow: $(STAMP)  ## run the slow tests alone
	$(BIN)/pytest -m slow $(ARGS)

check: $(STAMP)  ## format, lint, types, tests and the wheel: all that has to pass
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python scripts/check_types.py
	$(BIN)/pytest $(SEVERAL)
	$(BIN)/python scripts/check_wheel.py

format: $(STAMP)  ## format the code and mend what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

train: $(STAMP)  ## train the shipped models again; an interrupted run goes on
	$(BIN)/sinklens train tiny-llada
	$(BIN)/sinklens train tiny-llama

bench: $(STAMP)  ## measure what watching costs
	$(BIN)/python benchmarks/run.py $(ARGS)

gpu: $(STAMP)  ## check the GPU that is here, and measure on it (or say what a CPU cannot show)
	$(BIN)/python -m sinklens.devices.check $(ARGS)

notebooks: $(STAMP)  ## execute the tutorials that changed and write their notebooks
	$(BIN)/python scripts/make_notebooks.py $(ARGS)

docs: $(STAMP)  ## build the documentation into site/, which opens offline
	$(BIN)/python scripts/api_tables.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

# The mark of an unfinished set-up becomes the stamp by a rename, last. A mark that is still there was left by a kill:
# what pip was writing then can look installed and be incomplete, so that environment is thrown away. An error that
# pip reports itself (no network, say) leaves whole packages, so there the mark is taken away and the rest kept.
$(STAMP): pyproject.toml constraints.txt
	@if [ -e $(UNFINISHED) ]; then rm -rf .venv; fi
	@mkdir -p .venv && rm -f $(STAMP) && touch $(UNFINISHED)
	@echo "setting up .venv; the first time this takes minutes"
	$(PYTHON) -m venv .venv || { rm -f $(UNFINISHED); exit 1; }
	$(BIN)/python -m pip install --quiet -c constraints.txt --upgrade pip || { rm -f $(UNFINISHED); exit 1; }
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,ray,lm-eval]' || { rm -f $(UNFINISHED); exit 1; }
	@$(BIN)/python scripts/name_checkout.py
	@mv $(UNFINISHED) $(STAMP)
