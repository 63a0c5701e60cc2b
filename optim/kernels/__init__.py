"""Pallas kernels of the optimizers, each beside its plain reference."""
