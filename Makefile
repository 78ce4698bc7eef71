# Two commands for users: `make relay` and `make test`. Each sets up .venv by itself.

PYTHON ?= python3
BIN := .venv/bin
# By a path file: mypy, pyright and editors follow no import hook, which setuptools installs by default.
EDITABLE := --config-settings editable_mode=compat -e

.PHONY: relay test test-all test-programs test-versions lint types docs notebooks bench compilers maxtext clean

relay: .venv/.installed
	$(BIN)/twinshard relay

# Three processes for two cores, since a test of ranks waits for a quarter of its time; each has rank processes of its own:
# about 9 GB. A file's tests share compiled steps, so each process begins with a third of the files in a row. By whole files
# one process would wait for another five minutes of fifteen.
test: .venv/.installed
	$(BIN)/python -m pytest -n 3 --dist worksteal

# Everything: all cases of the matrices, hypothesis's full number of examples, and what takes minutes, such as the 1 GB
# conversions and environments that hold only one framework.
test-all: .venv/.installed lint types test-programs
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "slow or not slow" --hypothesis-profile all

# Programs of other packages that call FSDP2 by themselves, in an environment of their own (3 GB): with accelerate there,
# transformers loads models otherwise than without it. torchtune's old torchao, which peft refuses, is on the path for
# torchtune only, as is its old antlr4, which constraints.txt does not have: moto needs a newer antlr4. axolotl and verl are
# read, not run.
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

# MaxText, whose own trees tests/mapping/test_families_maxtext.py compares with (2 GB). It needs Python 3.12, which
# PYTHON_MAXTEXT names where it is not found.
maxtext: .venv-maxtext/.installed
.venv-maxtext/.installed: tests/support/bridge/maxtext.txt tests/support/bridge/maxtext_0_2_4.txt \
    tests/support/bridge/maxtext_needs.txt
	python="$$($(PYTHON) tests/support/versions.py --interpreter maxtext)" && "$$python" -m venv .venv-maxtext
	.venv-maxtext/bin/python -m pip install --quiet -r tests/support/bridge/maxtext_needs.txt
	.venv-maxtext/bin/python -m pip install --quiet --no-deps --require-hashes -r tests/support/bridge/maxtext.txt
	.venv-maxtext/bin/python -m pip install --quiet --no-deps --require-hashes --upgrade \
	  --target .venv-maxtext/maxtext-0.2.4 -r tests/support/bridge/maxtext_0_2_4.txt
	touch $@

# Both ends of the versions that pyproject.toml allows, each in an environment of its own (several GB with CUDA's libraries).
# PYTHON_LOW and PYTHON_NEW name the interpreters, Python 3.11 and 3.14, where they are not found.
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

# The compilers of GPUs and TPUs, 1.1 GB, with which tests/jax_impl/compilers is not skipped. They lie apart: in the
# environment itself every program with JAX would look for their devices, and say that there are none.
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
