# Two commands do everything on a fresh machine: `make demo` and `make test`.
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
# Flower's pins do not fit those of the other tools, so its tests have an environment of their own.
FLOWER := .venv-flower
FLOWER_PY := $(FLOWER)/bin/python
FLOWER_READY := $(FLOWER)/.ready
# One thread per test process: the suite runs on as many processes as there are cores. Bytecode is kept even where the
# environment says otherwise, because compiling the tests takes ten seconds and many tests start interpreters.
PYTEST_OPTIONS := -m pytest -n auto --dist worksteal
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) $(PYTEST_OPTIONS)
FLOWER_PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(FLOWER_PY) $(PYTEST_OPTIONS)

.PHONY: demo test test-flower quick nightly nightly-flower bench lint types format clean
demo: $(READY)
	$(PY) -m fedabml demo

# Three tiers: quick while you work, test before you push, nightly for the rest.
test: lint types
	$(PYTEST) -m "not nightly"
	$(MAKE) test-flower

# The federation between parties and its drills: what needs Flower, in its environment; `test` has run the rest.
test-flower: $(FLOWER_READY)
	$(FLOWER_PYTEST) -m "flower and not nightly" tests/federation tests/drills

quick: $(READY)
	$(PYTEST) -m "not slow and not nightly"

nightly: $(READY)
	$(PYTEST) -m nightly
	$(MAKE) nightly-flower

# What needs no Flower is repeated here beside Flower's versions of the other packages.
nightly-flower: $(FLOWER_READY)
	$(FLOWER_PYTEST) -m "nightly or not flower" tests/federation

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

$(FLOWER_READY): pyproject.toml constraints-flower.txt
	python3 -m venv $(FLOWER)
	$(FLOWER_PY) -m pip install --quiet --constraint constraints-flower.txt \
	  --editable '.[flower,images,tables,excel,serve]' hypothesis pytest pytest-timeout pytest-xdist scikit-learn scipy
	touch $(FLOWER_READY)

clean:
	rm -rf $(VENV) $(FLOWER) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
