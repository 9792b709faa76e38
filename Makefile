# The first two commands: `make train` and `make test`. Both build .venv if it is missing, and may be repeated.
PY = .venv/bin/python
GPU_PY = .gpuenv/bin/python
MISTRAL = mistral-common==1.13.1
CONFIG = configs/laptop.py
RUN = out/laptop
DATA = data/stdlib
# What the finished run goes on from: a signature, and the first sentence of its docstring
PROMPT = 'def read(self, size=-1):\n    """Read and return up to size bytes.'
ALIGN =
SEEDS = 1
STUDY = activations
BOOKS =
KILLS = 500
RUNS = 20
MINUTES = 0
MUTANTS =
ONLY =

.PHONY: train recipe align ablate memorize faults flakes mutants test gpu gpu-dry clean

# Five minutes of training on any machine; longer: make train CONFIG="configs/laptop.py --minutes=20". One that
# multiplies in bf16 reads five million tokens and more in that time, enough for four layers: --n_layer=4
train: $(RUN)/summary.json
	$(PY) sample.py --init_from=$(RUN) --start="$$(printf $(PROMPT))" --temperature=0.7 --max_new_tokens=120
	@echo "the curve: $(RUN)/loss.png   the log: $(RUN)/log.jsonl   another sample: $(PY) sample.py --init_from=$(RUN) --seed=1"

$(RUN)/summary.json: | $(DATA)/meta.json
	$(PY) train.py $(CONFIG) --out=$(RUN) --data=$(DATA) --resume

$(DATA)/meta.json: | .venv/ready
	$(PY) prepare.py --out=$(DATA)

# The whole chain on an invented world, and a page of what came of it: out/recipe/report.md. SEEDS=3: three times as long
recipe: .venv/ready
	$(PY) -m studies.recipe --seeds=$(SEEDS)

align: .venv/ready
	$(PY) -m studies.digits $(ALIGN)

# What each part of Apertus does, with seeds: make ablate STUDY=optimizer (the names in configs/ablations/)
ablate: | $(DATA)/meta.json
	$(PY) -m studies.ablate configs/ablations/$(STUDY).py --data=$(DATA)
	$(PY) -m studies.ablate --overview

# What a small model recites, with and without Goldfish: make memorize BOOKS="a.txt b.txt" (nothing: the standard library)
memorize: .venv/ready
	$(PY) -m studies.memorize $(BOOKS)

# Everything that can go wrong with a run, done to it on purpose: results/faults. KILLS more than the record has; 500 take half an hour
faults: .venv/ready
	$(PY) tests/faults/suite.py --kills=$(KILLS) --record=results/faults

# The tests of several processes, RUNS times in a row: stops at the first that fails
flakes: .venv/ready
	for i in $$(seq $(RUNS)); do OMP_NUM_THREADS=1 $(PY) -m pytest -q tests/test_parallel.py tests/faults || exit 1; done

# Does a test fail when the code is wrong? MINUTES=30 stops early, and the next one goes on; MUTANTS="--files=model.py --rate=3"
mutants: .venv/ready
	$(PY) tests/mutants.py --minutes=$(MINUTES) --table=results/mutants/table.md $(MUTANTS)

test: .venv/ready
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

# On a GPU: is all as on a CPU, and how fast? 25 minutes, into records/DATE-GPU. ONLY="equal decode": these steps
gpu: .gpuenv/ready
	$(GPU_PY) -m tools.gpu $(ONLY)

# What CUDA would do, without a GPU: gcc and 6 GB for a build of torch with CUDA. ONLY="blocks decode" or CONFIG=configs/mine.py: these
gpu-dry: .gpuenv/ready
	$(GPU_PY) tests/dryrun/dryrun.py $(ONLY) $(if $(filter-out file,$(origin CONFIG)),--config="$(CONFIG)")

.venv/ready: requirements.txt
	test -x $(PY) || python3 -m venv .venv
	$(PY) -m pip install -q -r requirements.txt
	$(PY) -m pip install -q --no-deps $(MISTRAL)
	touch $@

# The same with a build for CUDA, of the version that tests/dryrun/phantom.c was written for
.gpuenv/ready: requirements.txt
	test -x $(GPU_PY) || python3 -m venv .gpuenv
	grep -v '^torch==' requirements.txt > .gpuenv/others.txt
	$(GPU_PY) -m pip install -q torch==2.11.0 -r .gpuenv/others.txt
	$(GPU_PY) -m pip install -q --no-deps $(MISTRAL)
	touch $@

clean:
	rm -rf .venv .gpuenv out data
