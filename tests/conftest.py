"""Settings of the whole suite."""

import os
import shutil

from helpers import session_folder

# XLA compiles each TF1 run anew: without optimising, it does so in half the time. Numbers are only
# compared with those of runs that were compiled alike.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")


def pytest_sessionfinish(session):
    if not hasattr(session.config, "workerinput"):  # the last process of all
        shutil.rmtree(session_folder(), ignore_errors=True)
