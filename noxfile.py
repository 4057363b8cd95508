"""The versions of Paddle that the tests run on: ``nox`` runs all, ``nox -s "legacy(paddle='2.6.2')"`` one.

Each session installs one CPU wheel. The legacy tests need their flag before Paddle is imported, so they never share a
process with those of PIR.
"""

import nox

LEGACY = ("2.6.2", "3.0.0", "3.1.1", "3.3.1")
PIR = ("3.1.1", "3.2.2", "3.3.1")

nox.options.reuse_existing_virtualenvs = True


def install(session: nox.Session, paddle: str) -> None:
    """Paddle, this package and what its tests need. Paddle before 3.2 was built against NumPy 1."""
    numpy = ["numpy<2"] if paddle < "3.2" else []
    session.install(f"paddlepaddle=={paddle}", *numpy, "setuptools", "pytest>=8", "hypothesis>=6.100")
    session.install("--no-deps", "-e", ".")
    session.install("pluggy>=1.3", "click>=8.1", "rich>=13.7", "PyYAML>=6.0", "jsonschema>=4.20", *numpy)


@nox.session
@nox.parametrize("paddle", LEGACY)
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
