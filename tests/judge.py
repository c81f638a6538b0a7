"""transformers, the reference of many tests, without its warnings at import and its progress bars.

A file that imports this module is skipped where transformers is not installed.
"""

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", minversion="5.14")
    from transformers import AutoModelForCausalLM

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

__all__ = ["AutoModelForCausalLM", "transformers"]
