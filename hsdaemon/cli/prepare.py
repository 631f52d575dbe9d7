"""Turn chats into a data set: token ids and a loss mask that is 1 where the assistant speaks.

Needed once, when your data are chats (a row has `messages`, or `conversations` in the ShareGPT manner) and not token
ids. Uses the tokenizer and the chat template of the model itself, so that the ids are those that the model will see:

  hs-extract prepare chats.jsonl --model /data/models/Kimi-K2.5-INT4 --out train.jsonl

Reads .jsonl and .parquet; keeps `id`, offers `tools`. Where the template marks what is generated, the mask follows the
marks; where not, each answer is what the chat gains by it, its closing token included. The result appears under its
name when it is whole.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import jinja2

from hsdaemon.data import prepare
from hsdaemon.data.chat import Template
from hsdaemon.data.tokenizer import open_tokenizer, template_source
from hsdaemon.errors import DataError

EXITS = {65: "a row, the file, the tokenizer or its chat template cannot be used"}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("chats", metavar="FILE", type=Path, help="the chats: .jsonl or .parquet")
    parser.add_argument("--model", metavar="FOLDER", type=Path, required=True, help="the model's folder")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="the data set (default: FILE.ids.jsonl beside the chats)"
    )
    parser.add_argument(
        "--on-bad-row",
        choices=("refuse", "skip"),
        default="refuse",
        help="stop at a row that cannot be used, or count it and go on; either way its number is told",
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run tokenizer code from the model's folder (Kimi needs it)"
    )


def run(args: argparse.Namespace) -> int:
    """Prepare, and print `prepare: ok rows= written= skipped= tokens= trained=`."""
    target = args.out or prepare.default_target(args.chats)
    prepare.writable(target)
    source, names = template_source(args.model)
    try:
        template = Template(source, names)
    except jinja2.TemplateError as error:
        raise DataError(
            f"cannot use the chat template of {args.model}: {error}; copy it from the model again"
        ) from None
    tokenizer = open_tokenizer(args.model, trust_remote_code=args.trust_remote_code)
    try:
        counts = prepare.prepare(
            args.chats, target, template, tokenizer, args.on_bad_row, lambda line: print(line, file=sys.stderr)
        )
    finally:
        tokenizer.close()
    print(f"wrote {target}")
    print("prepare: ok", *(f"{key}={value}" for key, value in dataclasses.asdict(counts).items()))
    return 0
