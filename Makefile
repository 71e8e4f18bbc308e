# Every target makes its own environment: .venv, which it rebuilds only when pyproject.toml or constraints.txt changes.

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
# Bytecode is kept, whatever the shell says: each of the hundreds of processes would compile us again.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest
SPARK_KINDS := local local-cluster connect standalone
# Only the files that have Spark tests: to collect the whole suite costs each kind ten seconds more.
SPARK_FILES = $$(grep -rl --include='test_*.py' 'mark\.spark' tests)
MATRIX := petastorm pyfunc spark35 spark40 ray240 serve loaders tf216 mxnet oldest newest py310 py312 py313 py314

.DEFAULT_GOAL := help
.PHONY: help demo test .lane-1 .lane-2 test-fast test-gpu test-slow test-matrix notebooks docs docs-version bench check wheel dist clean $(MATRIX:%=matrix-%)

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(or $(wildcard $(READY)),$(VENV)/.demo-ready) ## Spark DataFrame -> two workers -> fitted model, on the handwritten digits
	@$(PY) demo/run.py

# `make test LANES=2` runs both lanes side by side: tests wait more than they compute. On two cores that are busy otherwise, a
# start of Spark then takes longer than its tests allow. What the second lane prints comes when it is done.
LANES := 1
LANE_2 := tests/estimators tests/examples tests/keras tests/lightning tests/tensorflow
IN_LANE := unset MAKEFLAGS MFLAGS MAKELEVEL

test: $(READY) ## everything but the slow tests; a process for each kind of Spark session
	@$(MAKE) --no-print-directory --keep-going --jobs=$(LANES) .lane-1 .lane-2

.lane-1:
	@$(IN_LANE); $(PYTEST) --ignore=tests/house -m "not spark and not slow" $(LANE_2:%=--ignore=%)

.lane-2:
	@$(IN_LANE); failed=0; log=$$(mktemp); { \
		$(PYTEST) -m "not spark and not slow" $(LANE_2) || failed=1; \
		for kind in $(SPARK_KINDS); do \
			echo "--- Spark session kind: $$kind"; \
			$(PYTEST) $(SPARK_FILES) -m "spark and not slow" --spark-master=$$kind || failed=1; \
		done; \
	} >$$log 2>&1; \
	cat $$log; rm $$log; exit $$failed

test-fast: $(READY) ## the tests that need no second process: a minute or so
	@$(PYTEST) --ignore=tests/house -m fast

test-gpu: $(READY) ## the tests that need a GPU: NCCL, the engine's stream, fits
	@$(PYTEST) --ignore=tests/house -m gpu

# pytest exits with 5 where nothing was selected: not every session kind has a slow test.
test-slow: $(READY) ## kill loops, soak, every variant
	@failed=0; \
	$(PYTEST) -m "slow and not spark" || [ $$? -eq 5 ] || failed=1; \
	for kind in $(SPARK_KINDS); do \
		$(PYTEST) $(SPARK_FILES) -m "slow and spark" --spark-master=$$kind || [ $$? -eq 5 ] || failed=1; \
	done; \
	exit $$failed

check: $(READY) ## ruff, mypy (strict), the import layers, and tests/house: cycles, the public API, prose
	@failed=0; \
	$(PY) -m ruff check . || failed=1; \
	$(PY) -m ruff format --check . || failed=1; \
	$(PY) -m mypy || failed=1; \
	$(VENV)/bin/lint-imports || failed=1; \
	$(PYTEST) -q tests/house || failed=1; \
	exit $$failed

wheel: $(READY) ## dist/hvd_cluster-*.whl, for any platform
	@rm -rf build
	@$(PY) -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist

# The same commit gives the same wheel and SBOM. In CI, TAG is the tag that is released.
.venv-release/.ready: constraints.txt
dist: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct)
dist: .venv-release/.ready ## a release in dist/: the wheel, the source archive, and an SBOM of the declared dependencies
	@rm -rf build dist *.egg-info
	@.venv-release/bin/python -m build --no-isolation --outdir dist . >.venv-release/log 2>&1 || { cat .venv-release/log; exit 1; }
	@.venv-release/bin/twine check --strict dist/*
	@version=$$(sed -n 's/^Version: //p' *.egg-info/PKG-INFO); \
	[ "$${TAG:-v$$version}" = "v$$version" ] || { echo "The tag is $$TAG, and hvd_cluster/version.py has $$version"; exit 1; }; \
	sed "s/^dynamic = .*/version = \"$$version\"/" pyproject.toml >.venv-release/pyproject.toml; \
	awk '/^\[/ { skip = /^\[(dev|docs)/ } /^[a-z]/ && !/^hvd-cluster/ && !skip' *.egg-info/requires.txt | sort -u | \
	.venv-release/bin/cyclonedx-py requirements --pyproject .venv-release/pyproject.toml --mc-type library --output-reproducible \
		-o dist/hvd_cluster-$$version.cdx.json - 2>.venv-release/log || { cat .venv-release/log; exit 1; }
	@ls dist

