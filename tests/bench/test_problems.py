"""Problems: the formats, the errors, DeepScaleR's own files, and the answers of the built-in ones."""

import json
import logging
import re
from fractions import Fraction
from itertools import combinations, count
from math import isqrt
from pathlib import Path

import pandas as pd
import pytest
from math_verify import parse, verify
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from bench.errors import UserError
from bench.workloads.builtin import FAMILIES, builtin_problems
from bench.workloads.problems import Problem, load_problems
from bench.workloads.prompts import chosen, encode, estimated_tokens

DEEPSCALER = Path(__file__).parents[3] / "shared" / "data" / "deepscaler"
RECORDS = [{"problem": "1 + 1?", "answer": "2"}, {"problem": "12 * 12?", "answer": 144.0, "difficulty": 3}]


@pytest.mark.parametrize("suffix", ["json", "jsonl", "parquet"])
def test_formats(tmp_path, suffix):
    path = tmp_path / f"p.{suffix}"
    if suffix == "parquet":
        pd.DataFrame([{k: str(v) if k == "answer" else v for k, v in r.items()} for r in RECORDS]).to_parquet(path)
        assert [p.problem for p in load_problems(str(path))] == ["1 + 1?", "12 * 12?"]
        return
    path.write_text(json.dumps(RECORDS) if suffix == "json" else "\n".join(map(json.dumps, RECORDS)))
    assert load_problems(str(path)) == [Problem("1 + 1?", "2"), Problem("12 * 12?", "144")]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"answer": "1"}, r"p.json, record 1: lacks the field 'problem'"),
        ({"problem": "x"}, r"record 1: lacks the field 'answer'"),
        ({"problem": " ", "answer": "1"}, "record 1: problem must be text"),
        ({"problem": 3, "answer": "1"}, "record 1: problem must be text"),
        ({"problem": "x", "answer": [1]}, "record 1: answer must be text or a number"),
        ("text", "record 1: not an object"),
    ],
)
def test_a_bad_record_names_file_index_and_field(tmp_path, record, words):
    path = tmp_path / "p.json"
    path.write_text(json.dumps([RECORDS[0], record]))
    with pytest.raises(UserError, match=words):
        load_problems(str(path))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [("p.csv", "", "must be builtin"), ("p.json", "{", "cannot be read"), ("p.json", "{}", "list of records")],
)
def test_a_bad_file(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=words):
        load_problems(str(tmp_path / name))
    with pytest.raises(UserError, match="no such file"):
        load_problems(str(tmp_path / "absent.json"))


