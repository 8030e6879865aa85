# Every target sets up .venv itself; python3, pip and make are all a machine needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.complete

.PHONY: venv demo test check check-fast check-style seconds soak bench lab format clean

venv: $(STAMP)

COMPILED := setup.py $(wildcard src/pliant/tensors/_sweep*.[ch])

$(STAMP): pyproject.toml constraints.txt $(COMPILED)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[demo,tls,tensorboard,bench,dev]"
	@touch $@

demo: venv
	$(BIN)/pliant demo

# Everything: style, types, all tests that are not long searches.
test: check

check: venv
	sh tests/packages.sh
	$(MAKE) --jobs=$(words $(LOTS)) --output-sync=target $(patsubst %,check-lot-%,$(LOTS))

# Tests with real processes wait half of the time: lots of about the same length run side by side. tests/lots.py says
# what is in which; a new test file is in one of them without an entry there.
LOTS := 1 2 3 4

check-style: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

check-lot-1: check-style

check-lot-%: venv
	$(BIN)/python tests/lots.py $* $(words $(LOTS))

# How long every part of the last `make test` took, as tests/lots.py wants to know it.
seconds: venv
	$(BIN)/python tests/lots.py .pytest_cache/lot-*.xml

# Long searches: fresh seeds of the simulator, drawn training scripts (RUNS: as real processes), hostile input, everything
# that is marked soak. What fails prints the command that repeats it. SEEDS=200000 INPUTS=1000000 for a night.
SEEDS   ?= 20000
START   ?= $(shell date +%s)000
SCRIPTS ?= 5000
RUNS    ?= 200
INPUTS  ?= 50000

soak: venv
	$(BIN)/python -m pliant.testing --seeds $(SEEDS) --start $(START)
	$(BIN)/python -m pliant.testing habits --scripts $(SCRIPTS) --seed $(START)
	$(BIN)/python -m pliant.testing habits --processes $(RUNS) --seed $(START)
	SEEDS=$(SEEDS) INPUTS=$(INPUTS) $(BIN)/python -m pytest -m soak --ignore=tests/process
	SEEDS=$(SEEDS) INPUTS=$(INPUTS) $(BIN)/python -m pytest -m soak tests/process || test $$? -eq 5

# Style, types and the tests that need no second process.
check-fast: check-style
	$(BIN)/python -m pytest -m "not slow" --ignore=tests/process
	$(BIN)/python -m pytest -m "not slow" tests/process

# torchft's own requirements would replace torch, hence --no-deps in benchmarks/install.sh.
bench: venv
	PATH="$(CURDIR)/$(BIN):$$PATH" sh benchmarks/install.sh
	$(BIN)/python -m benchmarks harvest --json docs/results/harvest.json
	$(BIN)/python -m benchmarks overhead --json docs/results/overhead.json
	$(BIN)/python -m benchmarks recovery --json docs/results/recovery.json
	$(BIN)/python -m benchmarks convergence --json docs/results/convergence.json

# Accuracy on real data, in one process; the trace of spot GPUs is a CSV file named in PLIANT_SPOT_TRACE, else made up.
LAB := elastic-accuracy:sgd elastic-accuracy:nesterov elastic-accuracy:adamw delay:cnn-sgd delay:cnn-adamw \
       delay:batchnorm-sgd delay:transformer-adamw

lab: venv
	for part in $(LAB); do name=$${part%%:*}; only=$${part#*:}; \
	  $(BIN)/python -m benchmarks $$name --only $$(echo $$only | tr - ' ') --json docs/results/$$name-$$only.json; done
	$(BIN)/python -m benchmarks elastic-processes --json docs/results/elastic-processes.json
	$(BIN)/python -m benchmarks scaling-theory --json docs/results/scaling-theory.json
	$(BIN)/python -m benchmarks publish

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist src/*.egg-info src/pliant/tensors/*.so .pytest_cache .ruff_cache .hypothesis runs
