# Thin on purpose: each target is a name for an xtask command (`cargo xtask help`), after `setup` has made sure that the
# machine has what they need. The same on a developer's machine and in CI.

# `make run ARGS='--vcpus 8'`, `make test ARGS='unit loom'`
ARGS ?=

.PHONY: help setup build run test bench
.DEFAULT_GOAL := help

help:
	@echo 'make run     boot the default VM: Debian on 4 vCPUs, on 2 CPUs (ARGS: see "dunlin run --help")'
	@echo 'make test    all that CI runs (ARGS: names of steps, see "cargo xtask test --list")'
	@echo 'make bench   measure (docs/measuring.md)'
	@echo 'make build   leave the tool at target/release/dunlin'

setup:
	@xtask/setup.sh

build: setup
	@cargo xtask build

run: setup
	@cargo xtask run $(ARGS)

test: setup
	@cargo xtask test $(ARGS)

bench: setup
	@cargo xtask bench $(ARGS)
