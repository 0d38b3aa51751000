"""Plumbing you never need to read: MPI, the run's folder, logging, checkpoints."""
