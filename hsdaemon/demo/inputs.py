"""What the demonstrations extract from: random token ids, and English that is on every machine already."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics  # the language reference, part of every Python installation

FIRST_ID = 4  # below are the special tokens of the tiny models
LICENCES = Path("/usr/share/common-licenses")  # on every Debian
WORDS = (15, 185)  # of a document: 50 to 400 tokens with the chat template around it


def write_tokens(path: Path, rows: int, vocab: int, lengths: tuple[int, int], chunk: int, seed: int) -> None:
    """Write `rows` rows of random ids, most of them short; among them the two ends of `lengths` and chunk-1, +0, +1."""
    draw = random.Random(seed)  # noqa: S311  # data, no secret
    low, high = lengths
    sizes = [low, high, chunk - 1, chunk, chunk + 1, 2 * chunk]
    sizes += [round(math.exp(draw.uniform(math.log(low), math.log(high)))) for _ in range(rows - len(sizes))]
    draw.shuffle(sizes)
    with path.open("w", encoding="utf-8") as file:
        for size in sizes:
            prompt = draw.randrange(size)
            ids = [draw.randrange(FIRST_ID, vocab - 2) for _ in range(size)]
            file.write(json.dumps({"input_ids": ids, "loss_mask": [0] * prompt + [1] * (size - prompt)}) + "\n")


def write_chats(path: Path, rows: int, seed: int) -> None:
    """Write `rows` English documents as chats: the question names the subject, the answer is the text."""
    draw = random.Random(seed)  # noqa: S311
    found = list(_documents(draw))
    draw.shuffle(found)
    with path.open("w", encoding="utf-8") as file:
        for title, text in found[:rows]:
            question = f"What do you know about {title}?"
            talk = [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
            file.write(json.dumps({"messages": talk}) + "\n")


def _documents(draw: random.Random) -> Iterator[tuple[str, str]]:
    """Pieces of running text, each with its subject: whole paragraphs, within WORDS."""
    texts = dict(sorted(topics.items()))
    if LICENCES.is_dir():
        texts |= {
            f"the licence {p.name}": p.read_text(errors="replace")
            for p in sorted(LICENCES.iterdir())
            if p.is_file() and not p.is_symlink()
        }
    for title, text in texts.items():
        piece: list[str] = []
        wanted = _size(draw)
        for paragraph in _prose(text):
            piece += paragraph.split()
            if len(piece) >= wanted:
                if len(piece) <= WORDS[1]:
                    yield title, " ".join(piece)
                piece, wanted = [], _size(draw)


def _size(draw: random.Random) -> int:
    """Words wanted of a document: any within WORDS, short ones more often."""
    return round(draw.triangular(*WORDS, WORDS[0]))


def _prose(text: str) -> Iterator[str]:
    """Paragraphs that are sentences, not code, tables or headings; white space made single spaces, plain ASCII."""
    for paragraph in re.split(r"\n\s*\n", text):
        flat = " ".join(paragraph.split())
        letters = sum(c.isalpha() or c == " " for c in flat)
        if flat.isascii() and flat.endswith((".", ":", ";")) and letters > 0.9 * len(flat) and len(flat) > 80:
            yield flat
