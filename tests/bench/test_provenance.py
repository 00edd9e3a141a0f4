"""Provenance: the command as it was typed, and nothing of the machine's folders or names."""

import json
import socket
import sys

import pytest

from bench.provenance import ROOT, command, provenance, shown


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (f"{ROOT}/results/x", "results/x"),
        (f"--out={ROOT}/results", "--out=results"),
        (f"{ROOT}-results/x", "x"),
        ("/home/alice/data.json", "data.json"),
        ("--dataset=/home/alice/data.json", "--dataset=data.json"),
        ("../shared/data.json", "../shared/data.json"),
        ("--fresh", "--fresh"),
        ("cpu-llama", "cpu-llama"),
    ],
)
def test_arguments_tell_no_folder_of_the_machine(argument, words):
    assert shown(argument) == words


def test_command(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench", "gen", "a b", "--out", str(ROOT / "results")])
    assert command() == "python -m bench gen 'a b' --out results"


def test_nothing_of_the_environment_is_kept(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench", "gen"])
    monkeypatch.setenv("WANDB_API_KEY", "5" * 40)
    found = provenance()
    assert set(found) == {"command", "commit", "versions", "machine"}
    text = json.dumps(found)
    assert "5" * 40 not in text
    assert str(ROOT) not in text
    assert len(socket.gethostname()) < 4 or socket.gethostname() not in text
