"""What is installed holds all that runs, the bundled model too."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.processes import told_by

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, sys
import sd_tpu
from sd_tpu.checkpoint.config import read_json
print(json.dumps([sd_tpu.__file__, str(sd_tpu.BUNDLED_MODEL),
                  read_json(sd_tpu.BUNDLED_MODEL / "model_index.json")["_class_name"]]))
"""

pytestmark = pytest.mark.long("builds a wheel")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Built with what is installed, so that nothing is fetched."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            ROOT,
            "--no-deps",
            "--quiet",
            "--no-build-isolation",
            "--wheel-dir",
            folder,
        ],
        check=True,
    )
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_a_wheel_has_every_file_of_the_package_and_the_bundled_model(wheel):
    tracked = subprocess.run(
        ["git", "ls-files", "sd_tpu", "assets/model"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    wanted = {
        file.replace("assets/model", "sd_tpu/assets/model", 1)
        if file.startswith("assets")
        else file
        for file in tracked
    }
    assert wanted <= set(wheel.namelist())
    assert len(wanted) > 50


def test_a_wheel_asks_for_what_running_needs_and_gives_a_command(wheel):
    named = {
        Path(name).name: wheel.read(name).decode()
        for name in wheel.namelist()
        if "dist-info" in name
    }
    wanted = [
        line
        for line in (ROOT / "requirements.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert wanted
    for line in wanted:
        name = line.split(">")[0].replace("_", "-")
        assert f"Requires-Dist: {name}" in named["METADATA"]
    assert "torch" not in named["METADATA"].split("Description")[0]
    assert "sd-tpu = sd_tpu.__main__:run" in named["entry_points.txt"]


def test_what_is_installed_finds_its_model_from_anywhere(wheel, tmp_path):
    wheel.extractall(tmp_path / "site")
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    told = told_by(PROGRAM, cwd=tmp_path, env=env).stdout
    module, model, name = json.loads(told.splitlines()[-1])
    assert Path(module).is_relative_to(tmp_path / "site")
    assert Path(model).is_relative_to(tmp_path / "site")
    assert name == "StableDiffusionPipeline"
    helped = subprocess.run(
        [sys.executable, "-m", "sd_tpu", "page", "--help"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        env=env,
    ).stdout
    assert "--port" in helped
