# make demo   the main job on a small checkpoint that the repository carries
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

FIXTURE := tests/fixtures/q35moe-w4a16-modelopt
FIXTURE_PROMPT := 364,64,351,242,452,113,210,401,102,182,260,232,476,214,279,119

.PHONY: demo test format clean
.DELETE_ON_ERROR:

demo: $(VENV)/.runtime
	$(BIN)/fp4ward generate $(FIXTURE) --prompt-token-ids $(FIXTURE_PROMPT) --max-tokens 16 --temperature 0

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
