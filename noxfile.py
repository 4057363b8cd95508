"""The versions of Paddle that the tests run on: ``nox`` runs all, ``nox -s "legacy(paddle='2.6.2')"`` one, ``nox -t ci`` those
that every change must pass, besides the newest, on which ``tests/test_legacy.py`` runs the legacy tests.

Each session installs one CPU wheel. The legacy tests need their flag before Paddle is imported, so they never share a
process with those of PIR.
"""

import nox

LEGACY = ("2.6.2", "3.0.0", "3.1.1", "3.3.1")
PIR = ("3.1.1", "3.2.2", "3.3.1")
CI = ("2.6.2", "3.1.1")

nox.options.reuse_existing_virtualenvs = True


def install(session: nox.Session, paddle: str) -> None:
    """This package with its tests, and one Paddle. Those before 3.2 were built against NumPy 1."""
    numpy = ["numpy<2"] if paddle < "3.2" else []
    session.install(f"paddlepaddle=={paddle}", *numpy, "-e", ".[test]")


@nox.session
@nox.parametrize("paddle", [nox.param(version, tags=["ci"] if version in CI else []) for version in LEGACY])
def legacy(session: nox.Session, paddle: str) -> None:
    """The tests of the legacy IR."""
    install(session, paddle)
    session.run("pytest", "tests/legacy", *session.posargs, env={"FLAGS_enable_pir_api": "0"})


@nox.session
@nox.parametrize("paddle", PIR)
def pir(session: nox.Session, paddle: str) -> None:
    """All other tests."""
    install(session, paddle)
    session.run("pytest", "tests", "--ignore", "tests/legacy", *session.posargs)


@nox.session
@nox.parametrize("paddle", sorted({*LEGACY, *PIR}))
def changes(session: nox.Session, paddle: str) -> None:
    """Only whether that Paddle still needs what the package changes in it."""
    install(session, paddle)
    session.run("pytest", "tests/legacy/test_legacy_paddle_changes.py", env={"FLAGS_enable_pir_api": "0"})
    if paddle in PIR:
        session.run("pytest", "tests/test_paddle_changes.py", "-m", "not slow")
