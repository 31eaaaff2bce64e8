"""One thread: tests' models are too small for more, and the machine's cores belong to the ranks they start."""

import torch

torch.set_num_threads(1)
