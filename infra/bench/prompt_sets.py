"""What the serving benchmarks ask: 40 prompts of our own, or MT-Bench's questions where a folder has them, and filler text.

Nothing is downloaded. The folder is named by `--data` or TRIESERVE_DATA and holds `mt_bench.jsonl`, lines of
{"question_id", "category", "turns": [...]}.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

NUM_PROMPTS = 40
MT_BENCH_FILE = "mt_bench.jsonl"
MT_BENCH_SOURCE = "the MT-Bench questions as distributed with SafeAILab/EAGLE (eagle/data/mt_bench/question.jsonl)"

OWN_PROMPTS = (
    # Questions with short answers
    "What is the capital of Portugal, and which river does it lie on?",
    "Why is the sky blue during the day and red at sunset?",
    "How many minutes are there in a leap year?",
    "Who wrote the play Hamlet?",
    "What is the difference between weather and climate?",
    "Is a tomato a fruit or a vegetable? Explain in two sentences.",
    "What does a prefix tree do that a hash table cannot?",
    "Why do ships float although steel is heavier than water?",
    "Which planet has the most moons?",
    "How does a vaccine teach the body to defend itself?",
    # Lists and plans
    "List ten things to pack for a week of hiking in the mountains.",
    "Give me five names for a bakery that only opens at night.",
    "Write a shopping list for a vegetarian dinner for six people.",
    "Name the months of the year in reverse order.",
    "Make a table with three columns, animal, food and place, and fill four rows.",
    "Plan a day in a city where it rains from morning to evening.",
    "List the steps to change the tyre of a bicycle.",
    "Give three arguments for and three against working from home.",
    # Code
    "Write a Python function that returns the n-th Fibonacci number without recursion.",
    "What does this print?\n\n```python\nfor i in range(3):\n    print(i, i * i)\n```",
    "Write a regular expression that matches a date like 2024-02-29 and explain each part.",
    "Translate to SQL: the names of all customers who ordered more than three times in March.",
    "Explain the difference between a list and a tuple in Python, with an example of each.",
    "Write a shell command that counts the lines of all .txt files below the current folder.",
    "Find the bug: def mean(xs): return sum(xs) / len(xs) if xs else None / 0",
    "Write a C function that reverses a string in place.",
    "Write JSON that describes a book with its title, authors and year.",
    # Stories, letters, style
    "Tell a story about a lighthouse keeper who receives a letter from the sea.",
    "Write a poem of eight lines about the first snow.",
    "Write a polite email to a neighbour whose dog barks all night.",
    "Continue: The train stopped between two stations, and nobody knew why. Then the lights",
    "Describe the taste of an orange to someone who has never eaten fruit.",
    "Write a dialogue between a clock and a calendar that argue about time.",
    "Rewrite in simple words: The proliferation of ubiquitous computation engenders novel dependencies.",
    "Write the opening speech for a school's science fair.",
    # Reasoning and languages
    "A farmer has 17 sheep and all but 9 run away. How many are left? Think step by step.",
    "If a train travels 180 km in 2.5 hours, what is its average speed in metres per second?",
    "Translate into French: I would like a table by the window, please.",
    "Summarize in one sentence: The committee met on Monday, argued until Wednesday, voted on Thursday, and on Friday could "
    "not find the paper on which the result had been written, so that it had to meet again.",
    "Count from one to twenty in German, one number a line, and say which of them are prime: eins, zwei, drei ...",
)

_WORDS = tuple(sorted({word for prompt in OWN_PROMPTS for word in prompt.lower().split() if word.isalpha()}))


def load_prompts(data: Path | None) -> tuple[str, ...]:
    """NUM_PROMPTS prompts: our own, or those of `data` if one is given. Raises FileNotFoundError that names the source."""
    if data is None:
        return OWN_PROMPTS
    path = data / MT_BENCH_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: put there {MT_BENCH_SOURCE}, or leave --data and TRIESERVE_DATA out")
    questions = [json.loads(line)["turns"][0] for line in path.read_text(encoding="utf-8").splitlines()]
    step = max(1, len(questions) // NUM_PROMPTS)  # categories stand together in the file; take some of each
    return tuple(itertools.islice(questions, 0, step * NUM_PROMPTS, step))


def filler(rng: random.Random, num_words: int) -> str:
    """Meaningless text of plain English words, about one token each. Two calls hardly ever begin alike."""
    return " ".join(rng.choices(_WORDS, k=num_words))
