# The first two commands: `make train` and `make test`. Both build .venv if it is missing, and may be repeated.
PY = .venv/bin/python
CONFIG = configs/laptop.py
RUN = out/laptop
DATA = data/stdlib
# The prompt for the finished run: a signature, and the first sentence of its docstring
PROMPT = 'def read(self, size=-1):\n    """Read and return up to size bytes.'
ALIGN =
SEEDS = 1
STUDY = activations
BOOKS =
KILLS = 100
RUNS = 20
# What the tests and races of a GPU import
IMPORTS = matplotlib, numpy, pyarrow, pytest, safetensors, tiktoken, torch, tqdm, transformers

.PHONY: train node recipe align ablate memorize faults flakes test test-all gpu gpu-race clean

# Five minutes of training on any machine; longer: make train CONFIG="configs/laptop.py --minutes=20"
train: $(RUN)/summary.json
	$(PY) sample.py --init_from=$(RUN) --start="$$(printf $(PROMPT))" --temperature=0.7 --max_new_tokens=120
	@echo "the curve: $(RUN)/loss.png   the log: $(RUN)/log.jsonl   another sample: $(PY) sample.py --init_from=$(RUN) --seed=1"

$(RUN)/summary.json: | $(DATA)/meta.json
	$(PY) train.py $(CONFIG) --out=$(RUN) --data=$(DATA) --resume

$(DATA)/meta.json: | .venv/ready
	$(PY) prepare.py --out=$(DATA)

# Eight GPUs of a node, started again after a failure; their data: configs/node.py. More commands: docs/scale.md
node: .venv/ready
	bash tools/restart.sh out/node .venv/bin/torchrun --standalone --nproc_per_node=8 --shutdown-timeout=600 \
	    --signals-to-handle=SIGTERM,SIGINT,SIGUSR2 train.py configs/node.py --resume

# The whole chain on an invented world, and a report: out/recipe/report.md. SEEDS=3 takes three times as long
recipe: .venv/ready
	. .venv/bin/activate && bash studies/recipe.sh $(SEEDS)

align: .venv/ready
	$(PY) -m studies.align $(ALIGN)

# What each part of Apertus does, with seeds: make ablate STUDY=optimizer (the names in configs/ablations.toml)
ablate: | $(DATA)/meta.json
	$(PY) -m studies.ablate $(STUDY) $(if $(filter-out data/stdlib,$(DATA)),--data=$(DATA))
	$(PY) -m studies.ablate --overview

# What a small model recites, with and without Goldfish: make memorize BOOKS="a.txt b.txt" (else the standard library)
memorize: .venv/ready
	$(PY) -m studies.memorize $(BOOKS)

# Inject faults into runs, KILLS of them kill -9, and write results/faults; 100 kills take ten minutes
faults: .venv/tests
	$(PY) tests/faults/suite.py --kills=$(KILLS) --record=results/faults

# The tests of several processes, RUNS times in a row, until one fails
flakes: .venv/tests
	for i in $$(seq $(RUNS)); do OMP_NUM_THREADS=1 $(PY) -m pytest -q tests/test_parallel.py tests/faults || exit 1; done

test: .venv/tests
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not alone"

# The slow tests too
test-all: test
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m slow
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -m alone tests/test_lesson.py

# On a GPU: does it compute what a CPU does, and how fast is it? The records of the races: out/bench. Where .venv or
# python3 has all packages it installs nothing, so it needs no network
gpu:
	@for python in $(PY) python3; do \
		if $$python -c "import $(IMPORTS)" 2> /dev/null; then exec $(MAKE) gpu-race PY=$$python; fi; \
	done; $(MAKE) .venv/tests && $(MAKE) gpu-race

gpu-race:
	$(PY) -m pytest -q tests/test_cuda.py
	$(PY) -m tools.bench train --device=cuda --threads=0 --impls="hf compile"
	$(PY) -m tools.bench decode --device=cuda --threads=0 --preset=8b-stack
	$(PY) -m tools.bench optim --device=cuda --threads=0

.venv/ready: requirements.txt
	test -x $(PY) || python3 -m venv .venv
	$(PY) -m pip install -q -r requirements.txt
	touch $@

.venv/tests: requirements-test.txt .venv/ready
	$(PY) -m pip install -q -r requirements-test.txt
	$(PY) -m pip install -q --no-deps mistral-common==1.13.1
	touch $@

clean:
	rm -rf .venv out data
