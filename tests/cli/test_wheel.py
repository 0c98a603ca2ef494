"""The wheel is the whole product: installed beside its dependencies, without this checkout, it works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hzplan import __version__

ROOT = Path(__file__).resolve().parents[2]
PROFILES = sorted((ROOT / "plans" / "profiles").glob("*.json"), key=lambda path: path.stat().st_size)

needs_command = pytest.mark.skipif(
    not (ROOT / "hzplan" / "cli").exists(), reason="the command line is not written yet"
)


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed, run without any of this process's Python settings."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment | {"PYTHONNOUSERSITE": "1"},
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of a new environment into which the wheel of this checkout was installed."""
    folder = tmp_path_factory.mktemp("wheel")
    run(
        *(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder / "dist", ROOT),
        cwd=folder,
    )
    (wheel,) = (folder / "dist").glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    run(
        *(sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install"),
        *("--no-deps", "--no-index", wheel),
        cwd=folder,
    )
    # Only now let it see the dependencies. Python reads no .pth files in folders added by one, so the
    # editable install of this checkout stays out of sight.
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site_packages = Path(run(python, "-c", ask, cwd=folder).strip())
    visible = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site_packages / "dependencies.pth").write_text("\n".join(visible) + "\n")
    return python.parent


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """An empty folder to work in."""
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def test_package_comes_from_the_wheel_with_its_data(installed: Path, empty: Path) -> None:
    script = "import hzplan; print(hzplan.__file__); print(hzplan.__version__)"
    module, version = run(installed / "python", "-c", script, cwd=empty).splitlines()
    package = Path(module).parent

    assert package.is_relative_to(installed.parent)
    assert version == __version__
    assert (package / "py.typed").is_file()
    assert files(package / "_cost_models") == files(ROOT / "cost_models")


def test_wheel_holds_nothing_but_the_package(installed: Path, empty: Path) -> None:
    script = "import importlib.metadata as m; print(*m.files('hzplan'), sep='\\n')"
    tops = {line.split("/")[0] for line in run(installed / "python", "-c", script, cwd=empty).splitlines()}

    assert tops - {".."} == {"hzplan", f"hzplan-{__version__}.dist-info"}  # "..": the command, in bin/


@needs_command
def test_help(installed: Path, empty: Path) -> None:
    assert "solve" in run(installed / "hzplan", "--help", cwd=empty)


@needs_command
@pytest.mark.skipif(not PROFILES, reason="there are no golden profiles yet")
def test_solves_a_profile(installed: Path, empty: Path) -> None:
    from hzplan.formats.profile import Profile

    profile = Profile.load(PROFILES[0])
    batch = profile.mesh.world * profile.micro_batches[0]
    limits = ("--memory", "64GiB", "--global-batch", str(batch))
    run(installed / "hzplan", "solve", PROFILES[0], *limits, "-o", "out.json", cwd=empty)

    assert json.loads((empty / "out.json").read_text())["format"] == "hzplan.plan"


@needs_command
def test_writes_a_report(installed: Path, empty: Path) -> None:
    plan = ROOT / "plans" / "gpt-tiny-2x2.json"
    run(installed / "hzplan", "show", plan, "--html", "report.html", cwd=empty)

    assert (empty / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def files(folder: Path) -> set[str]:
    """The files under a folder, relative to it."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
