# The two commands of the README. Both make their own virtual environment.
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?= -q
TORCH ?= torch==2.13.0

.PHONY: demo test install install-dev clean

demo: install
	$(VENV)/bin/jackfield demo

test: install-dev
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

install: $(VENV)/bin/python
	$(VENV)/bin/pip install --quiet "$(TORCH)"
	$(VENV)/bin/pip install --quiet .

install-dev: $(VENV)/bin/python
	$(VENV)/bin/pip install --quiet "$(TORCH)"
	$(VENV)/bin/pip install --quiet ".[dev]"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) .ci-venv build dist *.egg-info
