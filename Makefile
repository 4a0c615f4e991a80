# Every line calls `python -m course …`, so nothing here is needed where there is no make.
# Options go in ARGS:  make run ARGS="15-01 --save"     another Python:  make run PYTHON=python3.12
# Submissions:  make grade SUBMISSIONS=folder
# Two targets do more than the command alone: `make data` fetches all (--fetch all), `make lint` runs ruff too (--ruff),
# as CI and pre-commit do.
PYTHON ?= python3
ARGS ?=

.PHONY: help setup run test lab workbook release site grade data lint mutate new clean

help:
	@$(PYTHON) -m course help $(ARGS)

setup:
	@$(PYTHON) -m course setup $(ARGS)

run:
	@$(PYTHON) -m course run $(ARGS)

test:
	@$(PYTHON) -m course test $(ARGS)

lab:
	@$(PYTHON) -m course lab $(ARGS)

workbook:
	@$(PYTHON) -m course workbook $(ARGS)

release:
	@$(PYTHON) -m course release $(ARGS)

site:
	@$(PYTHON) -m course site $(ARGS)

grade:
	@$(PYTHON) -m course grade "$(SUBMISSIONS)" $(ARGS)

data:
	@$(PYTHON) -m course data --fetch all $(ARGS)

lint:
	@$(PYTHON) -m course lint --ruff $(ARGS)

mutate:
	@$(PYTHON) -m course mutate $(ARGS)

new:
	@$(PYTHON) -m course new $(ARGS)

clean:
	@$(PYTHON) -m course clean $(ARGS)
