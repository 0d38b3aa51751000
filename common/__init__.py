"""Plumbing that teaches no reinforcement learning: logging, MPI, environments, saving."""
