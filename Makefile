# The first two commands: `make train` and `make test`. Both build .venv if it is missing, and may be repeated.
PY = .venv/bin/python

.PHONY: train test clean

train: out/laptop/summary.json
	$(PY) sample.py --init_from=out/laptop
	@echo "the curve: out/laptop/loss.png   the log: out/laptop/log.jsonl   another sample: $(PY) sample.py --seed=1"

out/laptop/summary.json: data/stdlib/meta.json
	$(PY) train.py configs/laptop.py --resume

data/stdlib/meta.json: .venv/ready
	$(PY) prepare.py

test: .venv/ready
	$(PY) -m pytest -q

.venv/ready: requirements.txt
	test -x $(PY) || python3 -m venv .venv
	$(PY) -m pip install -q -r requirements.txt
	$(PY) -m pip install -q --no-deps mistral-common==1.13.1
	touch $@

clean:
	rm -rf .venv out data
