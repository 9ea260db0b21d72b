"""Settings of a process: one msgspec Struct per service, filled from four places, the later winning:
its defaults, a table ``[<section>]`` of a TOML file, the environment variables ``TIDEGATE_<SECTION>_<KEY>``,
and the command line (``--set key=value``).

Whatever cannot be used is a ``SettingsError`` that says where it stood, the key, what was found and what was
expected; an unknown key names the nearest known one. Ranges are ``msgspec.Meta`` on the fields.
"""

from __future__ import annotations

import contextlib
import difflib
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import msgspec

from services.errors import SettingsError

SECTIONS = ("common", "telemetry", "featurizer", "decision", "actuator", "learner", "node", "examiner", "demo")
"""Tables that a settings file may hold. One file can serve every process; each reads its own tables."""

PLAIN_VARIABLES = ("CONFIG", "SHARED")
"""Variables without a section: the settings file, and where tests find public data."""
ENGINE_VARIABLES = (
    "SOCKET", "NODE", "CLASS", "Q0_SHARE", "CARD_KV_BYTES", "HBM_BYTES", "GROUP_BLOCKS", "PAUSE_MS",
)  # fmt: skip
"""Variables of a vLLM server with Tidegate inside (``actuator.engines.vllm.settings``): a shell may have both."""
TEST_VARIABLES = ("POOL_", "RELOCATION_", "VLLM_")
"""Beginnings of variables that only tests read."""

Ratio = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0.0)]
T = TypeVar("T", bound=msgspec.Struct)


class CommonSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every service has: table ``[common]``, variables ``TIDEGATE_COMMON_<KEY>``."""

    nats_url: str = "nats://127.0.0.1:4222"
    """Server to connect to."""
    nats_user: str = ""
    """User name; empty: none."""
    nats_password: str = ""
    """Its password. Prefer the environment to the command line, which other users of the machine can read."""
    nats_token: str = ""
    """Token instead of user and password; empty: none."""
    connect_timeout_s: PositiveSeconds = 10.0
    """How long the first connection is tried before the process gives up with exit code 2: a server that
    starts beside us needs a moment, a mistyped address should be seen soon."""
    drain_timeout_s: Annotated[float, msgspec.Meta(gt=0.0, le=60.0)] = 4.5
    """Limit in seconds for everything between SIGTERM and the exit; below the 5 s that a supervisor waits."""
    http_host: str = "127.0.0.1"
    """Address of /live, /ready and /metrics: loopback, since they answer without asking who is there."""
    http_port: Annotated[int, msgspec.Meta(ge=-1, le=65535)] = 0
    """Its port. 0: any free one (see ``http_port_file``); -1: no HTTP at all."""
    http_port_file: str = ""
    """File that receives the port chosen, for whoever started the process; empty: none."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe message that is logged."""
    log_format: Literal["text", "json"] = "text"
    """``text``: key=value on one line; ``json``: one object a line."""
    trace_file: str = ""
    """File to which spans are appended as OTLP-JSON lines, several processes into one; empty: none."""
    trace_ratio: Ratio | None = None
    """Share of new traces that is sampled. Unset: as OTEL_TRACES_SAMPLER says, else all of them. Traces that
    another process began are sampled as that one decided. Nothing is traced without a ``trace_file`` or an
    OTLP endpoint (OTEL_EXPORTER_OTLP_ENDPOINT)."""
    die_with_parent: bool = False
    """Die at once when the process that started this one dies: for the demo, which must leave nothing behind."""
    parent_pid: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Process id of that parent, so that one which died during our start is noticed; 0: unknown."""


class _Found(NamedTuple):
    where: str
    value: object
    from_text: bool
    """Came from the environment or the command line: a string to be read by the field's type."""


def load(
    kind: type[T],
    section: str,
    *,
    file: Path | None,
    environ: Mapping[str, str],
    overrides: Mapping[str, object] | None = None,
) -> T:
    """Settings of one section.

    ``overrides`` come from the command line: strings are read by the field's type, other values taken as
    they are. Raises SettingsError for anything that cannot be used, a missing required key included.
    """
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    found: dict[str, _Found] = {}
    if file is not None:
        for key, value in _table(file, section).items():
            _known(f"{file} [{section}]", key, fields)
            found[key] = _Found(f"{file} [{section}]", value, False)
    prefix = f"TIDEGATE_{section.upper()}_"
    for variable, text in environ.items():
        if variable.startswith(prefix):
            key = variable.removeprefix(prefix).lower()
            _known(f"environment variable {variable}", key, fields)
            found[key] = _Found(f"environment variable {variable}", text, True)
    for key, value in (overrides or {}).items():
        _known("command line", key, fields)
        found[key] = _Found("command line", value, isinstance(value, str))
    for name, field in fields.items():
        if field.required and name not in found:
            raise SettingsError(f"settings [{section}]", name, "nothing", f"{_told(field.type)} (no default)")
    values = {key: _convert(at.where, key, at.value, fields[key].type, at.from_text) for key, at in found.items()}
    try:
        return kind(**values)
    except ValueError as error:  # __post_init__: fields that do not go together
        raise SettingsError(f"settings [{section}]", "values", "a combination", str(error)) from error


