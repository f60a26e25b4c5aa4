"""Iterations on a CUDA device, whatever the model."""
