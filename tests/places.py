"""Places for the models of tests marked `gpu`.

With TE_MODELS_DRY_RUN=1 those that use PLACE run on a CPU, emulated: do the tests themselves work?
"""

import os
from typing import Any

import torch

ON_GPU = torch.cuda.is_available()
DRY_RUN = bool(os.environ.get("TE_MODELS_DRY_RUN"))
DEVICE = "cuda" if ON_GPU else "cpu"
PLACE: dict[str, Any] = dict(device=DEVICE, engine="native" if ON_GPU else "emulated")
EMULATED: dict[str, Any] = dict(device=DEVICE, engine="emulated")
