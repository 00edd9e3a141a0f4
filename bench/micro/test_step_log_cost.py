"""Cost of logging one step: to be below 1% of the shortest step seen on a CPU (4 ms)."""

from pathlib import Path

from pat.sglang.step_log import StepLog


def test_log_a_step(benchmark, tmp_path: Path) -> None:
    log = StepLog(tmp_path)

    def step() -> None:
        log.begin(0, 2, "decode", 64, 12_345, 64)
        log.add_forward(0.03)
        log.end()

    benchmark(step)
    assert benchmark.stats.stats.median < 40e-6
