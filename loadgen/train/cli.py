"""`tidegate train`: its options and what they start."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from loadgen.outputs import check_file
from services.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the policy: the best one validated")
    parser.add_argument(
        "--folder", type=Path, metavar="FOLDER",
        help="of the checkpoint, from which the same command goes on (default: FILE with .train at its end)",
    )  # fmt: skip
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings as JSON (loadgen/train/settings.py)")
    parser.add_argument("--seed", type=int, help="of everything random (default 0)")
    parser.add_argument("--transitions", type=int, help="to learn from (default 3,000,000)")


def run(namespace: argparse.Namespace) -> int:
    """Train, or go on training; the exit code."""
    from loadgen.train import checkpoint
    from loadgen.train.settings import TrainSettings
    from loadgen.train.training import Training, differing

    check_file("--out", namespace.out)
    folder = namespace.folder or namespace.out.with_name(f"{namespace.out.name}.train")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--folder: found the file {folder}, expected a folder")
    given: dict[str, object] = {}
    if namespace.config is not None:
        try:
            given = msgspec.json.decode(namespace.config.read_bytes(), type=dict[str, object])
        except (OSError, msgspec.DecodeError) as error:
            raise UserError(f"--config {namespace.config}: {error}") from error
    given |= {n: getattr(namespace, n) for n in ("seed", "transitions") if getattr(namespace, n) is not None}
    saved = checkpoint.load(folder)
    try:
        settings = msgspec.convert(_over_defaults(given), TrainSettings)
    except msgspec.ValidationError as error:
        raise UserError(f"train: {error}") from error
    if settings.transitions <= settings.demonstrations:
        raise UserError(
            f"train: found {settings.transitions:,} transitions, expected more than the {settings.demonstrations:,} "
            "demonstrations they begin with: nothing would be learned"
        )
    if saved is not None and (unlike := differing(saved.meta.settings, settings)):
        raise UserError(f"train: {folder} holds a run with other settings ({', '.join(unlike)}); name another --folder")
    training = Training(settings, namespace.out, folder, tell=_tell, command=_command(namespace))
    if saved is not None:
        training.restore(saved)
        _tell(f"going on from {saved.meta.transitions:,} transitions and {saved.meta.updates:,} updates")
    _tell(f"learning from {settings.transitions:,} transitions; a checkpoint every {settings.checkpoint_every_s:g} s")
    try:
        training.run()
    except KeyboardInterrupt:
        _tell(f"interrupted at {training.transitions:,} transitions; the same command goes on from {folder}")
        raise
    _tell(f"{namespace.out}: {training.best:.4f} of the heuristic's goodput in validation, {training.seconds:,.0f} s")
    return 0


def _over_defaults(given: dict[str, object]) -> dict[str, object]:
    """The settings with ``given`` over them; ``learner`` is merged, since training's differ from the service's."""
    from loadgen.train.settings import LEARNER, TrainSettings
    from services.settings import nearest

    learner = given.get("learner", {})
    if not isinstance(learner, dict):
        raise UserError("train: learner: expected a table")
    for table, kind, within in ((given, TrainSettings, ""), (learner, type(LEARNER), "learner.")):
        for key in table:
            if key not in kind.__struct_fields__:
                raise UserError(
                    f"train: {within}{key}: an unknown key, expected {nearest(key, kind.__struct_fields__)}"
                )
    return given | {"learner": msgspec.to_builtins(LEARNER) | learner}


def _command(namespace: argparse.Namespace) -> str:
    """What to type to make the policy again; the settings stand beside it."""
    words = ["tidegate train", f"--out {namespace.out.name}"]
    for name in ("config", "seed", "transitions"):
        if (value := getattr(namespace, name)) is not None:
            words.append(f"--{name} {value.name if isinstance(value, Path) else value}")
    return " ".join(words)


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
