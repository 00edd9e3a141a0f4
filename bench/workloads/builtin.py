"""Math problems with checkable answers, made here: the sample that needs no network."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import cycle
from math import comb, gcd, lcm
from random import Random

Made = tuple[str, int | str]


def arithmetic(r: Random) -> Made:
    a, b, c = r.randint(12, 99), r.randint(12, 99), r.randint(2, 9)
    return f"Compute ${a} \\cdot {b} - {c}^3$.", a * b - c**3


def remainder(r: Random) -> Made:
    base, power, modulus = r.randint(2, 12), r.randint(5, 40), r.choice([7, 11, 13, 17, 19, 23])
    return f"What is the remainder when ${base}^{{{power}}}$ is divided by ${modulus}$?", pow(base, power, modulus)


def linear_system(r: Random) -> Made:
    x, y, a, b = r.randint(-9, 9), r.randint(-9, 9), r.randint(2, 7), r.randint(2, 7)
    text = f"Real numbers $x$ and $y$ satisfy ${a}x + y = {a * x + y}$ and $x - {b}y = {x - b * y}$. Find $x + y$."
    return text, x + y


def fraction_sum(r: Random) -> Made:
    a, b = Fraction(r.randint(1, 9), r.randint(2, 12)), Fraction(r.randint(1, 9), r.randint(2, 12))
    total = a + b
    answer = rf"\frac{{{total.numerator}}}{{{total.denominator}}}" if total.denominator > 1 else str(total)
    frac = [rf"\frac{{{f.numerator}}}{{{f.denominator}}}" for f in (a, b)]
    return f"Write ${frac[0]} + {frac[1]}$ as a single fraction in lowest terms.", answer


def common_multiple(r: Random) -> Made:
    a, b = r.randint(12, 90), r.randint(12, 90)
    text = f"Two lamps flash every {a} and every {b} seconds. They flash together now. In how many seconds will they "
    return text + "next flash together?", lcm(a, b)


def common_divisor(r: Random) -> Made:
    g, a, b = r.randint(3, 24), r.randint(5, 40), r.randint(5, 40)
    return f"Find the greatest common divisor of {g * a} and {g * b}.", gcd(g * a, g * b)


def committee(r: Random) -> Made:
    n, k = r.randint(6, 14), r.randint(2, 5)
    return f"In how many ways can a jury of {k} members be drawn from {n} candidates?", comb(n, k)


def right_triangle(r: Random) -> Made:
    (n, m), k = sorted(r.sample(range(1, 8), 2)), r.randint(1, 4)
    legs = (k * (m * m - n * n), k * 2 * m * n)
    return f"The legs of a right triangle measure {legs[0]} and {legs[1]}. How long is its hypotenuse?", k * (
        m * m + n * n
    )


def base_change(r: Random) -> Made:
    base, value = r.choice([5, 6, 7, 8, 9]), r.randint(100, 900)
    digits, rest = "", value
    while rest:
        digits, rest = str(rest % base) + digits, rest // base
    return f"The number ${digits}_{{{base}}}$ is written in base {base}. What is it in base ten?", value


def probability(r: Random) -> Made:
    red, blue = r.randint(2, 9), r.randint(2, 9)
    p = Fraction(red * (red - 1), (red + blue) * (red + blue - 1))
    text = f"A bag holds {red} red and {blue} blue marbles. Two are drawn at once. What is the probability that both "
    return text + "are red? Give a fraction in lowest terms.", rf"\frac{{{p.numerator}}}{{{p.denominator}}}"


FAMILIES: tuple[Callable[[Random], Made], ...] = (
    arithmetic,
    remainder,
    linear_system,
    fraction_sum,
    common_multiple,
    common_divisor,
    committee,
    right_triangle,
    base_change,
    probability,
)


def builtin_problems(count: int, seed: int) -> list[dict]:
    """``count`` different records with problem and answer, the families in turn. The same seed, the same problems."""
    r, made, families = Random(seed), {}, cycle(FAMILIES)
    while len(made) < count:
        problem, answer = next(families)(r)
        made.setdefault(problem, answer)
    return [{"problem": problem, "answer": answer} for problem, answer in made.items()]


def addition_problems(count: int, seed: int, terms: tuple[int, int] = (2, 5)) -> list[dict]:
    """``count`` different sums of small numbers with problem, answer, and a worked ``solution``: easy enough for a
    model that has trained for a minute, and the longer, the more terms."""
    r, made = Random(seed), {}
    while len(made) < count:
        numbers = [r.randint(1, 9) for _ in range(r.randint(*terms))]
        made.setdefault(f"Compute ${'+'.join(map(str, numbers))}$.", numbers)
    return [{"problem": p, "answer": sum(n), "solution": worked_sum(n)} for p, n in made.items()]


def worked_sum(numbers: list[int]) -> str:
    """``3+4=7 7+2=9 \\boxed{9}``: one addition at a time."""
    total, steps = numbers[0], []
    for number in numbers[1:]:
        steps.append(f"{total}+{number}={total + number}")
        total += number
    return " ".join([*steps, rf"\boxed{{{total}}}"])
