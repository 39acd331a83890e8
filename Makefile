# Two commands for a newcomer: `make demo` and `make test`. Both make .venv on first use and reuse it afterwards.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check bench clean install

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing Paceline and what it needs into $(VENV) (once; about 900 MB with torch) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)
	@$(BIN)/paceline demo --out demo_run

# What is pure runs on all cores. What starts processes of its own runs in two rows side by side if it does not mind
# company, and one at a time with nothing beside it where timing matters.
PROCESSES := tests/multiprocess tests/equivalence
test: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto tests/unit tests/contract src
	@$(BIN)/python -m pytest -m "beside and not servers" $(PROCESSES) & first=$$!; \
	$(BIN)/python -m pytest -m "beside and servers" $(PROCESSES) & second=$$!; \
	status=0; for row in $$first $$second; do wait $$row || status=1; done; exit $$status
	@$(BIN)/python -m pytest -m "not beside" $(PROCESSES)

# Lint, format, types and every example: what CI runs after the tests.
check: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@for script in examples/*.py; do echo "example $$script"; OMP_NUM_THREADS=1 $(BIN)/python $$script || exit 1; done

bench: $(STAMP)
	@for script in bench/*.py; do echo "bench $$script"; $(BIN)/python $$script || exit 1; done

clean:
	rm -rf $(VENV) demo_run paceline_runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
