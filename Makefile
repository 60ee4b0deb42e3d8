# Thin on purpose: each target is a name for an xtask command (`cargo xtask help`), after `setup` has made sure that the
# machine has what they need. The same on a developer's machine and in CI.

# `make run ARGS='--vcpus 8'`, `make run ARCH=aarch64`, `make test ARGS='unit loom'`
ARGS ?=
ARCH ?=

.PHONY: help setup build run image parent parent-stock parent-debian parent-libvirt parent-tests test bench
.DEFAULT_GOAL := help

help:
	@echo 'make run     boot the default VM: Debian on 4 vCPUs, on 2 CPUs (ARGS: see "dunlin run --help"; ARCH=aarch64)'
	@echo 'make image   write target/dunlin.iso: the default VM for any PC, from a stick or a CD (ARGS: see "dunlin image --help"; ARCH=aarch64)'
	@echo 'make parent  leave kernel and programs of a parent VM in target/dunlin (the kernel takes a quarter of an hour, once)'
	@echo 'make parent-stock   the same, with a second kernel whose options are like those of Fedora'"'"'s (another quarter of an hour, once)'
	@echo 'make parent-debian   as make parent, and a disk for its guests: a small Debian with gcc'
	@echo 'make parent-libvirt   as make parent, and a root file system for the parent: Debian with libvirt'
	@echo 'make parent-tests   try in a parent VM what it can do; takes long (ARGS: --quick, names of tests, see "cargo xtask parent-tests --help")'
	@echo 'make test    all that CI runs (ARGS: names of steps, see "cargo xtask test --list")'
	@echo 'make bench   measure all, and make a page of it, in a quarter of an hour (docs/measuring.md; ARGS: see "dunlin bench --help")'
	@echo 'make build   leave the tool at target/release/dunlin'

setup:
	@ARCH=$(ARCH) xtask/setup.sh

build: setup
	@cargo xtask build

run: setup
	@cargo xtask run $(if $(ARCH),--arch $(ARCH)) $(ARGS)

image:
	@ARCH=$(ARCH) xtask/setup.sh image
	@cargo xtask image $(if $(ARCH),--arch $(ARCH)) $(ARGS)

parent:
	@xtask/setup.sh parent
	@cargo xtask parent

parent-stock:
	@xtask/setup.sh parent
	@cargo xtask parent-stock

parent-debian:
	@xtask/setup.sh parent
	@cargo xtask parent-debian

parent-libvirt:
	@xtask/setup.sh parent libvirt
	@cargo xtask parent-libvirt

parent-tests:
	@xtask/setup.sh parent libvirt
	@cargo xtask parent-tests $(ARGS)

test:
	@ARCH=aarch64 xtask/setup.sh
	@cargo xtask test $(ARGS)

bench:
	@ARCH=aarch64 xtask/setup.sh
	@cargo xtask bench $(ARGS)
