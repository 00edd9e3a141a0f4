"""bench gen end to end on a small cell: resume, interruption, traceable numbers, one error a mistake."""

import json
import re
import subprocess
import sys

import pytest
import yaml

import bench.gen_predicted
from bench.cli import main
from bench.experiment import FOLDER, known_experiments
from bench.records import RecordStore
from bench.report.gen import SECTIONS, check_sections
from bench.stats import interval
from bench.workloads.trace import LengthTrace, read_trace

CELL = yaml.safe_load((FOLDER / "h100x8-llama-24k.yaml").read_text()) | {
    "batches": [16],
    "max_response_tokens": 2048,
    "lengths": "lognormal:5,1",
    "host_terms": ["paper-era"],
    "seeds": [0, 1],
}


@pytest.fixture
def cell(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(CELL))
    return str(path)


def run(monkeypatch, *arguments) -> int:
    """Exit code of ``python -m bench ARGUMENTS``."""
    monkeypatch.setattr(sys, "argv", ["bench", *map(str, arguments)])
    try:
        main()
    except SystemExit as end:
        return end.code or 0
    return 0


def test_a_second_run_keeps_everything(cell, tmp_path, monkeypatch):
    out = tmp_path / "out"
    gen = ("gen", cell, "--tracker", "none", "--out", out)
    assert run(monkeypatch, *gen) == 0
    records, steps = (out / "raw" / "small.jsonl").read_bytes(), sorted((out / "raw" / "small.steps").iterdir())
    report = (out / "gen.md").read_text()
    monkeypatch.setattr(bench.gen_predicted, "run_one", lambda work: pytest.fail("nothing should run again"))
    assert run(monkeypatch, *gen) == 0
    assert (out / "raw" / "small.jsonl").read_bytes() == records
    assert (out / "gen.md").read_text() == report
    assert len(steps) == 7
    check_sections(out / "gen.md", SECTIONS)


def test_the_same_seed_gives_the_same_bytes(cell, tmp_path, monkeypatch):
    for name in ("a", "b"):
        assert run(monkeypatch, "gen", cell, "--tracker", "none", "--out", tmp_path / name) == 0
    one, other = (sorted((tmp_path / name / "raw").rglob("*.*")) for name in ("a", "b"))
    assert [p.name for p in one] == [p.name for p in other]
    for p, q in zip(one, other, strict=True):
        if p.is_file() and not p.name.endswith(".made.json"):
            assert p.read_bytes() == q.read_bytes(), p


def test_an_interrupted_run_goes_on(cell, tmp_path, monkeypatch):
    out, real, calls = tmp_path / "out", bench.gen_predicted.run_one, []

    def interrupted(work):
        if calls:
            raise KeyboardInterrupt
        calls.append(work)
        return real(work)

    monkeypatch.setattr(bench.gen_predicted, "run_one", interrupted)
    gen = ("gen", cell, "--tracker", "none", "--out", out)
    assert run(monkeypatch, *gen) == 130
    kept = RecordStore(out, "small").read()
    assert {record.seed for record in kept.values()} == {0}
    monkeypatch.setattr(bench.gen_predicted, "run_one", lambda work: calls.append(work) or real(work))
    assert run(monkeypatch, *gen) == 0
    assert [work[0].seed for work in calls] == [0, 1]
    assert kept.items() <= RecordStore(out, "small").read().items()


