# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
#
# The two commands of the README are `make run` and `make test`; each works on a bare Debian 12 with
# python3, g++ and make. All they write lies in .venv/ and build/.
PYTHON ?= python3
export PYTHON

PY := .venv/bin/python
STEPS := $(PY) tools/run_steps.py

.PHONY: help run course test test-full check format docs docs-serve clean
.DEFAULT_GOAL := help

help: ## list these commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

run: ## build and install the package into .venv, then compute attention on the shipped example
	@tools/bootstrap.sh run
	@$(PY) tools/install_package.py
	.venv/bin/fulmen run

course: ## build the emulator that the course's kernels run on, once; then: .venv/bin/fulmen learn
	@tools/bootstrap.sh course
	@$(PY) tools/build_course.py

test: ## all checks and tests, as continuous integration runs them (ONLY="a b": those steps)
	@tools/bootstrap.sh test
	@$(STEPS) test $(ONLY)

test-full: ## the same, and what takes longer
	@tools/bootstrap.sh test-full
	@$(STEPS) test-full $(ONLY)

check: ## the quick half: formatting, linters, types, layer rule, headers, licence lines
	@tools/bootstrap.sh test
	@$(STEPS) check

format: ## rewrite C++, CUDA and Python files in the project's format
	@tools/bootstrap.sh test
	@$(PY) tools/format.py

docs: ## build the documentation into build/site
	@tools/bootstrap.sh docs
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet
	@echo "the site: build/site/index.html"

docs-serve: ## show the documentation at port 8000, rebuilt as files change
	@tools/bootstrap.sh docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs serve

clean: ## remove everything that these commands wrote
	rm -rf .venv build dist
