"""Silence for the import of TensorFlow, which talks on stderr below Python's."""

import contextlib
import os
import sys


@contextlib.contextmanager
def quiet():
    """Send what is written to stderr nowhere; an exception still comes through."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # after the import this is enough
    if sys.stderr is None:  # it was closed
        yield
        return
    sys.stderr.flush()
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)
