# Users need two commands: `make relay` and `make test`. Each sets up .venv by itself.

PYTHON ?= python3
BIN := .venv/bin
# An editable install by a path file. By default setuptools installs an import hook, which mypy, pyright and editors ignore.
EDITABLE := --config-settings editable_mode=compat -e

# Without bytecode on disk, each test process compiles the tests and each command the product again: 10 % of the tests' time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: relay test test-all test-programs test-versions lint types docs notebooks bench compilers maxtext clean

relay: .venv/.installed
	$(BIN)/twinshard relay

# Three processes for two cores, because tests with ranks wait for a quarter of their time. Each process has its own rank
# processes; all need about 9 GB. Four processes need 12 GB and save 5 %. Tests of a file share compiled steps, so each process
# begins with a third of the files in a row and then takes tests from the others. With whole files, one process would wait five
# of fifteen minutes for the others.
test: .venv/.installed
	$(BIN)/python -m pytest -n 3 --dist worksteal

# Everything: all cases of the matrices, all of hypothesis's examples, and tests that take minutes, such as conversions of
# 1 GB and environments with only one framework.
test-all: .venv/.installed lint types test-programs
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "slow or not slow" --hypothesis-profile all

# Public programs that call FSDP2 themselves, in their own environment (3 GB), because transformers loads models differently
# if accelerate is installed. torchtune needs an old torchao, which peft refuses, and an old antlr4, which conflicts with
# moto's. Both are on the path for torchtune only. The tests read axolotl and verl but do not run them.
PROGRAMS := .venv-programs/bin/python
test-programs: .venv-programs/.installed
	$(PROGRAMS) -m pytest -n 0 -m slow tests/torch_impl/programs --ignore tests/torch_impl/programs/test_torchtune.py
	PYTHONPATH=$(CURDIR)/.venv-programs/torchtune $(PROGRAMS) -m pytest -n 0 -m slow \
	  tests/torch_impl/programs/test_torchtune.py

.venv-programs/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-programs
	$(PROGRAMS) -m pip install --quiet -c constraints.txt $(EDITABLE) ".[programs]"
	grep -v '^antlr4' constraints.txt > .venv-programs/constraints.txt
	for extra in torchtune program-sources; do \
	  $(PROGRAMS) -c "import sys, tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
	    print(*project['optional-dependencies'][sys.argv[1]], sep='\n')" $$extra > .venv-programs/$$extra.txt && \
	  $(PROGRAMS) -m pip install --quiet --no-deps --upgrade -c .venv-programs/constraints.txt \
	    --target .venv-programs/$$extra -r .venv-programs/$$extra.txt || exit 1; \
	done
	touch $@

# MaxText (2 GB), for the comparison in tests/mapping/test_families_maxtext.py. MaxText needs Python 3.12. If make does not
# find Python 3.12, name it by PYTHON_MAXTEXT.
maxtext: .venv-maxtext/.installed
.venv-maxtext/.installed: tests/support/bridge/maxtext.txt tests/support/bridge/maxtext_0_2_4.txt \
    tests/support/bridge/maxtext_needs.txt
	python="$$($(PYTHON) tests/support/versions.py --interpreter maxtext)" && "$$python" -m venv .venv-maxtext
	.venv-maxtext/bin/python -m pip install --quiet -r tests/support/bridge/maxtext_needs.txt
	.venv-maxtext/bin/python -m pip install --quiet --no-deps --require-hashes -r tests/support/bridge/maxtext.txt
	.venv-maxtext/bin/python -m pip install --quiet --no-deps --require-hashes --upgrade \
	  --target .venv-maxtext/maxtext-0.2.4 -r tests/support/bridge/maxtext_0_2_4.txt
	touch $@

# The lowest and the newest versions that pyproject.toml allows, each in its own environment (several GB with CUDA's
# libraries). If make does not find Python 3.11 and 3.14, name them by PYTHON_LOW and PYTHON_NEW.
ENDS ?= low new
test-versions:
	$(PYTHON) tests/support/versions.py $(ENDS)

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.installed
	$(BIN)/mypy

# The documentation site, in build/docs. It needs no framework and no network; links to other sites are listed in
# build/docs/external-links.txt.
DOCS := .venv-docs/bin/python
docs: .venv-docs/.installed
	rm -rf build/docs
	$(DOCS) -m sphinx -W --keep-going -n -q -E -b html -c docs -d build/doctrees $(DOCS_OPTIONS) . build/docs
	$(DOCS) docs/check_site.py build/docs

.venv-docs/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	$(DOCS) -m pip install --quiet -c constraints.txt $(EDITABLE) ".[docs]"
	touch $@

notebooks: .venv/.installed
	$(BIN)/python -m tests.support.notebooks

bench: .venv/.compilers
	$(BIN)/python -m tests.bench.bench_convert
	$(BIN)/python -m tests.bench.bench_small_tensors
	$(BIN)/python -m tests.bench.bench_bucket
	$(BIN)/python -m tests.bench.bench_workers
	$(BIN)/python -m tests.bench.bench_layout --speed
	$(BIN)/python -m tests.bench.bench_torch
	$(BIN)/python -m tests.bench.bench_jax
	$(BIN)/python -m tests.bench.bench_states
	$(BIN)/python -m tests.bench.bench_parity --only gpt2 --steps 2
	$(BIN)/python -m tests.bench.bench_compilers --target h100:8,h100:64

# XLA's compilers for GPUs and TPUs (1.1 GB). Without them the tests in tests/jax_impl/compilers skip. They have their own
# folder: inside the environment, every JAX program would look for their devices and warn that there are none.
compilers: .venv/.compilers

.venv/.compilers: .venv/.installed
	$(BIN)/python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
	  extras = project['optional-dependencies']; \
	  print(*extras['gpu-compiler'], *extras['tpu-compiler'], sep='\n')" > .venv/compilers.txt
	$(BIN)/python -m pip install --quiet --no-deps --upgrade -c constraints.txt --target .venv/compilers -r .venv/compilers.txt
	touch $@

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt $(EDITABLE) ".[all,dev]"
	touch $@

clean:
	rm -rf .venv .venv-low .venv-new .venv-programs .venv-maxtext .venv-docs build/docs build/doctrees runs
