"""How every verb finds the configuration: -c FILE, else $HS_EXTRACT_CONFIG, else /etc/hs-extract.toml."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from hsdaemon.config import Config, parse
from hsdaemon.errors import ConfigError

DEFAULT_FILE = "/etc/hs-extract.toml"
VARIABLE = "HS_EXTRACT_CONFIG"


def add_config(parser: argparse.ArgumentParser) -> None:
    """Give a verb its -c/--config."""
    default = os.environ.get(VARIABLE) or DEFAULT_FILE
    parser.add_argument(
        "-c",
        "--config",
        metavar="FILE",
        default=default,
        help=f"the configuration (default: ${VARIABLE} or {DEFAULT_FILE})",
    )


def load(args: argparse.Namespace) -> Config:
    """Read the file that `args.config` names. Raises ConfigError, one line per problem."""
    name = str(args.config)
    try:
        text = Path(name).read_text(encoding="utf-8")
    except OSError as error:
        cause = error.strerror or str(error)
        raise ConfigError(f"cannot use {name}: {cause}; write one with: hs-extract init, or name it: -c FILE") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot use {name}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    return parse(text, name)
