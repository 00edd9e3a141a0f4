"""How a record was made: command, commit, versions, machine. Never environment variables, host or user names."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("sglang", "torch", "verl", "transformers", "aiconfigurator-core", "numpy", "wandb")


def command() -> str:
    """The command line, as it can be typed from the project's root; see :func:`shown` for paths outside it."""
    return shlex.join(["python", "-m", "bench", *map(shown, sys.argv[1:])])


def shown(argument: str) -> str:
    """An argument without this machine's folders: a path in the project from its root, of others the last part."""
    option, equals, value = argument.partition("=") if argument.startswith("-") else ("", "", argument)
    path = Path(value)
    if path.is_absolute():
        value = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
    return option + equals + value


@cache
def commit() -> str:
    """The commit of the code, with ``-dirty`` where files that git tracks differ from it (results apart)."""

    def git(*arguments: str) -> str:
        return subprocess.check_output(["git", "-C", ROOT, *arguments], text=True, stderr=subprocess.DEVNULL).strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!results")
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@cache
def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@cache
def machine() -> dict[str, str]:
    """Processor, cores, memory and GPUs."""
    from bench.gpus import local_devices

    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    devices = [name for name, _ in local_devices()]
    return {
        "cpu": processor(),
        "cores": str(os.cpu_count()),
        "memory": f"{memory_bytes / 2**30:.0f} GiB",
        "gpus": ", ".join(devices) or "none",
        "system": f"{platform.system()} {platform.machine()}",
    }


def processor() -> str:
    """The processor's model name, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def load_average() -> float:
    """Processes that wanted a core over the last minute: other load tells in measured times."""
    return round(os.getloadavg()[0], 2)


def provenance() -> dict:
    """All of it, as a record keeps it."""
    return {"command": command(), "commit": commit(), "versions": versions(), "machine": machine()}
