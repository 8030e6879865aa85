# Every target sets up .venv itself; python3, pip and make are all a machine needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.complete

.PHONY: venv demo test check check-fast check-code check-lost check-others bench lab format clean

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[demo,tls,tensorboard,bench,dev]"
	@touch $@

demo: venv
	$(BIN)/pliant demo

# Everything: style, types, all tests.
test: check

check: venv
	sh tests/packages.sh
	$(MAKE) --jobs=3 --output-sync=target check-code check-lost check-others

# Tests with real processes wait half of the time: three lots of about the same length run side by side.
BESIDE := $(patsubst %,tests/process/test_%.py,examples groups training trust)
LOST := $(patsubst %,tests/process/test_%.py,agents bad_input chaos deaths replay)

check-code: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/python -m pytest --ignore=tests/process
	$(BIN)/python -m pytest $(BESIDE)

check-lost: venv
	$(BIN)/python -m pytest $(LOST)

check-others: venv
	$(BIN)/python -m pytest tests/process $(patsubst %,--ignore=%,$(BESIDE) $(LOST))

# Style, types and the tests that need no second process.
check-fast: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
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
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis runs
