# Every target sets up what it needs, once, in .venv; nothing has to be installed beforehand but Python 3.11+ and make.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
READY := .venv/.ready

# Tests start hundreds of programs: without bytecode, each of them would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all test-device test-platforms compat clients clusters rows check format bench fuzz races mutants gpu-check docs dist clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "unisono needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Setting up .venv, once. It downloads torch (200 MB for CPUs, some GB with CUDA) and what \`unisono train\` needs"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt 'torch==2.13.0' --editable '.[train]'
	@touch $@

$(READY): $(INSTALLED)
	@echo "Adding what checks and tests need to .venv, once: some 60 packages"
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt \
	  --editable '.[train,tensorboard]' accelerate coverage hypothesis ipykernel mypy nbmake pytest pytest-xdist ruff \
	  transformers
	@touch $@

demo: $(INSTALLED)  ## train ResNet-18 on real pictures, on every device, and show the result
	$(BIN)/unisono train --output runs/demo --overwrite

test: $(READY)  ## run the test suite, or a part: make test OPTIONS="tests/primitives -k scatter"
	$(BIN)/python -m pytest -n auto --dist worksteal $(OPTIONS)

test-all: $(READY)  ## what `make test` leaves out because it takes longer: slow tests, five times the examples in property tests
	$(BIN)/python -m pytest -n auto --dist worksteal -m "slow or property" --hypothesis-profile=thorough $(OPTIONS)
	$(if $(OPTIONS),,@$(MAKE) --no-print-directory test-device)

# What concerns devices. tests/async_device/README.md says what this device is; it is built once, which takes a minute.
QUEUED = UNISONO_TEST_DEVICES=queued:0,queued:1
ON_DEVICES = tests/async_device tests/contract tests/gpu tests/test_examples.py --ignore tests/gpu/test_gpu_check.py
WITH_DELAYS = tests/contract/test_gradients.py tests/contract/test_map.py tests/contract/test_kept_replicas.py \
  tests/contract/test_graphs.py
# Ranks with devices of their own, up to two each; with delays, replicas that wait for each other, each with one, and a
# chain of devices.
SIX_QUEUED = QUEUED_DEVICES=6 UNISONO_TEST_DEVICES=queued:0,queued:1,queued:2,queued:3,queued:4,queued:5
RANKS = tests/distributed/test_gradient_sync.py tests/distributed/test_uneven_inputs.py \
  tests/distributed/test_order_of_sums.py tests/contract/test_programs.py \
  tests/sync_batch_norm/test_across_processes.py
TOGETHER = tests/contract/test_sync_batch_norm.py tests/contract/test_sync_batch_norm_exchange.py \
  tests/contract/test_higher_order.py tests/async_device/test_chain.py

test-device: $(READY)  ## run what concerns devices on the asynchronous device: at its own pace, then a part with delays
	$(QUEUED) $(BIN)/python -m pytest -n auto --dist worksteal $(or $(OPTIONS),$(ON_DEVICES))
	$(if $(OPTIONS),,$(SIX_QUEUED) $(BIN)/python -m pytest -n auto --dist worksteal $(RANKS))
	$(if $(OPTIONS),,$(SIX_QUEUED) QUEUED_DELAY_US=300 $(BIN)/python -m pytest -n auto --dist worksteal $(TOGETHER))
	$(if $(OPTIONS),,$(QUEUED) QUEUED_DELAY_US=300 $(BIN)/python -m pytest -n auto --dist worksteal $(WITH_DELAYS))

test-platforms: $(READY)  ## run the suite with what macOS lacks taken away from Linux, then what Windows lacks
	UNISONO_TEST_PLATFORM=macos $(BIN)/python -m pytest -n auto --dist worksteal $(OPTIONS)
	UNISONO_TEST_PLATFORM=windows $(BIN)/python -m pytest -n auto --dist worksteal $(OPTIONS)

