"""What the command line does before any command runs: help, completion and wrong usage, without importing Paddle."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

START = """
import sys
from paddle_rbt_cli import main
try:
    main(sys.argv[1:])
finally:
    sys.stderr.write(str("paddle" in sys.modules))
"""


def start(*arguments: str, **environment: str) -> tuple[int, str, str, bool]:
    """Exit code, stdout, stderr, and whether Paddle was imported."""
    done = subprocess.run(
        [sys.executable, "-c", START, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    err, imported = (done.stderr[:-4], True) if done.stderr.endswith("True") else (done.stderr[:-5], False)
    return done.returncode, done.stdout, err, imported


def completed(words: str) -> list[str]:
    """What bash would offer for the last of the words."""
    position = str(len(words.split(" ")) - 1)
    _, out, _, imported = start(_PADDLE_RBT_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=position)
    assert not imported
    return [line.partition(",")[2] for line in out.splitlines()]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["plan", "--help"], 0),
        (["--version"], 0),
        (["explan"], 2),
        (["plan"], 2),
        (["plan", "x", "--preset"], 2),
    ],
)
def test_help_and_wrong_usage_do_not_import_paddle(arguments, code):
    found, out, err, imported = start(*arguments)
    assert (found, imported) == (code, False)
    assert (out if code == 0 else err).strip()


def test_a_command_that_runs_does_import_it():
    code, _, _, imported = start("patterns", "--json")
    assert (code, imported) == (0, True)


def test_commands_options_models_and_cases_are_completed():
    assert {"plan", "patterns"} == set(completed("paddle-rbt p"))
    assert "--global-batch" in completed("paddle-rbt plan --gl")
    assert {"gpt3-1.3b", "gpt3-13b", "gpt3-125m", "gpt3-175b"} == set(completed("paddle-rbt plan gpt3-1"))
    assert {"llama3-8b", "llama3-70b", "llama3-405b"} == set(completed("paddle-rbt bench llama3"))
    assert {"bf16", "fp16", "fp32"} == set(completed("paddle-rbt plan x --precision "))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_asks_this_program(shell):
    code, out, _, imported = start("completion", shell)
    assert (code, imported) == (0, False)
    assert "_PADDLE_RBT_COMPLETE" in out
    assert json.loads(start("completion", shell, "--json")[1]) == {"shell": shell, "script": out.rstrip("\n") + "\n"}
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=out, text=True, check=True)


def test_help_fits_the_terminal():
    for command in ("", "plan", "bench"):
        out = start(*filter(None, [command]), "--help", COLUMNS="80")[1]
        assert max(map(len, out.splitlines())) <= 80
