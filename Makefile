# make app: the page on the bundled model. make test: everything that must pass.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: app test lint train

app: $(VENV)/.run
	@trap : INT; $(BIN)/python app.py $(ARGS) || [ $$? = 130 ]  # Ctrl+C is no error

# Files in the order of their names: those with few and long tests would come last otherwise.
test: $(VENV)/.dev
	@command -v chromium-headless-shell >/dev/null || \
		{ $(SUDO) apt-get update -qq && $(SUDO) apt-get install -y -qq chromium-headless-shell; }
	$(BIN)/ruff check .
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .

# The bundled model from nothing: minutes on a GPU, days on a CPU (training/README.md), which huge
# pages make fewer.
train: export GLIBC_TUNABLES := glibc.malloc.hugetlb=1
train: $(VENV)/.dev
	$(BIN)/python -m training.tokenizer assets/model/tokenizer
	$(BIN)/python -m training.autoencoder
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

$(VENV)/.dev: requirements.txt requirements-dev.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	touch $@ $(VENV)/.run