test-matrix: $(MATRIX:%=matrix-%) ## other versions: petastorm beside its own pyarrow, a logged model without us, Spark 3.5 and 4.0, Ray 2.40, Ray Serve, LitData and Mosaic Streaming, TensorFlow 2.16, mxnet beside its own numpy, the oldest and the newest torch, pyarrow, pandas and Lightning, other Pythons

# A row of the matrix: its environment, .venv-ROW, is made from tests/matrix/ROW.txt, and its tests run in either.
matrix-petastorm: $(READY) .venv-petastorm/.ready
	@$(PYTEST) tests/petastorm -m "slow and not spark"

matrix-pyfunc: $(READY) .venv-pyfunc/.ready
	@$(PYTEST) tests/estimators/logged_model/test_log_model.py -m "slow and not spark" -k "matrix"

# Those leave sockets to the garbage collector, and 3.5 imports distutils.
OLD_SPARK := -W ignore::ResourceWarning -W ignore::pytest.PytestUnraisableExceptionWarning -W "ignore:distutils Version"
matrix-spark35 matrix-spark40: matrix-%: .venv-%/.ready
	@failed=0; \
	for kind in local local-cluster $(if $(filter spark40,$*),connect); do \
		PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=1 .venv-$*/bin/python -m pytest tests/spark \
			tests/estimators/test_spark_estimator.py -m "spark and not slow" --spark-master=$$kind $(OLD_SPARK) || failed=1; \
	done; \
	exit $$failed

# That Ray leaves the files of its nodes' output to the garbage collector. test_ray_start.py is left out because `ray start` did
# not come up in this environment, and the small store because that Ray Data fills it before anything is read.
RAY240 := -W ignore::ResourceWarning -W ignore::pytest.PytestUnraisableExceptionWarning
matrix-ray240: .venv-ray240/.ready
	@PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=1 .venv-ray240/bin/python -m pytest tests/ray tests/estimators/ray \
		--ignore=tests/ray/test_ray_start.py $(RAY240) \
		--deselect tests/ray/test_full_store.py::test_a_dataset_larger_than_the_store_streams_through_it_and_past_the_driver

matrix-serve: .venv-serve/.ready
	@PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=1 .venv-serve/bin/python -m pytest tests/estimators/ray/test_serve.py

# The peers of benchmarks/images.py, which pin old versions of other packages.
matrix-loaders: .venv-loaders/.ready
	@PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=1 .venv-loaders/bin/python -m pytest tests/benchmarks/test_images.py

matrix-tf216: .venv-tf216/.ready
	@PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=1 .venv-tf216/bin/python -m pytest tests/tensorflow tests/keras -m "not slow"

matrix-mxnet: .venv-mxnet/.ready
	@OMP_NUM_THREADS=1 .venv-mxnet/bin/python -m pytest tests/mxnet tests/api/test_public_api.py \
		"tests/docs/test_code_blocks.py::test_blocks_run[mxnet.md]"

# Tests of what these releases lack skip themselves, and name it (`needs` in tests/plugins). Tables of other formats need newer
# packages, and torch 2.4 has not all that tests/torch/distributed uses. The examples need the package in the environment.
LIBRARIES := tests/data tests/torch tests/lightning tests/estimators/torch tests/estimators/lightning tests/estimators/run \
	tests/estimators/view tests/estimators/scoring
matrix-oldest: ON_OLDEST := --ignore tests/data/tables --ignore tests/torch/distributed
matrix-oldest matrix-newest: matrix-%: .venv-%/.ready
	@.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=1 .venv-$*/bin/python -m pytest $(LIBRARIES) $(ON_OLDEST) -m "not slow and not spark"

