"""Set up each process that runs tests: its environment, the order of files, and the fixtures that all tests share."""

import gc
import os
import shutil
import signal
import tempfile
from contextlib import suppress

import hypothesis
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start
if capability := os.environ.get(
    "ATEN_CPU_CAPABILITY"
):  # which the cache of compiled kernels does not tell apart
    os.environ.setdefault(
        "TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"inductor-{capability}")
    )
with suppress(
    OSError
):  # in memory, where there is room: a disk takes milliseconds for each of 100,000 files
    if shutil.disk_usage("/dev/shm").free > 8 * 2**30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")
hypothesis.settings.register_profile(
    "busy", deadline=None, max_examples=50
)  # a busy machine is no failure
hypothesis.settings.load_profile("busy")
gc.disable()  # until all tests are collected: what is imported stays, and looking for garbage in it took 5 s
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # so a shell starts what it runs in the background
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # of this process and of those that tests start


# They come first, so that no worker of `make test` or `make test-slow` is left with one of them at the end: files of
# more than 4 seconds, roughly in the order of their seconds in both.
LONGEST = (
    "test_triton_kernels", "test_hf_families", "test_random_pairs", "test_parallel", "test_kinds", "test_memory_plan",
    "test_resume", "test_adapters", "test_accumulation_graph", "test_commands", "test_lora_experts", "test_lora_run",
    "test_lora_files", "test_examples", "test_modeling", "test_recompute", "test_export", "test_parameter_owners",
    "test_offload", "test_lora_base", "test_peft_methods", "test_smallest_change", "test_state_of_its_step",
    "test_fsdp_gather", "test_cuda_graph", "test_trainer", "test_random_tunings", "test_experts", "test_guard",
    "test_layering", "test_serve", "test_replay", "test_tensor_parallel", "test_last_step", "test_region",
    "test_advice", "test_expert_parallel", "test_kept_on_a_gpu", "test_multimodal", "test_optim", "test_crafted",
    "test_recorder", "test_http_server", "test_record_report", "test_hf_experts", "test_hf_nested", "test_gpus",
    "test_dynamic_compile", "test_training_data", "test_chat_template", "test_data_preview", "test_rope",
    "test_checkpoint_choice", "test_precision", "test_extensions", "test_primary_weights", "test_quantized",
    "test_golden_grouped", "test_calibration", "test_decode_loop", "test_te_modules", "test_divided_plan",
    "test_project", "test_against", "test_lora_parallel", "test_preflight", "test_golden",
)  # fmt: skip
ORDER = {name: place for place, name in enumerate(LONGEST)}


def pytest_configure(config: pytest.Config) -> None:
    """Import PyTorch where tests run: the process that deals them out to workers starts these 4 seconds earlier."""
    deals_out = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if not deals_out:
        config.pluginmanager.import_plugin("shared_fixtures")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: ORDER.get(item.path.stem, len(ORDER)))


def pytest_collection_finish() -> None:
    gc.freeze()  # half a million objects, which stay: looking at them again and again took a tenth of the time
    gc.enable()
