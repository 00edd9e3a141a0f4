"""Install everything the suite needs into one virtual environment that all tox environments share.

Standard library only: it runs before anything is installed. ``python bench/install.py VENV`` creates VENV or, where its
stamp says it is up to date, does nothing. On a machine with CUDA, SGLang comes with its own dependencies; elsewhere
in the order that keeps pip from pulling CUDA builds, with the stand-ins of pat/sglang/cpu_standins on the path.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
SGLANG_WITHOUT_DEPENDENCIES = ["sglang==0.5.23", "xgrammar==0.2.7", "compressed-tensors==0.18.0"]
VERL_WITHOUT_DEPENDENCIES = ["verl==0.9.1"]


def steps(cuda: bool) -> list[list[str]]:
    """pip's arguments, in order."""
    if cuda:
        return [["--no-deps", *VERL_WITHOUT_DEPENDENCIES], ["-e", f"{ROOT}[gpu,verl,test]"]]
    bare = ["--no-deps", *SGLANG_WITHOUT_DEPENDENCIES, *VERL_WITHOUT_DEPENDENCIES]
    return [[TORCH], bare, ["-e", f"{ROOT}[cpu,verl,test]"]]


def stamp(cuda: bool) -> str:
    content = (ROOT / "pyproject.toml").read_bytes() + Path(__file__).read_bytes()
    return hashlib.sha256(content + str((cuda, ROOT, sys.version)).encode()).hexdigest()


def install(target: Path) -> None:
    cuda = shutil.which("nvidia-smi") is not None
    mark = target / "installed.sha256"
    if mark.is_file() and mark.read_text() == stamp(cuda):
        return
    print(f"installing into {target} ({'CUDA' if cuda else 'CPU'}): some minutes and 3 GB, once", flush=True)
    python = target / "bin" / "python"
    if not python.exists():
        venv.create(target, with_pip=True, symlinks=True)
    for arguments in steps(cuda):
        print("pip install", *arguments, flush=True)
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
        done = subprocess.run(command, text=True, stderr=subprocess.PIPE)
        if done.returncode:  # else only what pip says of SGLang's CUDA packages, left out on purpose
            sys.exit(f"{done.stderr}pip install {' '.join(arguments)} failed; the same command again retries")
    if not cuda:
        site = subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        )
        (Path(site.strip()) / "pat_cpu_standins.pth").write_text(f"{ROOT / 'pat' / 'sglang' / 'cpu_standins'}\n")
    mark.write_text(stamp(cuda))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python bench/install.py VENV")
    install(Path(sys.argv[1]).resolve())
