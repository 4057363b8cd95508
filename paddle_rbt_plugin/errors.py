"""The errors that users can encounter. Every message says what is wrong, where, and which values would be right."""


def describe_error(error: BaseException) -> str:
    """An exception of third-party code: its type and its message."""
    return f"{type(error).__name__}: {error_message(error)}".rstrip(": ")


def error_message(error: BaseException) -> str:
    """The message of an exception of third-party code, if it can be read."""
    try:
        return str(error)
    except (Exception, SystemExit):  # the code of the exception itself may be broken
        return "its message cannot be read"


class TunerError(Exception):
    """Base class of all errors that this package raises deliberately."""


class ClusterError(TunerError):
    """A cluster description that cannot be read, or that does not fit the running job."""


class PatternError(TunerError):
    """A pattern or a plugin that is malformed."""


class CostModelError(TunerError):
    """A cost model that cannot be used, raises, or returns nonsense; names the package that it comes from."""


class ModelError(TunerError):
    """A model name or reference that cannot be resolved."""


class PlanError(TunerError):
    """A plan that cannot be read, or that belongs to another program or cluster."""


class HandoverError(TunerError):
    """The program or the model of this process does not match the plan."""


class UnsupportedProgram(TunerError):
    """A program that cannot be planned: empty, without a loss, or not a forward program."""


class TuningFinished(TunerError):
    """Tuning has finished in a job that was started only for it (PADDLE_AUTO_PARALLEL_STAGE=tuner); ``plan`` is the result."""

    def __init__(self, message: str, plan: object):
        super().__init__(message)
        self.plan = plan


class NoFeasiblePlan(TunerError):
    """No candidate fits; the message names the binding resource, the nearest candidate and by how much it misses."""


class TunerWarning(UserWarning):
    """Something that the user should know although tuning continues."""
