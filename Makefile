# Two commands do everything on a fresh machine: `make demo` and `make test`.
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
# One thread per test process: the suite runs on as many processes as there are cores. Bytecode is kept even where the
# environment says otherwise, because compiling the tests takes ten seconds and many tests start interpreters.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --dist worksteal

.PHONY: demo test quick nightly bench lint types format clean
demo: $(READY)
	$(PY) -m fedabml demo

# Three tiers: quick while you work, test before you push, nightly for the rest.
test: lint types
	$(PYTEST) -m "not nightly"

quick: $(READY)
	$(PYTEST) -m "not slow and not nightly"

nightly: $(READY)
	$(PYTEST) -m nightly

# Speed on this CPU; PEERS=VENV names a virtual environment with other libraries to measure beside ours.
bench: $(READY)
	$(PY) -m benchmarks.cpu $(if $(PEERS),--peers $(PEERS))

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(READY)
	$(PY) -m mypy

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

$(READY): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
