# make demo   the bundled demo model answers a question, and a quick evaluation of it
# make test   everything that continuous integration runs
# Both set up .venv from nothing on first use and reuse it afterwards.
#
# PYTHON=python3.12            another interpreter (3.11 or newer)
# CONSTRAINTS=/dev/null        other versions than the tested ones (an older driver may need an older torch)
# Without an NVIDIA GPU pip takes the CPU build of the pinned torch wherever its configuration offers one: of equal
# versions it prefers 2.13.0+cpu.

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)

QUESTION := Mia has 8 boxes with 12 pens in each. 17 more arrive. How many pens are there now?

.PHONY: demo test format clean
.DELETE_ON_ERROR:

demo: $(VENV)/.runtime
	echo "$(QUESTION)" | $(BIN)/fp4ward chat demo --no-thinking
	$(BIN)/fp4ward eval demo --quick

test: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A stamp marks a finished installation; a newer list of dependencies asks for the next one.
$(VENV)/.runtime: pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (the first time takes some minutes)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	@touch $@

$(VENV)/.test: $(VENV)/.runtime
	@echo "Adding the test tools to $(VENV)"
	$(PIP) -e '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
