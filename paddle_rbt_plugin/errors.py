"""The errors a user can meet. Every message says what is wrong, where, and which values would be right."""


def describe_error(error: BaseException) -> str:
    """An exception of somebody else's code: its type and its message."""
    return f"{type(error).__name__}: {error_message(error)}".rstrip(": ")


def error_message(error: BaseException) -> str:
    """The message of an exception of somebody else's code, where it can be had."""
    try:
        return str(error)
    except (Exception, SystemExit):  # the exception's own code may be what is broken
        return "its message cannot be read"


class TunerError(Exception):
    """Base of everything this package raises on purpose."""


class ClusterError(TunerError):
    """A cluster description that cannot be read, or that does not fit the running job."""


class PatternError(TunerError):
    """A pattern or a plugin that is malformed."""


class CostModelError(TunerError):
    """A cost model that cannot be used, raises, or answers nonsense; names the package it came from."""


class ModelError(TunerError):
    """A model name or reference that leads nowhere."""


class PlanError(TunerError):
    """A plan that cannot be read, or that belongs to another program or cluster."""


class HandoverError(TunerError):
    """The program or the model of this process is not what the plan says."""


class UnsupportedProgram(TunerError):
    """A program that cannot be planned: empty, without a loss, or not a forward program."""


class TuningFinished(TunerError):
    """The job was started only to be tuned (PADDLE_AUTO_PARALLEL_STAGE=tuner) and has been; ``plan`` is the result."""

    def __init__(self, message: str, plan: object):
        super().__init__(message)
        self.plan = plan


class NoFeasiblePlan(TunerError):
    """No candidate fits; names the binding resource, the nearest candidate and by how much it misses."""


class TunerWarning(UserWarning):
    """Something the user should know although tuning goes on."""
