# make setup, make demo, make test: a fresh clone needs Python 3.11 or later with venv, gcc and make, no more.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$p"; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
# The extras of pyproject.toml that the environment has; .ci/run adds those of the baselines, which are big
EXTRAS ?= cuda,dev
READY := $(VENV)/.ready-$(EXTRAS)

.PHONY: setup demo test test-all containers fuzz rehearse digests docs lint page serve wheel clean

setup: $(READY)

$(READY): pyproject.toml bench/pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed: install it, or say make PYTHON=/path/to/python3" >&2; exit 1; }
	@command -v gcc >/dev/null || echo "warning: no gcc: CPU kernels will not compile (Debian: apt install gcc libc6-dev)" >&2
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]' -e bench
	@touch '$(READY)'

demo: $(READY)
	$(BIN)/python -m roller_svc.cli.demo

# One more than cores, as tests wait for services and workers at times; WORKERS=0 runs them in one process
WORKERS ?= $(shell echo $$(($$(nproc) + 1)))
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal

# tests start processes: without bytecode on disk each would compile the package again
test test-all fuzz: export PYTHONDONTWRITEBYTECODE =

test: $(READY)
	$(PYTEST) --max-cases 2

# lint, quick and slow tests; those of a GPU in one process, and skipped without one; those of the farm one at a time,
# since each starts a broker, a database and several services
test-all: $(READY) lint
	$(PYTEST) -m 'not gpu and not farm and not containers'
	$(BIN)/python -m pytest -m farm tests/farm
	$(BIN)/python -m pytest -m gpu tests/gpu

# build the images and run docker/compose.farm.yaml by podman, as root: apt install podman buildah mmdebstrap runc netavark
# aardvark-dns iptables
containers: $(READY)
	$(BIN)/python -m pytest -m containers tests/containers

# a minute of a hostile client, and random programs; tests/fuzz/load.py fuzz and tests/fuzz/fuzz_programs.py run longer,
# and with other seeds
fuzz: $(READY)
	$(BIN)/python -m pytest -m slow tests/fuzz

# the first minutes on a GPU without one: bench/gpu with the packages of a GPU's image, three minutes (docs/gpu.md)
rehearse: $(READY)
	$(BIN)/python bench/rehearse

# what kernels differ from the committed digests; with REASON="why that is expected" the file is written (docs/conventions.md)
digests: export REASON ?=
digests: $(READY)
	$(BIN)/python tests/support/kernel_digests.py --reason "$$REASON"

# the documentation as a site, in build/site; a warning or a dead link fails
docs: $(READY)
	$(BIN)/mkdocs build

lint: $(READY)
	$(BIN)/ruff check roller_svc tests bench tools examples
	$(BIN)/ruff format --quiet --check roller_svc tests bench tools examples
	$(BIN)/mypy
	$(BIN)/lint-imports

# the page of the service: web/ → roller_svc/service/page/ (docs/explorer.md); needs node and npm
page:
	npm ci --prefix web --ignore-scripts --no-audit --no-fund --loglevel=error
	cd web && node build.mjs

serve: $(READY)
	$(BIN)/roller serve --host 127.0.0.1 --port 8000 --store build/store

wheel: $(READY)
	$(BIN)/python -m pip wheel --quiet --no-deps -w dist . ./bench

clean:
	rm -rf $(VENV) build dist
