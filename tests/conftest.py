"""Settings of the whole suite."""

import os

# XLA compiles each TF1 run anew. To do that without optimising saves a second per run, and the
# numbers are compared with those of other runs that were compiled in the same way.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
