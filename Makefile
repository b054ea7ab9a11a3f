# `make demo` and `make test` are all a fresh clone needs; `make` alone lists the rest.
#
#   PYTHON     interpreter that makes the environment            (python3)
#   VENV       where the environment lies                        (.venv)
#   TORCH      what to give pip for torch: a pin, a wheel, or a pin with its --index-url
#   TRITON     the same for triton
#   NEWEST     what `make newest` gives to pip                   (triton)
#   PIP_ARGS   further arguments of every pip install; with --no-index nothing is fetched
#   VENV_ARGS  arguments of python -m venv, for example --system-site-packages
#   TESTS      what pytest runs, with any of its options         (everything)

PYTHON ?= python3
VENV ?= .venv
TORCH ?=
TRITON ?=
NEWEST ?= triton
PIP_ARGS ?=
VENV_ARGS ?=
TESTS ?=

PY := $(VENV)/bin/python
INSTALL := $(PY) -m pip --disable-pip-version-check install $(PIP_ARGS)
OFFLINE := $(findstring --no-index,$(PIP_ARGS))
# a stamp belongs to the settings it was made with: other settings install again
KEY := $(shell printf '%s' '$(TORCH)|$(TRITON)|$(PIP_ARGS)|$(CURDIR)' | cksum | cut -d' ' -f1)
NEEDED := torch transformers safetensors huggingface_hub psutil tqdm typer
NEEDED_BY_TESTS := hypothesis matplotlib pytest pytest_timeout tokenizers
LINTERS := ruff mypy importlinter

have = $(PY) -c 'import importlib.util, sys; sys.exit(any(map(lambda name: importlib.util.find_spec(name) is None, sys.argv[1:])))' $(1)
missing = $(PY) -c 'import importlib.util, sys; print(*filter(lambda name: importlib.util.find_spec(name) is None, sys.argv[1:]))' $(1)

.PHONY: help demo test lint unit newest format clean
help:
	@echo 'make demo    one prompt decoded plainly and speculatively, with the shipped pair of models'
	@echo 'make test    linters, type check, import contracts and every test'
	@echo 'make lint    the first three of them'
	@echo 'make unit    the tests alone; TESTS="tests/unit -k stream" picks some'
	@echo 'make newest  compiles some launches of every kernel with the newest Triton'
	@echo 'make format  rewrites the sources in the house format'
	@echo 'make clean   removes .venv and every cache'

demo: $(VENV)/.run-$(KEY)
	$(PY) -m fastspec.cli demo

test: lint unit

lint: $(VENV)/.dev-$(KEY)
	@if [ -n '$(OFFLINE)' ] && ! $(call have,$(LINTERS)); then \
	  echo "NOT CHECKED: style, types and import contracts. --no-index forbids fetching $$($(call missing,$(LINTERS))), not found here."; \
	else set -ex; \
	  $(PY) -m ruff check .; \
	  $(PY) -m ruff format --check .; \
	  $(PY) -m mypy; \
	  $(PY) -c 'import sys; from importlinter.cli import lint_imports_command as lint; sys.argv[0] = "lint-imports"; lint()' --no-logo; \
	fi

# several processes of one thread each: tests are many and small, and torch's threads would only get into each other's
# way. Kernels are interpreted where no GPU is seen, so those on a GPU are tested by processes of their own
unit: $(VENV)/.dev-$(KEY)
	@parallel=$$(if $(call have,xdist); then echo '-n auto --maxprocesses=4 --dist worksteal'; fi); \
	export OMP_NUM_THREADS=1; set -ex; \
	CUDA_VISIBLE_DEVICES= $(PY) -m pytest $$parallel $(TESTS); \
	if $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	  $(PY) -m pytest -m gpu $$parallel $(TESTS) || [ $$? = 5 ]; \
	fi

# beside the environment's own Triton, which stays as it is
newest: $(VENV)/.dev-$(KEY)
	$(INSTALL) -q --no-deps --upgrade --target $(VENV)/newest '$(NEWEST)'
	TRITON_ALWAYS_COMPILE=1 PYTHONPATH=$(VENV)/newest $(PY) -m tests.helpers.compile_some

format: $(VENV)/.dev-$(KEY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf .venv .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@command -v '$(PYTHON)' >/dev/null || { \
	  echo "There is no '$(PYTHON)' here. Install Python 3.10 or newer, or name one: make $(MAKECMDGOALS) PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "fastspec needs Python 3.10 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1). Name another: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv module. On Debian and Ubuntu: apt-get install python3-venv. Or name another Python: make $(MAKECMDGOALS) PYTHON=..." >&2; exit 1; }
	@$(PY) -c 'import pip' 2>/dev/null || { set -ex; $(PYTHON) -m venv $(VENV_ARGS) $(VENV); }
	@# Packages of the maker's own environment count as the system's: venv looks only at the Python below it.
	@case '$(VENV_ARGS)' in *--system-site-packages*) \
	  $(PYTHON) -c 'import sys, sysconfig; sys.prefix == sys.base_prefix or print(sysconfig.get_path("purelib"))' \
	    >"$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/maker.pth";; esac
	@touch $@

$(VENV)/.torch-$(KEY): $(VENV)/.made
	@$(call have,torch) || [ -n '$(OFFLINE)' ] || \
	  echo 'Installing torch. Its default build for Linux brings CUDA along: several gigabytes. TORCH=... picks another one.'
	@if [ -n '$(TORCH)$(TRITON)' ]; then set -ex; $(INSTALL) $(TORCH) $(TRITON); fi
	@touch $@

$(VENV)/.run-$(KEY): EXTRA =
$(VENV)/.run-$(KEY): MODULES = $(NEEDED)
$(VENV)/.dev-$(KEY): EXTRA = [dev]
$(VENV)/.dev-$(KEY): MODULES = $(NEEDED) $(NEEDED_BY_TESTS)
$(VENV)/.run-$(KEY) $(VENV)/.dev-$(KEY): $(VENV)/.torch-$(KEY) pyproject.toml
	@if [ -z '$(OFFLINE)' ]; then \
	  echo 'Installing fastspec$(EXTRA) and what it needs into $(VENV).'; \
	  set -ex; $(INSTALL) -q -e '.$(EXTRA)'; \
	elif $(call have,hatchling); then \
	  set -ex; $(INSTALL) -q --no-deps --no-build-isolation -e .; \
	else \
	  site="$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; \
	  echo '$(CURDIR)' >"$$site/fastspec-checkout.pth"; \
	  echo "hatchling is not here and --no-index forbids fetching it, so fastspec is NOT INSTALLED: $$site/fastspec-checkout.pth"; \
	  echo 'puts this checkout on the path instead. There is no fastspec command; python -m fastspec.cli does the same.'; \
	fi
	@$(call have,$(MODULES)) || { \
	  echo "Missing in $(VENV): $$($(call missing,$(MODULES))). Allow pip to fetch them (no --no-index), or add --system-site-packages to VENV_ARGS." >&2; exit 1; }
	@touch $@