# Each pair of Python and torch has an environment of its own, which is removed after its run: tests/compat/__main__.py says
# what else. TORCH, PYTHON or both name one pair; KEEP=1 keeps the environments. OPTIONS is for pytest, and with it the page
# stays as it is: make compat TORCH=2.9.1 OPTIONS="tests/runtime"
OWN_PYTHON = $(if $(filter file,$(origin PYTHON)),,--python $(PYTHON))

compat:  ## run the suite with each Python and torch of docs/compatibility.md; writes its table; see make compat OPTIONS=--help
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "unisono needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another one: make compat PYTHON=python3.12" >&2; exit 1; }
	@PYTHONPATH=tests $(PYTHON) -m compat $(OWN_PYTHON) $(if $(filter undefined,$(origin TORCH)),,--torch '$(TORCH)') $(if $(KEEP),--keep) \
	  $(if $(filter --help --list,$(OPTIONS)),$(OPTIONS),$(if $(OPTIONS),-- $(OPTIONS)))
	$(if $(OPTIONS),,@$(PYTHON) docs/what_has_run.py)

# Other people's libraries are many: an environment of their own keeps them out of .venv. OPTIONS is for pytest, and with
# it the page stays as it is: make clients OPTIONS="-k fastai"
CLIENTS = .venv-clients
CLIENTS_NEED = tests/clients/requirements.txt tests/clients/constraints.txt

clients: $(CLIENTS)/.ready  ## run other people's libraries on two replicas; writes their table in docs/libraries.md
	$(CLIENTS)/bin/python -m pytest tests/clients $(or $(OPTIONS),--table docs/libraries.md)
	$(if $(OPTIONS),,@$(CLIENTS)/bin/python docs/what_has_run.py)

$(CLIENTS)/.ready: pyproject.toml constraints.txt $(CLIENTS_NEED)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "unisono needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Setting up $(CLIENTS) (once; the largest part is torch)"
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  -c tests/clients/constraints.txt 'torch==2.13.0' --editable . -r tests/clients/requirements.txt
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -c tests/clients/constraints.txt \
	  --no-deps fastai spikingjelly timm
	@touch $@

# Launchers: those that are Python packages have an environment of their own; Slurm and Open MPI are Debian packages, which
# are installed where that is allowed. OPTIONS: make clusters OPTIONS="--only slurm"; OPTIONS=--help says more.
CLUSTERS = .venv-clusters

clusters: $(CLUSTERS)/.ready  ## run the pages of launchers with Slurm, MPI, Ray, Monarch, ... here; writes the table in docs/launchers.md, and a log
	PYTHONPATH=tests $(CLUSTERS)/bin/python -m clusters $(OPTIONS)
	$(if $(OPTIONS),,@$(CLUSTERS)/bin/python docs/what_has_run.py)

