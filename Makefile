# Each target is a script of the same name in scripts/; that is where the work is described.
.DEFAULT_GOAL := help
.PHONY: help demo test check build bench chaos setup

help:
	@echo 'make demo    build, then check up a git repository on a three-node cluster (REPO=path, KEEP=1)'
	@echo 'make test    everything: format, lints and every test, with RocksDB'
	@echo 'make check   the quick part: format, lints and every test that needs no RocksDB'
	@echo 'make build   the binaries agent-reach and reach-demo'
	@echo 'make bench   the yardstick, side by side with NATS JetStream and etcd (QUICK=1, SECS=, REPS=, SYSTEMS=, JSON=file)'
	@echo 'make chaos   every fault we know, seeded, under load, for SECS=600 (SEED=, KEEP=1)'
	@echo 'make setup   only what the others do first: system packages and the Rust toolchain'
	@echo
	@echo 'The first build compiles RocksDB once for this machine (about 12 minutes on two idle cores).'

demo:
	@REPO='$(REPO)' KEEP='$(KEEP)' scripts/demo.sh

chaos:
	@SECS='$(SECS)' SEED='$(SEED)' KEEP='$(KEEP)' scripts/chaos.sh

test check build bench setup:
	@scripts/$@.sh
