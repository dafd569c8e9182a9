# make app: the page on the bundled model. make check: in a minute, before every commit.
# make test: what proves the product. make test-all: also what takes long by nature.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: app check test test-all script docs train accelerators

app: $(VENV)/.run
	@trap : INT; $(BIN)/python app.py $(ARGS) || [ $$? = 130 ]  # Ctrl+C is no error

# A worker takes tests of the other's when it has none left: what they share is made once for each.
PYTEST := $(BIN)/python -m pytest --numprocesses logical --maxprocesses 8 --dist worksteal
LINT := $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/ty check

# Node.js comes with the packages of requirements-dev.txt.
TOOLS := node_modules/.package-lock.json
CHECK_SCRIPT := tsc && biome ci --error-on-warnings && \
	node --test --test-reporter dot tests/script/*.test.js
check test script $(TOOLS): export PATH := $(CURDIR)/$(BIN):$(CURDIR)/node_modules/.bin:$(PATH)

unexport PYTHONDONTWRITEBYTECODE  # or each process would compile all that it imports

check: $(VENV)/.dev $(TOOLS)
	$(LINT)
	$(CHECK_SCRIPT)
	$(PYTEST) tests/unit -m "not slow" $(ARGS)

test: $(VENV)/.dev $(TOOLS) chromium
	$(LINT)
	$(CHECK_SCRIPT)
	$(PYTEST) --durations 40 $(ARGS)

test-all: test
	$(PYTEST) --durations 40 -m long $(ARGS)

.PHONY: chromium
chromium:
	@command -v chromium-headless-shell >/dev/null || \
		{ $(SUDO) apt-get update -qq && $(SUDO) apt-get install -y -qq chromium-headless-shell; }

# The page's script from its modules; what it writes is committed.
script: $(TOOLS)
	node sd_tpu/page/script/build.mjs

# The documentation as a site, in site/; a dead link fails.
docs: $(VENV)/.docs
	$(BIN)/zensical build --strict --clean

# All that is to be measured on a GPU or a TPU, within an hour (docs/performance/how-we-measure.md).
accelerators: $(VENV)/.dev
	$(BIN)/python -m benchmarks.accelerators $(ARGS)

# The bundled model from nothing: minutes on a GPU, days on a CPU (training/README.md), which huge
# pages make fewer.
train: export GLIBC_TUNABLES := glibc.malloc.hugetlb=1
train: $(VENV)/.dev
	$(BIN)/python -m training.tokenizer assets/model/tokenizer
	$(BIN)/python -m training.autoencoder
	$(BIN)/python -m training.grow
	$(BIN)/python -m training.diffusion
	$(BIN)/python -m training.sharpen
	$(BIN)/python -m training.export
	$(BIN)/python -m training.examples

SUDO := $(if $(filter 0,$(shell id -u)),,sudo)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: requirements.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -r requirements.txt
	touch $@

$(VENV)/.dev: requirements.txt requirements-dev.txt requirements-docs.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	touch $@ $(VENV)/.run

$(TOOLS): package-lock.json | $(VENV)/.dev
	NODE_OPTIONS=--use-system-ca npm ci --loglevel error --no-progress  # as pip does
	touch $@

$(VENV)/.docs: requirements-docs.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -r requirements-docs.txt
	touch $@
