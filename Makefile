# Everything runs inside .venv, made on first use and renewed when the pins change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Megatron-Core, torchtitan and what its models import; not its trackers and datasets (300 MB).
FRAMEWORKS := megatron-core torchtitan spmd_types tyro docstring_parser torchdata
WORKERS ?= 2

.PHONY: demo test test-all lint format bench bench-planner hindcast bench-loader bench-fill bench-gpu bench-network drawn soak clean

$(READY): pyproject.toml constraints.txt
	@echo "installing PyTorch and the rest into $(VENV): about 2 GB, a few minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test,lint]'
	-$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[hypergraph]'  # not on all platforms
	-$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt $(FRAMEWORKS)  # nor these
	touch $(READY)

demo: $(READY)  ## train a small Llama on 4 CPU processes and compare with plain Transformers in one
	$(BIN)/python -m examples.demo

# The tests of a file share what they set up, so they run on one worker.
PYTEST := $(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder

test: $(READY)  ## all tests, at a size that takes five minutes on two cores
	$(PYTEST)

test-all: $(READY)  ## the same tests at full size
	$(PYTEST) --full

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python -m benchmarks.executor attention
	$(BIN)/python -m benchmarks.planner_speed --only stages

bench-planner: $(READY)
	$(BIN)/python -m benchmarks.planner_bytes best_known
	$(BIN)/python -m benchmarks.planner_bytes published
	$(BIN)/python -m benchmarks.planner_time cluster
	$(BIN)/python -m benchmarks.planner_time cluster --model llama3_8b
	$(BIN)/python -m benchmarks.planner_time networks
	$(BIN)/python -m benchmarks.planner_sensitivity cluster
	$(BIN)/python -m benchmarks.planner_sensitivity cluster --model llama3_8b
	$(BIN)/python -m benchmarks.planner_sensitivity whole_calls
	$(BIN)/python -m benchmarks.planner_speed

hindcast: $(READY)  ## predicts measurements that others published
	$(BIN)/python -m benchmarks.hindcast

bench-loader: $(READY)  ## step time with and without look-ahead
	$(BIN)/python -m benchmarks.loader

bench-network: $(READY)  ## predicted and measured time of plans over shaped links; needs root
	$(BIN)/python -m benchmarks.network

bench-gpu: $(READY)  ## kernels, plans of 32 virtual ranks, layers and 50 batches on one GPU
	$(BIN)/dyncp bench kernels
	$(BIN)/dyncp calibrate --kernel flash4:fast --save h200.json
	$(BIN)/dyncp bench attention --kernel flash4:fast --profile h200.json --methods auto,zigzag
	$(BIN)/dyncp bench layers --kernel flash4:fast --profile h200.json
	$(BIN)/python -m benchmarks.gpu_memory batches

bench-fill: $(READY)  ## how full batches and how level replicas are, in order and from a window
	$(BIN)/python -m benchmarks.fill

drawn: $(READY)  ## 10,000 drawn cases of the whole path against dense attention
	$(BIN)/python -m benchmarks.drawn_cases

soak: $(READY)  ## 1,000 batches on 4 processes while planning, reading and ranks go wrong
	$(BIN)/python -m benchmarks.soak
	$(BIN)/python -m benchmarks.soak_resume

clean:
	rm -rf $(VENV) build dist src/*.egg-info
