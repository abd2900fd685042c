# Everything is made under the checkout and stamped: running a target again is safe and fast.
# Needed beforehand: Python 3.11 or later (with venv), Java 17 or later. PYTHON and JAVA_HOME choose.

.DEFAULT_GOAL := help
SHELL := /bin/sh
.DELETE_ON_ERROR:
# Hundreds of processes that tests start import the same modules: each is compiled once.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PROTO := src/tailrace/sources/vitess/connection/vstream.proto
KERNELS := $(shell grep -rlE 'njit|@compiled' src tools --include='*.py')
BENCHMARKS := capture snapshot tables decode convert replay e2e stages idle engine records realtime subscriptions latency kafka kafka_peer kafka_spark join join_spark vitess_rows
# Of `make torture`; empty: a hundred for each sink, two hundred for Kafka, an hour of chaos, five hundred
# fall-backs of real time for a handler and for Kafka. CYCLES=10: ten of each, and ten minutes.
CYCLES :=
# Releases of Vitess that are built, and tested.
VITESS := 22 24
# Processes that run tests side by side. The tests wait more than they work: with three of them, two cores are idle for
# a quarter of the time. Each has servers of its own and takes up to 3 GB. WORKERS=0 runs them one by one, in files' order.
WORKERS := 4
PYTEST = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# What CI runs, but for the cluster of Vitess.
ALL := not torture and not vitess
# What needs no server works more than it waits. The house rules are a part of `make check`.
PYTEST_FAST := --fast -n 3 --dist worksteal --ignore tests/test_tidy.py

.PHONY: help demo test test-fast test-vitess torture-vitess matrix check bench bench-vitess torture setup brokers browser vitess \
    debezium bench-peers lock clean java

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

demo: setup ## A small shop, its pipeline killed in the middle, and the proof that nothing got lost.
	$(BIN)/tailrace demo --dir .demo

test: for-tests ## The test suite, without the tests that take long: some fifteen minutes.
	$(BIN)/python -m pytest $(PYTEST) $(PYTEST_ARGS)

test-fast: setup ## The tests that need no server and are quick: a minute.
	$(BIN)/python -m pytest $(PYTEST_FAST) $(PYTEST_ARGS)

test-vitess: setup vitess ## The tests that need a Vitess cluster, on each release (VITESS=24: on that one).
	@for release in $(VITESS); do echo "== Vitess $$release"; TAILRACE_VITESS=$$release $(BIN)/python -m pytest \
	    -m "vitess and not torture" tests/vitess tests/torture/test_vitess.py $(PYTEST_ARGS) || exit 1; done

torture-vitess bench-vitess: VITESS := 22
torture-vitess: setup vitess ## Thirty random campaigns on a keyspace that is resharded; an hour or two.
	$(BIN)/python -m pytest -m "vitess and torture" tests/torture/test_vitess.py $(PYTEST_ARGS)

matrix: for-tests ## The whole test suite, with what a server's version can change on 15, 16 and 18.
	TAILRACE_REALTIME_FALLS=5 $(BIN)/python scripts/run_matrix.py $(PYTEST) -m "$(ALL)" $(PYTEST_ARGS)

check: setup ## Lint, types, layers, documents.
	$(BIN)/ruff check src tools tests scripts
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_docs.py
	$(BIN)/python scripts/generate_docs.py --check
	$(BIN)/python -m pytest -q -n 0 tests/test_tidy.py

bench: setup brokers bench-peers ## Every benchmark, each with its ratio and its limit.
	@for name in $(BENCHMARKS); do $(BIN)/tailrace bench $$name || exit 1; done

bench-vitess: setup vitess $(STAMPS)/debezium-vitess ## The benchmark that needs a Vitess cluster, with its peer.
	$(BIN)/tailrace bench vitess

torture: for-tests ## Kill cycles at every failpoint, for each sink (CYCLES=10: fewer); all random examples.
	TAILRACE_EXAMPLES=100 $(BIN)/python -m pytest $(PYTEST) -m "$(ALL)" $$(grep -rlE 'from hypothesis|support.examples' tests --include='test_*.py')
	PYTHONPATH=. $(BIN)/python -m tests.support.torture.run $(if $(CYCLES),--cycles $(CYCLES))
	PYTHONPATH=. $(BIN)/python -m tests.support.torture.kafka $(if $(CYCLES),--cycles $(CYCLES))
	PYTHONPATH=. $(BIN)/python -m tests.support.torture.chaos $(if $(CYCLES),--minutes $(CYCLES))
	TAILRACE_REALTIME_FALLS=$(or $(CYCLES),500) $(BIN)/python -m pytest -m ci tests/torture/test_realtime.py