# Other Pythons: the wheel. `pytest` and not `python -m pytest`, which would import the checkout instead. Databricks' runtimes 16.4
# and 17.3 have 3.12, so that row trains too; 3.10 trains in the row oldest. The other rows run what needs no torch.
TORCHLESS := tests/test_topology.py tests/test_settings.py tests/test_errors.py tests/launch/test_placement.py \
	tests/engine/test_negotiation.py tests/engine/test_fusion.py tests/engine/test_tree.py \
	tests/oldpaths/test_table.py tests/rendezvous/test_session.py

matrix-py312: TRAINING := tests/torch/test_ops.py tests/torch/test_functions.py tests/data/reading tests/data/writing \
	tests/data/test_reader_columns.py tests/estimators/torch/test_estimator.py tests/spark/test_run.py
$(filter matrix-py3%,$(MATRIX:%=matrix-%)): matrix-%: $(READY) .venv-%/.ready
	@rm -rf .venv-$*/dist build
	@$(PY) -m build --wheel --no-isolation --outdir .venv-$*/dist . >/dev/null
	@.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall .venv-$*/dist/*.whl
	@.venv-$*/bin/hvdrun --version
	@.venv-$*/bin/pytest $(TORCHLESS)
	@[ -z "$(TRAINING)" ] || OMP_NUM_THREADS=1 .venv-$*/bin/pytest $(TRAINING) -m "not slow"

# Debian 12 has no Python 3.14: if this machine has none, it comes from a later release of Debian.
.venv-py314/.ready: export PATH := $(PATH):$(CURDIR)/.venv-debian-python/usr/bin
.venv-py314/.ready: | .venv-debian-python
.venv-debian-python:
	@tests/matrix/find_python.sh 3.14 >/dev/null 2>&1 || tests/matrix/debian_python.sh 3.14 forky $@ || { rm -rf $@; exit 1; }

.venv-%/.ready: tests/matrix/%.txt
	@python=$$(tests/matrix/find_python.sh $$(sed -n 's/^# python: //p' $<)) || exit 1; \
	echo "Making $(@D) with $$python."; \
	rm -rf $(@D) && $$python -m venv $(@D)
	@$(@D)/bin/python -m pip install --disable-pip-version-check -r $<
	@touch $@

notebooks: $(READY) ## the notebooks, executed; outputs and pictures are kept in them
	@echo "Installing what the notebooks need into $(VENV)."
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[notebook]'
	@OMP_NUM_THREADS=1 $(PY) notebooks/execute.py

docs: $(READY) ## the guides and the API reference as HTML, in site/, and their tests; fails on a broken link
	@echo "Installing what the documentation needs into $(VENV)."
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@$(PY) -m mkdocs build --strict
	@$(PYTEST) tests/docs/test_site.py

docs-version: docs ## the documentation of this version beside those before it, in the local branch gh-pages; nothing is published
	@export PATH=$(abspath $(VENV))/bin:$$PATH; \
	mike deploy --update-aliases $$(python -c "import hvd_cluster; print(hvd_cluster.__version__)") latest && mike set-default latest

bench: $(READY) ## ours and the peers in one run; writes benchmarks/README.md
	@OMP_NUM_THREADS=1 $(PY) -m benchmarks

clean: ## forget the environment and every cache
	@rm -rf $(VENV) .venv-* build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# One install command, so that pip sees the package, its extras and the pins together.
$(READY): pyproject.toml constraints.txt | $(PY)
	@echo "Installing hvd_cluster and what its tests need into $(VENV): 5 GB or more on the disk, which takes many minutes."
	@$(PY) -m pip install --disable-pip-version-check -c constraints.txt -e '.[spark,dev]'
	@touch $@

# What demo/run.py imports. It is part of the above, so a second install adds to the first.
$(VENV)/.demo-ready: pyproject.toml constraints.txt | $(PY)
	@echo "Installing hvd_cluster and what the demo needs into $(VENV): 0.8 GB to fetch, several GB more if pip takes the CUDA build of torch."
	@$(PY) -m pip install --disable-pip-version-check -c constraints.txt -e '.[spark,plot]' scikit-learn
	@touch $@

$(PY):
	@python=$$(tests/matrix/find_python.sh 3.11 3.12 3.13 3.10) || exit 1; \
	echo "Making $(VENV) with $$($$python --version)."; \
	$$python -m venv $(VENV) || { rm -rf $(VENV); echo "No venv: on Debian, apt-get install python3-venv"; exit 1; }