def check_environment(environ: Mapping[str, str]) -> None:
    """SettingsError for a variable ``TIDEGATE_...`` that nothing of ours reads: a mistyped one must not be silent."""
    for variable in environ:
        rest = variable.removeprefix("TIDEGATE_")
        if rest == variable or rest in (*PLAIN_VARIABLES, *ENGINE_VARIABLES) or rest.startswith(TEST_VARIABLES):
            continue
        section, underscore, _ = rest.partition("_")
        if not underscore or section.lower() not in SECTIONS:
            known = [f"TIDEGATE_{name.upper()}" for name in SECTIONS]
            close = difflib.get_close_matches(f"TIDEGATE_{section}", known, n=1, cutoff=0.5)
            expected = (
                f"{close[0]}_<KEY>" if close else f"TIDEGATE_<{'|'.join(name.upper() for name in SECTIONS)}>_<KEY>"
            )
            raise SettingsError("environment", variable, "an unknown variable", expected)


def parse_assignments(texts: Collection[str]) -> dict[str, str]:
    """``["key=value", ...]`` of ``--set`` as a mapping; a later one wins. Raises SettingsError without ``=``."""
    assignments: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise SettingsError("command line", "--set", repr(text), "key=value")
        assignments[key.strip().replace("-", "_")] = value.strip()
    return assignments


def nearest(key: str, known: Collection[str]) -> str:
    """``the known key 'x'`` when one looks like ``key``, else the list of all."""
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"the known key {close[0]!r}" if close else f"one of {', '.join(sorted(known)) or 'no keys at all'}"


def _table(file: Path, section: str) -> Mapping[str, object]:
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(str(file), "settings file", str(error.strerror), "a readable file") from error
    except UnicodeDecodeError as error:
        raise SettingsError(str(file), "settings file", f"a byte that is not UTF-8 at {error.start}", "TOML") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(str(file), "TOML syntax", str(error), "valid TOML") from error
    for name, value in document.items():
        if name != section and name not in SECTIONS:
            kind = "table" if isinstance(value, dict) else "key outside of any table"
            wanted = nearest(name, {*SECTIONS, section}).replace("key", "table")
            raise SettingsError(str(file), name, f"an unknown {kind}", wanted)
        if not isinstance(value, dict):
            raise SettingsError(str(file), name, repr(value), f"a table [{name}]")
    table: Mapping[str, object] = document.get(section, {})
    return table


def _known(where: str, key: str, fields: Collection[str]) -> None:
    if key not in fields:
        raise SettingsError(where, key, "an unknown key", nearest(key, fields))


def _convert(where: str, key: str, value: object, kind: Any, from_text: bool) -> object:
    """``value`` as ``kind``; nested Structs are walked, so that an error names the innermost key."""
    if from_text and isinstance(value, str):
        value = _read(where, key, value, kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, Mapping):
        nested = {field.name: field for field in msgspec.structs.fields(kind)}
        for inner in value:
            _known(where, f"{key}.{inner}", {f"{key}.{name}" for name in nested})
        for name, field in nested.items():
            if field.required and name not in value:
                raise SettingsError(where, f"{key}.{name}", "nothing", _told(field.type))
        inner_values = {n: _convert(where, f"{key}.{n}", v, nested[n].type, False) for n, v in value.items()}
        try:
            return kind(**inner_values)
        except ValueError as error:
            raise SettingsError(where, key, _shown(key, value), str(error)) from error
    tables = _table_of(kind)
    if tables is not None and isinstance(value, list | tuple):
        return tuple(_convert(where, f"{key}[{k}]", entry, tables, False) for k, entry in enumerate(value))
    if isinstance(value, float) and value != value:  # a range check lets NaN through
        raise SettingsError(where, key, "nan", "a number")
    try:
        return msgspec.convert(value, kind, strict=not from_text)
    except msgspec.ValidationError as error:
        expected = (
            str(error).removeprefix("Expected ").split(", got ")[0].replace("`", "").replace("| null", "or unset")
        )
        if expected.startswith("Invalid enum value"):
            expected = _told(kind)
        raise SettingsError(where, key, _shown(key, value), expected) from error


def _table_of(kind: Any) -> Any:
    """The Struct of a ``tuple[Struct, ...]``: an array of tables in TOML; None for other types."""
    inner = get_args(kind)[0] if get_origin(kind) is tuple and get_args(kind) else None
    return inner if isinstance(inner, type) and issubclass(inner, msgspec.Struct) else None


def _read(where: str, key: str, text: str, kind: Any) -> object:
    """Text of the environment: lists by commas, tables as JSON, the rest by msgspec's lax mode."""
    if str in _members(kind):
        return text
    if text[:1] in ("[", "{"):
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise SettingsError(where, key, _shown(key, text), f"JSON ({error})") from error
    if any(get_origin(member) in (list, tuple, set, frozenset) for member in _members(kind)):
        return [part.strip() for part in text.split(",") if part.strip()]
    if float in _members(kind):
        with contextlib.suppress(ValueError):
            return float(text)
    return text.strip()


def _members(kind: Any) -> tuple[Any, ...]:
    """A union's members without annotations and NewTypes; a plain type is its own only member."""
    if hasattr(kind, "__metadata__"):
        return _members(get_args(kind)[0])
    if hasattr(kind, "__supertype__"):
        return _members(kind.__supertype__)
    if get_origin(kind) in (None, list, tuple, set, frozenset, dict, Literal):
        return (kind,)
    return tuple(inner for member in get_args(kind) for inner in _members(member))


def _told(kind: Any) -> str:
    names = []
    for member in _members(kind):
        if get_origin(member) is Literal:
            names += [repr(choice) for choice in get_args(member)]
        elif hasattr(member, "__members__"):
            names += [repr(choice.value) for choice in member]
        else:
            names.append(member.__name__ if isinstance(member, type) else str(member))
    return " or ".join(names)


def _shown(key: str, value: object) -> str:
    secret = key.endswith(("password", "_token", "secret"))
    return "a secret value" if secret else f"{value!r}"
