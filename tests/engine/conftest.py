"""Where there is no GPU, Triton interprets kernels; it must know before they are imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
