"""The `kvferry` command. Options are read here; each command brings its own imports, so that `--help` is quick."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

import kvferry
from kvferry.cluster.cli_calls import Chat, Generate, Status
from kvferry.cluster.cli_chaos import ChaosCommand
from kvferry.cluster.cli_operations import Drain, Restart, Role, Scale
from kvferry.cluster.cli_plan import Plan
from kvferry.cluster.cli_serve import Serve
from kvferry.cluster.cli_sim import Sim
from kvferry.runtime.errors import CallerError, KvferryError

DESCRIPTION = """Serve large language models from many workers: some prefill prompts, others decode answers.

Start a server, then ask it something from another terminal:

  kvferry serve ./SmolLM2-135M-Instruct
  kvferry generate "The capital of France is"
"""
CALLERS_FAULT = 2
FAILED = 1


@dataclass(frozen=True)
class Version:
    """Print the version."""

    def run(self) -> None:
        sys.stdout.write(f"kvferry {kvferry.__version__}\n")


Command = (
    Annotated[Serve, tyro.conf.subcommand("serve")]
    | Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Chat, tyro.conf.subcommand("chat")]
    | Annotated[Status, tyro.conf.subcommand("status")]
    | Annotated[ChaosCommand, tyro.conf.subcommand("chaos")]
    | Annotated[Drain, tyro.conf.subcommand("drain")]
    | Annotated[Scale, tyro.conf.subcommand("scale")]
    | Annotated[Role, tyro.conf.subcommand("role")]
    | Annotated[Restart, tyro.conf.subcommand("restart")]
    | Annotated[Plan, tyro.conf.subcommand("plan")]
    | Annotated[Sim, tyro.conf.subcommand("sim")]
    | Annotated[Version, tyro.conf.subcommand("version")]
)
Parsed = Serve | Generate | Chat | Status | ChaosCommand | Drain | Scale | Role | Restart | Plan | Sim | Version


def parse(arguments: Sequence[str] | None = None) -> Parsed:
    """Exits with code 2 and a usage message on standard error for unknown or malformed options."""
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
    return tyro.cli(Command, prog="kvferry", description=DESCRIPTION, args=arguments, config=config)


def main(arguments: Sequence[str] | None = None) -> None:
    """Failures end in one line on standard error and exit code 2 (the caller's fault) or 1."""
    try:
        parse(arguments).run()
    except KvferryError as error:
        sys.stderr.write(f"kvferry: {error}\n")
        sys.exit(CALLERS_FAULT if isinstance(error, CallerError) else FAILED)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # e.g. `kvferry generate … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains once more at exit
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
