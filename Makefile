# Order only: what each target runs is decided in pipeline/make.py, and what an installation needs in pipeline/install.py.
PYTHON ?= python3
VENV ?= .venv
RECIPE ?=
NPROC ?=
REPLICAS ?=
PORT ?=
IMAGE ?=
ARGS ?=
# From the command line only: an environment's own DATA is about something else.
ONNX :=
DATA :=
FORCE :=

# Values reach Python through the environment, untouched: neither make nor the shell reads `$`, quotes or spaces in them.
VALUES := PYTHON VENV RECIPE ONNX DATA NPROC REPLICAS PORT IMAGE FORCE ARGS
$(foreach name,$(VALUES),$(eval override $(name) := $$(value $(name))))
export $(VALUES)

SHELL := /bin/sh
# exec: the SIGTERM that make passes on is for Python, not for a shell around it.
RUN := @exec "$$VENV/bin/python" -m pipeline.make
# Without an environment nothing was ever started, and looking at nothing must not install 7 GB.
ASK := @test -x "$$VENV/bin/python" || { echo "nothing is installed yet, so nothing runs: make install"; exit 0; }; \
	exec "$$VENV/bin/python" -m pipeline.make

.DEFAULT_GOAL := help
# `make train compress serve` runs in that order, also under -j.
.NOTPARALLEL:
.PHONY: help install train compress package serve stop status logs predict verify bench compat check test test-kill clean distclean

help: ## Print every target
	@printf 'make TARGET... [RECIPE=digits] [NPROC=4] [REPLICAS=2] [PORT=8080] [ARGS="--train.epochs 3"]\n\n'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 14
	@printf '\n  RECIPE    name of a recipe in pipeline/recipes, or the path of a .toml file\n'
	@printf '  ONNX      a finished classifier to compress, package and serve instead of training one\n'
	@printf '  DATA      your images: DATA/train/CLASS/*.jpg and, if there are, DATA/val and DATA/test\n'
	@printf '  NPROC     training processes; REPLICAS and PORT shape the served stack\n'
	@printf '  FORCE     1: make the last stage of the target again although it is there\n'
	@printf '  ARGS      more for the command behind the target, as you would type it in a shell; not for stop\n'
	@printf '  PYTHON    the Python (3.11-3.13) that makes the environment; VENV where it stands (.venv)\n'

install: ## Create .venv with the pinned dependencies (about 7 GB); nothing when they are there
	@"$$PYTHON" -I pipeline/install.py "$$VENV"

train: install ## Train the recipe's model on NPROC processes
	$(RUN) train

compress: install ## Prune, recover, quantize, export, measure each candidate and print the table
	$(RUN) compress

package: install ## Build the .mar archive
	$(RUN) package

serve: install ## Build what is missing, start REPLICAS replicas behind PORT and send one held-out image
	$(RUN) serve

stop: ## Stop the served stack on PORT
	$(ASK) stop

status: ## Show replicas, balancer, model digest and uptime
	$(ASK) status

logs: ## Show the served stack's logs
	$(ASK) logs

predict: install ## Send IMAGE=path to the served stack and print the answer
	$(RUN) predict

verify: install ## Serve, send the whole test split and compare every hand-over from PyTorch to HTTP
	$(RUN) verify

bench: install ## Measure accuracy, bytes and CPU time per image against the baselines
	$(RUN) bench

compat: install ## Prune, export and measure small torchvision models of every family; ARGS=--all or names
	@exec "$$VENV/bin/python" -m pipeline.bench.compat $$ARGS

check: install ## Formatting, lint and types: what CI asks for
	@"$$VENV/bin/python" -m ruff format --check .
	@"$$VENV/bin/python" -m ruff check .
	@"$$VENV/bin/python" -m mypy

test: install ## Run the tests; ARGS="-m 'not e2e'" for the short ones
	$(RUN) test

test-kill: install ## Kill every stage at 20 random instants and compare the bytes with an uninterrupted run (long)
	@QUARTET_KILLS=20 "$$VENV/bin/python" -m pytest tests/e2e/test_chain.py -k killed

clean: stop ## Stop the stack and delete everything in artifacts/
	@find artifacts -mindepth 1 -maxdepth 1 ! -name README.md -exec rm -rf {} +

distclean: clean ## Also delete .venv and every cache
	@rm -rf .venv quartet.egg-info .mypy_cache .ruff_cache .pytest_cache
	@find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
