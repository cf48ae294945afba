"""Settings that hold for every test: one thread, no network, fixed examples."""

import os

# Before transformers is first imported, which reads them once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import torch

# A matrix product takes milliseconds cold and microseconds warm: no deadline per example.
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")

# Threads on matrices of 72 columns cost ten times what they compute.
torch.set_num_threads(1)
