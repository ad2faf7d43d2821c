# The two commands of the README. Both make a virtual environment of their own first.
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?= -q
TORCH ?= torch==2.13.0

.PHONY: demo test install install-dev clean

demo: install
	$(VENV)/bin/jackfield demo

test: install-dev
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

# build/ may hold modules that are gone from the tree, and would be installed again.
install: $(VENV)/bin/python
	@rm -rf build
	@echo "installing $(TORCH), then jackfield, into $(VENV)"
	$(VENV)/bin/pip install --quiet "$(TORCH)"
	$(VENV)/bin/pip install --quiet .

install-dev: $(VENV)/bin/python
	@rm -rf build
	@echo "installing $(TORCH), then jackfield and its development tools, into $(VENV)"
	$(VENV)/bin/pip install --quiet "$(TORCH)"
	$(VENV)/bin/pip install --quiet ".[dev]"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) .ci-venv build dist *.egg-info