def test_a_bad_line_is_named_and_a_line_separator_inside_text_ends_no_line(tmp_path):
    path = tmp_path / "p.jsonl"
    good = json.dumps({"problem": "a\u2028b", "answer": "1"}, ensure_ascii=False) + "\n"
    path.write_text(good, encoding="utf-8")
    assert load_problems(str(path)) == [Problem("a\u2028b", "1")]
    path.write_text(good + "{bad\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"p.jsonl, line 2: not JSON"):
        load_problems(str(path))


def test_records_without_answer_are_left_out_and_named(tmp_path, caplog):
    path = tmp_path / "p.json"
    path.write_text(json.dumps([RECORDS[0], {"problem": "x", "answer": None}, {"problem": "y", "answer": ""}]))
    with caplog.at_level(logging.WARNING):
        assert load_problems(str(path)) == [Problem("1 + 1?", "2")]
    assert "[1, 2]" in caplog.text


@pytest.mark.skipif(not DEEPSCALER.is_dir(), reason="DeepScaleR's files are not beside the checkout")
def test_deepscalers_own_files():
    sizes = {p.stem + p.parent.name: len(load_problems(str(p))) for p in DEEPSCALER.glob("*/*.json")}
    assert sizes == {"aimetrain": 975, "mathtrain": 7470, "aimetest": 30, "amctest": 83, "mathtest": 500}


def test_builtin_problems_are_different_and_reproducible():
    records = builtin_problems(512, 0)
    assert len({r["problem"] for r in records}) == 512
    assert records == builtin_problems(512, 0) != builtin_problems(512, 1)
    assert {type(r["answer"]) for r in records} == {int, str}


def solve(text: str) -> Fraction:
    """Another way to each answer: by search, not by the formula that made the problem."""
    n = [int(x) for x in re.findall(r"-?\d+", text)]
    if text.startswith("Compute"):
        return Fraction(sum(n[0] for _ in range(n[1])) - n[2] * n[2] * n[2])
    if "remainder" in text:
        value = 1
        for _ in range(n[1]):
            value = value * n[0] % n[2]
        return Fraction(value)
    if "satisfy" in text:
        a, c, b, d = re.search(r"\$(\d+)x \+ y = (-?\d+)\$ and \$x - (\d+)y = (-?\d+)\$", text).groups()
        a, b, c, d = int(a), int(b), int(c), int(d)
        return next(Fraction(x + y) for x in range(-9, 10) for y in range(-9, 10) if a * x + y == c and x - b * y == d)
    if "single fraction" in text:
        return Fraction(n[0], n[1]) + Fraction(n[2], n[3])
    if "lamps" in text:
        return Fraction(next(t for t in count(1) if t % n[0] == 0 and t % n[1] == 0))
    if "divisor" in text:
        return Fraction(max(d for d in range(1, n[0] + 1) if n[0] % d == 0 and n[1] % d == 0))
    if "jury" in text:
        return Fraction(sum(1 for _ in combinations(range(n[1]), n[0])))
    if "hypotenuse" in text:
        return Fraction(isqrt(n[0] ** 2 + n[1] ** 2))
    if "base ten" in text:
        return Fraction(int(str(n[0]), n[1]))
    draws = list(combinations("r" * n[0] + "b" * n[1], 2))
    return Fraction(draws.count(("r", "r")), len(draws))


@pytest.mark.parametrize("index", range(len(FAMILIES)))
def test_builtin_answers(index):
    for record in builtin_problems(200, 7)[index :: len(FAMILIES)]:
        answer = record["answer"]
        found = re.fullmatch(r"\\frac\{(-?\d+)\}\{(\d+)\}", str(answer))
        value = Fraction(int(found[1]), int(found[2])) if found else Fraction(answer)
        solved, boxed = solve(record["problem"]), parse(f"So it is $\\boxed{{{answer}}}$.")
        assert value == solved, record
        assert verify(parse(f"${solved}$"), boxed), record
        assert not verify(parse(f"${solved + 1}$"), boxed), record


def test_chosen_problems_are_distinct_and_reproducible():
    problems = load_problems("builtin")
    picked = chosen(problems, 40, 3)
    assert picked == chosen(problems, 40, 3) != chosen(problems, 40, 4)
    assert len({p.problem_id for p in picked}) == 40
    with pytest.raises(UserError, match="holds 2048 problems, the batch needs 2049"):
        chosen(problems, 2049, 0)


@pytest.mark.parametrize("template", [None, "{{ bos_token }} {{ messages[0]['content'] }}"])
def test_a_prompt_begins_once(template):
    """With LLaMA-3's habits: the tokenizer adds a beginning, and so does the chat template."""
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "<bos>": 1, "What": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<bos>", unk_token="[UNK]")
    tokenizer.chat_template = template
    ids = encode(Problem("What", "1"), tokenizer, 100).token_ids
    assert ids[:3] == (1, 2, 0)
    assert ids.count(1) == 1


class Letters:
    """A tokenizer of one token a character."""

    chat_template = None

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [ord(c) for c in text]}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return f"<user>{messages[0]['content']}<assistant>"


def test_prompts_keep_their_end_and_use_the_chat_template():
    tokenizer, problem = Letters(), Problem("What is 2 + 2?", "4")
    prompt = encode(problem, tokenizer, 8)
    assert "".join(map(chr, prompt.token_ids)) == "boxed{}."
    tokenizer.chat_template = "yes"
    whole = "".join(map(chr, encode(problem, tokenizer, 1000).token_ids))
    assert whole.startswith("<user>What is 2 + 2? ")
    assert whole.endswith("\\boxed{}.<assistant>")


def test_estimated_tokens():
    """Three more characters are one more token; never more than asked for."""
    short, longer = (estimated_tokens(Problem("x" * n, "4"), 1000) for n in (30, 330))
    assert longer - short == 100
    assert 30 / 3 < short < 40
    assert estimated_tokens(Problem("x" * 330, "4"), 5) == 5
