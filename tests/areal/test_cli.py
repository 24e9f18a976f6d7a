"""The command line: exit codes, where messages go, and what a recipe prints."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from areal.cli import _exit_codes, app, run_app
from areal.config import load_config
from areal.logs import log_file

RECIPE = {"experiment_name": "x", "actor": {"path": "model"}, "train_dataset": {"path": "data"}}
RUN = "import sys; from areal.cli import run_main; run_main()"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE | {"cluster": {"fileroot": str(tmp_path / "runs")}}))
    return path


def archon_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
    )


def test_bad_configuration_is_one_message_and_exit_code_2(recipe: Path, tmp_path: Path) -> None:
    done = archon_run(str(recipe), "rollout.max_head_offpolicynes=1", "seed=x")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "bad configuration",
        "seed = 'x': expected an integer",
        "unknown key 'rollout.max_head_offpolicynes' (value 1): did you mean 'rollout.max_head_offpolicyness'?",
    ]
    assert not (tmp_path / "runs").exists()


def test_bad_usage_is_exit_code_2(tmp_path: Path) -> None:
    assert archon_run().returncode == 2
    missing = archon_run(str(tmp_path / "absent.yaml"))
    assert missing.returncode == 2 and "absent.yaml" in missing.stderr and "Traceback" not in missing.stderr


def test_anything_else_is_a_traceback_and_exit_code_1(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the folder of runs should be")
    done = archon_run(str(recipe))
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "runs" in done.stderr.splitlines()[-1]


def test_log_file_holds_records_and_the_traceback(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "controller.log"
    with pytest.raises(ZeroDivisionError), log_file(path):
        logging.getLogger("areal.rollout").info("one episode")
        1 / 0  # noqa: B018
    text = path.read_text()
    assert "INFO areal.rollout: one episode" in text
    assert "CRITICAL areal: the run ended early" in text and "ZeroDivisionError: division by zero" in text
    logging.getLogger("areal").info("afterwards")
    assert path.read_text() == text


def test_check_prints_a_recipe_that_loads(recipe: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(recipe), "gconfig.n_samples=4", "actor.adv_norm=null"])
    assert result.exit_code == 0
    written = tmp_path / "checked.yaml"
    written.write_text(result.stdout)
    assert load_config(written) == load_config(recipe, ["gconfig.n_samples=4"])


def test_check_refuses_like_run(recipe: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(recipe), "gconfig.n_samples=1"])
    assert result.exit_code == 2 and "gconfig.n_samples = 1" in result.stderr


def test_run_is_also_a_subcommand(recipe: Path) -> None:
    for application, arguments in ((run_app, []), (app, ["run"])):
        result = CliRunner().invoke(application, [*arguments, str(recipe), "seed=-1"])
        assert result.exit_code == 2 and "seed = -1" in result.stderr


def test_interruption_says_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as stop, _exit_codes():
        raise KeyboardInterrupt
    assert stop.value.exit_code == 1
    assert "the same command resumes" in capsys.readouterr().err
