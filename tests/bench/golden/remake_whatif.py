"""Make the golden answers and the README's example anew, after a change of the numbers that is meant:
``python tests/bench/golden/remake_whatif.py`` from the project's root."""

import json
from pathlib import Path

from bench.provenance import commit, versions
from bench.report.whatif import as_json, as_markdown
from bench.whatif import Question, answer

GOLDEN = Path(__file__).with_name("whatif.json")
README = Path(__file__).resolve().parents[3] / "README.md"
SHOWN = Question("Qwen/Qwen3-8B", "h100_sxm", 8, None, "lognormal:7.25,1.41", 24576, 1024)


def golden(question: dict) -> dict:
    told = as_json(answer(Question(**question)))
    return {
        "question": question,
        "best_static": told["best_static"],
        "pays_off": told["pays_off"],
        "static_s": {a: v["rollout_s"]["mean"] for a, v in told["static"].items()},
        "pat_s": told["pat"]["rollout_s"]["mean"],
        "pat_layouts": told["pat"]["layouts"],
        "schedule": [switch["layout"] for switch in told["schedule"]["switches"]],
    }


def remake() -> None:
    kept = json.loads(GOLDEN.read_text())
    kept["provenance"] |= {
        "made_by": f"tests/bench/golden/remake_whatif.py on commit {commit()}",
        "versions": {k: v for k, v in versions().items() if k in ("numpy", "aiconfigurator-core")},
    }
    kept["answers"] = {name: golden(one["question"]) for name, one in kept["answers"].items()}
    GOLDEN.write_text(json.dumps(kept, indent=1) + "\n")
    before, mark, rest = README.read_text().partition("```text\n# What if")
    block = as_markdown(answer(SHOWN)).partition("\n\n## Memory")[0].removeprefix("# What if")
    README.write_text(before + mark + block + "\n```" + rest.partition("\n```")[2])


if __name__ == "__main__":
    remake()
