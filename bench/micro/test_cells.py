"""All the paper's cells at once: time and memory of the predicted tier, with the step grids in the cache."""

import threading
from types import SimpleNamespace

import psutil
from rich.progress import Progress

from bench.experiment import known_experiments, load_experiment
from bench.gen_predicted import cells_of, run_predicted
from bench.machine import machine_of
from bench.tracking import make_tracker

SAMPLE_S = 1.0


class Memory(threading.Thread):
    """The most that this process and its children take, in bytes: pages that they share count once (PSS)."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.ended, self.peak_bytes = threading.Event(), 0

    def run(self) -> None:
        while not self.ended.wait(SAMPLE_S):
            taken = 0
            for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
                try:
                    taken += process.memory_full_info().pss
                except psutil.Error:  # it has just ended
                    continue
            self.peak_bytes = max(self.peak_bytes, taken)


def test_paper_cells(benchmark, tmp_path) -> None:
    """Must reach: all cells, arms and seeds in at most 60 s on two cores, in at most 1 GB."""
    found = [load_experiment(name) for name in known_experiments()]
    experiments = [e for e in found if e.tier == "predicted"]
    for experiment in experiments:
        for host in experiment.host_terms:
            machine_of(experiment, host)
    options = SimpleNamespace(out=tmp_path, fresh=True)
    workload = SimpleNamespace(trace=None, problems=None)
    memory = Memory()
    memory.start()
    arguments = (experiments, workload, options, make_tracker("none", tmp_path), Progress(disable=True))
    benchmark.pedantic(run_predicted, arguments, rounds=1)
    memory.ended.set()
    memory.join()
    benchmark.extra_info.update(cells=sum(len(cells_of(e)) for e in experiments), peak_bytes=memory.peak_bytes)
    print(f"peak memory {memory.peak_bytes / 1e6:.0f} MB")
    assert memory.peak_bytes <= 1e9
    assert benchmark.stats.stats.min <= 60
