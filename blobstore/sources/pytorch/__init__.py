"""PyTorch checkpoints, read without torch and without running a byte of them."""