def test_a_number_of_the_report_leads_to_its_records(cell, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert run(monkeypatch, "gen", cell, "--tracker", "none", "--out", out) == 0
    rows = [json.loads(line) for line in (out / "raw" / "small.jsonl").read_text().splitlines()]
    mine = interval(r["tokens_per_s"] for r in rows if r["arm"] == "static-TP2xDP4").text(0)
    report = (out / "gen.md").read_text()
    table = report.split("## Every arm (predicted)")[1].split("##")[0]
    head, line = (re.split(r"\s*\|\s*", x) for x in table.splitlines() if x.startswith("| cell") or "| small" in x)
    assert line[head.index("TP2")] == mine
    trace = read_trace(next((out / "raw" / "traces").glob("*.jsonl")))
    assert trace.sha256 in {r["trace_sha256"] for r in rows}
    for record in rows:
        assert record["tokens_per_s"] == pytest.approx(record["response_tokens"] / record["rollout_s"])


def test_a_recorded_trace_is_replayed(cell, tmp_path, monkeypatch):
    assert run(monkeypatch, "gen", cell, "--tracker", "none", "--out", tmp_path / "a", "--seeds", 1) == 0
    trace = next((tmp_path / "a" / "raw" / "traces").glob("*.jsonl"))
    replay = ("gen", cell, "--tracker", "none", "--out", tmp_path / "b", "--seeds", 1, "--trace", trace)
    assert run(monkeypatch, *replay) == 0
    one, other = (RecordStore(tmp_path / name, "small").read() for name in ("a", "b"))
    static = {k: r.rollout_s for k, r in one.items() if k[0].startswith("static")}
    assert static == {k: r.rollout_s for k, r in other.items() if k[0].startswith("static")}


def test_prompts_of_a_dataset(cell, tmp_path, monkeypatch):
    data = tmp_path / "problems.json"
    data.write_text(json.dumps([{"problem": f"{i} + {'1' * 300}?", "answer": str(i)} for i in range(40)]))
    out = tmp_path / "out"
    assert run(monkeypatch, "gen", cell, "--tracker", "none", "--out", out, "--dataset", data) == 0
    traces = [read_trace(p) for p in (out / "raw" / "traces").glob("*.jsonl")]
    assert all(len(set(t.prompt_id)) == 2 and t.prompt_tokens.min() > 100 for t in traces)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gen", "no-such-cell"], "does not exist"),
        (["gen", "{cell}", "--tracker", "mlflow"], "--tracker 'mlflow'"),
        (["gen", "{cell}", "--dataset", "absent.json"], "no such file"),
        (["gen", "{cell}", "--trace", "absent.jsonl"], "cannot be read"),
        (["gen", "{cell}", "--tier", "guessed"], "--tier must be"),
        (["gen", "{cell}", "--seeds", "0"], "--seeds"),
        (["gen", "{cell}", "--tier", "measured"], "needs 8 GPUs of kind h100_sxm"),
        (["gen", "cpu-llama", "--tier", "predicted"], "no step profile to predict from"),
        (["report", "--out", "{out}/nothing"], "no records there"),
        (["gen", "--colour"], "--colour"),
        (["gen", "{cell}", "--trace", "{long}"], "a prompt of 5000 tokens exceeds max_prompt_tokens 1024"),
        (["gen", "{cell}", "--trace", "{short}"], "no response has a second token"),
        (["gen", "{cell}", "--out", "{cell}"], "is not a folder"),
    ],
)
def test_a_mistake_is_one_error_and_loses_nothing(cell, tmp_path, monkeypatch, capfd, arguments, words):
    out = tmp_path / "out"
    assert run(monkeypatch, "gen", cell, "--tracker", "none", "--out", out, "--seeds", 1) == 0
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    capfd.readouterr()
    long, short = tmp_path / "long.jsonl", tmp_path / "short.jsonl"
    LengthTrace.of(["p"], [0], [5000], [9], 2048).write(long)
    LengthTrace.of(["p"], [0], [9], [1], 2048).write(short)
    arguments = [a.format(cell=cell, out=tmp_path, long=long, short=short) for a in arguments]
    if arguments[0] == "gen" and "--out" not in arguments:
        arguments += ["--out", str(out)]
    assert run(monkeypatch, *arguments) == 2
    captured = capfd.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("name", known_experiments())
def test_the_dry_run_of_every_cell(name, monkeypatch, capfd):
    assert run(monkeypatch, "gen", name, "--dry-run") == 0
    out = capfd.readouterr().out
    assert "tp_size" in out
    if not name.startswith("cpu"):
        for words in ("| layout", "KV tokens a replica", "expected rollout, s", "ranks: 0: node 0 gpu 0", "trace: "):
            assert words in out


def test_help_explains():
    text = subprocess.run([sys.executable, "-m", "bench", "gen", "--help"], capture_output=True, text=True).stdout
    for words in ("--seeds", "--dataset", "--trace", "--tracker", "--dry-run", "resume"):
        assert words in text


def test_a_report_that_lacks_a_section(tmp_path):
    path = tmp_path / "gen.md"
    path.write_text("\n".join(SECTIONS[:-1]))
    with pytest.raises(Exception, match="How this was made"):
        check_sections(path, SECTIONS)