$(CLUSTERS)/.ready: pyproject.toml constraints.txt tests/clusters/requirements.txt tests/clusters/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "unisono needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Setting up $(CLUSTERS) (once; the largest part is torch)"
	$(PYTHON) -m venv $(CLUSTERS)
	$(CLUSTERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  -c tests/clusters/constraints.txt 'torch==2.13.0' --editable '.[train]' -r tests/clusters/requirements.txt
	@touch $@

rows: $(READY)  ## list the tests of each row of docs/behaviour.md
	@$(BIN)/python -m pytest --rows

check: $(READY)  ## lint, format, types; build the pages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@$(MAKE) --no-print-directory docs

format: $(READY)  ## let ruff mend and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## measure, side by side, on a machine that does nothing else; writes benchmarks/results.md
	$(BIN)/unisono bench --replicas 2 --output benchmarks
	$(BIN)/python benchmarks/goals.py
	$(BIN)/python benchmarks/one_device.py
	$(BIN)/python benchmarks/replicate.py
	$(BIN)/python benchmarks/map.py
	$(BIN)/python benchmarks/shares.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/host_calls.py
	$(BIN)/python benchmarks/verify_rates.py --check --output benchmarks/verify_rates.md

fuzz: $(READY)  ## compare random programs, wrapped and plain; make fuzz OPTIONS=--help says how many, and which
	PYTHONPATH=tests $(BIN)/python -m fuzz $(OPTIONS)

races: $(READY)  ## look for races on the asynchronous device, ten minutes; make races OPTIONS=--help says for how long, and what
	PYTHONPATH=tests $(BIN)/python -m async_device.races $(OPTIONS)

mutants: $(READY)  ## change one line of src at a time, and see whether a test notices; make mutants OPTIONS=--help says which
	PYTHONPATH=tests $(BIN)/python -m mutants $(OPTIONS)

# Sets up nothing: a machine with a GPU has a torch of its own. A pytest that is missing is taken into a temporary folder.
GPU_PYTHON = $(if $(filter file,$(origin PYTHON)),$(firstword $(wildcard $(BIN)/python) python3),$(PYTHON))

gpu-check:  ## prove the accelerator paths on this machine's GPU, in ten minutes; writes gpu-results.md
	@$(GPU_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "unisono needs Python 3.11 or newer, and $(GPU_PYTHON) is $$($(GPU_PYTHON) --version 2>&1). Name another one: make gpu-check PYTHON=..." >&2; exit 1; }
	@PYTHONPATH=src $(GPU_PYTHON) benchmarks/gpu_check.py $(OPTIONS)

# The builder is zensical, which reads mkdocs.yml; mkdocs-material, which would read it too, gets no new features. In an
# environment of its own: it needs no torch, and `make test` does not need it.
DOCS = .venv-docs

docs: $(DOCS)/.ready  ## build the documentation site in site/; a broken link, or a search without its page, is an error
	$(DOCS)/bin/python docs/site.py
	$(DOCS)/bin/zensical build --clean --strict
	$(DOCS)/bin/zensical build --clean --strict --config-file mkdocs.zh-CN.yml
	$(DOCS)/bin/python docs/searches.py
	@echo "to read the pages: $(PYTHON) -m http.server -d site"

$(DOCS)/.ready: constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt ruff zensical 'mkdocstrings[python]' mini-racer
	@touch $@

# The wheel is built from the sdist, in an environment that has only the build's own requirements. What is tried is the
# wheel, as a user gets it: in an environment made anew, from an empty folder, so that nothing of the checkout is seen.
DIST = .venv-dist

dist: $(DIST)/.ready  ## build wheel and sdist, check both, install the wheel in an empty environment and train there
	rm -rf dist $(DIST)/try
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(DIST)/bin/python -m build --outdir dist .
	$(DIST)/bin/python -m twine check --strict dist/*
	$(PYTHON) -m venv $(DIST)/try
	$(DIST)/try/bin/python -m pip install --disable-pip-version-check -c constraints.txt 'torch==2.13.0' \
	  "unisono[train] @ file://$$(echo $(CURDIR)/dist/*.whl)"
	$(DIST)/try/bin/python -m pip check
	@! grep -nE '\]\(([^h]|h[^t])' $(DIST)/try/lib/python*/site-packages/unisono-*.dist-info/METADATA || \
	  { echo "the wheel's description has the relative links above: see its substitutions in pyproject.toml" >&2; exit 1; }
	mkdir $(DIST)/try/empty
	cd $(DIST)/try/empty && ../bin/python -I $(CURDIR)/examples/first_steps.py | tee first_steps.txt
	grep -q '^same: 20 comparisons' $(DIST)/try/empty/first_steps.txt
	cd $(DIST)/try/empty && ../bin/unisono train --model mlp --epochs 1 --devices 2 --output run && ls run
	@grep -q '^\[project.urls\]' pyproject.toml || echo "pyproject.toml has no [project.urls] yet: do not upload; with an address, allow private reports of vulnerabilities (SECURITY.md)" >&2
	@ls -l dist

$(DIST)/.ready: constraints.txt
	$(PYTHON) -m venv $(DIST)
	$(DIST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt build twine
	@touch $@

clean:  ## remove the environments and what runs leave behind
	rm -rf .venv .venv-clients .venv-clusters .venv-compat-* .venv-dist .venv-docs .site-source .site-source-zh dist site runs .pytest_cache .ruff_cache .mypy_cache .hypothesis