setup: $(STAMPS)/jars $(STAMPS)/kernels ## Make .venv, fetch Delta's jars, compile the kernels.

brokers: $(STAMPS)/kafka ## Fetch Kafka, which the tests and benchmarks of the Kafka sink start.

vitess: $(STAMPS)/venv ## Build Vitess, which its tests start; needs Go, 20 minutes and 6 GB the first time.
	$(BIN)/python scripts/make_vitess.py $(VITESS)

browser: ## Install Chromium, in which the page of examples/ is tested (as root).
	@sh scripts/install_browser.sh

for-tests: setup brokers $(STAMPS)/debezium $(STAMPS)/classes

bench-peers: $(STAMPS)/debezium $(STAMPS)/spark-kafka ## Fetch the peers of benchmarks: Debezium, Spark's Kafka sink.

clean: ## Remove all that was made.
	rm -rf $(VENV) .cache .demo .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf build dist spark-warehouse
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

lock: setup ## Choose the newest allowed versions of all dependencies and write them down with their hashes.
	$(BIN)/uv pip compile --quiet --upgrade --generate-hashes --universal --python-version 3.11 \
	    --extra demo --extra subscriptions --extra vitess --group dev --no-emit-index-url --no-emit-find-links \
	    --custom-compile-command "make lock" --output-file requirements.lock pyproject.toml
	$(BIN)/python scripts/fetch_jars.py --lock delta kafka spark-kafka debezium debezium-vitess vitess

# Java comes first: a machine without it is told so before anything is downloaded.
java:
	@sh scripts/check_java.sh

$(STAMPS)/venv: requirements.lock pyproject.toml hatch_build.py $(PROTO) | java
	@python=$$(sh scripts/find_python.sh) && $$python -m venv $(VENV)
	@echo "installing the locked packages into $(VENV) (the first time: some 700 MB, minutes)"
	@# What is imported is compiled then: all of it would take as long as the installation.
	$(PIP) install --no-compile --require-hashes -r requirements.lock
	$(PIP) install --no-deps --no-build-isolation --editable . --editable tools
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/jars: jars.lock scripts/ivy.xml $(STAMPS)/venv
	$(BIN)/python scripts/fetch_jars.py delta
	@touch $@

$(STAMPS)/classes: scripts/make_class_archive.py $(STAMPS)/jars $(STAMPS)/kafka
	$(BIN)/python scripts/make_class_archive.py spark
	$(BIN)/python scripts/make_class_archive.py kafka
	@touch $@

# One set of jars after the other, as they share a cache, beside the kernels (`make -j2`).
$(STAMPS)/kafka: jars-kafka.lock scripts/ivy-kafka.xml $(STAMPS)/venv | $(STAMPS)/jars
	$(BIN)/python scripts/fetch_jars.py kafka
	@touch $@

$(STAMPS)/debezium: jars-debezium.lock scripts/ivy-debezium.xml $(STAMPS)/venv | $(STAMPS)/kafka
	$(BIN)/python scripts/fetch_jars.py debezium
	@touch $@

$(STAMPS)/debezium-vitess: jars-debezium-vitess.lock scripts/ivy-debezium-vitess.xml $(STAMPS)/venv
	$(BIN)/python scripts/fetch_jars.py debezium-vitess
	@touch $@

$(STAMPS)/spark-kafka: jars-spark-kafka.lock scripts/ivy-spark-kafka.xml $(STAMPS)/venv | $(STAMPS)/debezium
	$(BIN)/python scripts/fetch_jars.py spark-kafka
	@touch $@

# numba does not see that a kernel which another one calls has changed: all are compiled again.
$(STAMPS)/kernels: $(KERNELS) src/tailrace/warm.py $(STAMPS)/venv
	@find src tools -name '*.nb[ic]' -delete
	$(BIN)/python -m tailrace.warm
	@touch $@
