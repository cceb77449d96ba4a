"""One thread per test process: xdist runs several side by side, and results do not depend on the machine."""

import torch

torch.set_num_threads(1)
