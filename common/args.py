"""Types for the arguments of a script. An argument's limits are part of its type."""

import os
import types
import typing
from dataclasses import dataclass
from typing import Annotated

from common.errors import SidespinError, flag

FLOAT32 = 2.0**127


@dataclass(frozen=True)
class Limits:
    low: float
    high: float
    text: str


PositiveInt = Annotated[int, Limits(1, 2**31 - 1, "a whole number from 1 to 2^31 - 1")]
NonNegativeInt = Annotated[int, Limits(0, float("inf"), "a whole number of at least 0")]
Positive = Annotated[float, Limits(1e-300, FLOAT32, "a positive number")]
NonNegative = Annotated[float, Limits(0, FLOAT32, "a number of at least 0")]
Fraction = Annotated[float, Limits(0, 1, "between 0 and 1")]


def cores():
    """Return the number of cores that this process may use; on macOS, of all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def check_args(args, ranks):
    """Raise an error if a value is out of range or does not work with this many ranks."""
    for name, kind in typing.get_type_hints(type(args), include_extras=True).items():
        expected = mismatch(kind, value := getattr(args, name))
        if expected:
            raise SidespinError(f"{flag(name)} must be {expected}, got {value}")
    if args.threads > cores():
        problem = f"is more than the {cores()} cores that this process may use"
        raise SidespinError(f"{flag('threads')} {args.threads} {problem}")
    if args.steps_per_epoch % ranks:
        steps = f"{flag('steps_per_epoch')} {args.steps_per_epoch}"
        raise SidespinError(f"{steps} cannot be divided evenly among {ranks} ranks")
    if args.resume and args.overwrite:
        both = f"{flag('resume')} keeps a run and {flag('overwrite')} replaces it"
        raise SidespinError(f"{both}: choose one")
    name = args.exp_name
    if name is not None and (name in ("", ".", "..") or name != os.path.basename(name)):
        raise SidespinError(f"{flag('exp_name')} must be a plain name, not a path, got {name!r}")


def mismatch(kind, value):
    """Return what the value should have been, or None if it fits the type."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        inner, limits = parts[0], parts[1]
        if not isinstance(limits, Limits):
            return mismatch(inner, value)
        wrong = mismatch(inner, value) or not limits.low <= value <= limits.high
        return limits.text if wrong else None
    if origin in (typing.Union, types.UnionType):
        expected = [mismatch(part, value) for part in parts]
        return " or ".join(expected) if all(expected) else None
    if origin is tuple:
        wrong = not isinstance(value, tuple | list) or any(mismatch(parts[0], x) for x in value)
        return f"a tuple of numbers, each {mismatch(parts[0], object())}" if wrong else None
    if origin is typing.Literal:
        return None if value in parts else f"one of {', '.join(map(str, parts))}"
    if kind is type(None):
        return None if value is None else "None"
    if kind is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return None if is_number and abs(value) < FLOAT32 else "a finite number"
    if isinstance(kind, type):
        fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        return None if fits else kind.__name__
    return None  # an unknown type: anything goes
