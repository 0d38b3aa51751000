"""Settings of the whole suite."""

import os
import shutil

from helpers import session_folder

# XLA compiles each TF1 run anew. To compile without optimising, and the same graph only once per
# session, saves seconds per run. Numbers are only compared with those of runs compiled alike.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
os.environ.setdefault("TF_XLA_FLAGS", f"--tf_xla_persistent_cache_directory={session_folder()}/xla")


def pytest_sessionfinish(session):
    if not hasattr(session.config, "workerinput"):  # the last process of all
        shutil.rmtree(session_folder(), ignore_errors=True)
