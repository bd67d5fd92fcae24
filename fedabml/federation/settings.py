"""Define the settings of a federation (`federation.toml`) and of a site (`site.toml`), checked when an object is made.

`Settings` decides what all sites do and belongs to the operator. `SiteSettings` belongs to the site: where its data
are, and what it allows. Both are read from TOML, and `to_toml` writes every key with its meaning, for people to edit.
"""

from __future__ import annotations

import logging
import math
import os
import re
import textwrap
import tomllib
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, Self

from ..algorithms import REGISTRY
from ..arguments import is_number, is_whole
from ..errors import InputError, nearest, quoted
from ..files.limits import MAX_TOML, parse_toml
from ..files.paths import read_text, write
from ..models import NETWORK_NAMES

JsonDict = dict[str, Any]
log = logging.getLogger("fedabml")
AGGREGATIONS = ("mean", "trimmed-mean", "median", "krum")
NORMALISATIONS = ("schema", "pooled")
DTYPES = ("float32", "float64")
MOST_PATIENCE = 90.0
CHUNK_MB = 8  # the largest body of one request; Flower sends arrays in parts of 5 MiB
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_ID = re.compile(r"[0-9a-f]{32}")
_LABEL = r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)"
_HOST = re.compile(rf"{_LABEL}(\.{_LABEL})*")


def key(default: Any, doc: str, low: float = -math.inf, high: float = math.inf, choices: tuple[str, ...] = ()) -> Any:
    """Declare a key of a settings file: its default, its meaning, and its closed range or its choices.

    `MISSING` stands for a key that must be given, and `dict` for an empty table.
    """
    meta = {"doc": doc, "low": low, "high": high, "choices": choices}
    if default is dict:
        return field(default_factory=dict, metadata=meta)
    return field(metadata=meta) if default is MISSING else field(default=default, metadata=meta)


def check_name(name: object, subject: str = "A site's name") -> str:
    """Return a name of 1 to 63 letters, digits, - and _ that begins with a letter or digit, or raise InputError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(
            f"{subject} has 1 to 63 letters, digits, - and _, and begins with a letter or digit; it is {quoted(name)}."
        )
    return name


def check_model_and_algorithm(model: object, algorithm: object) -> None:
    """Raise InputError for a network or an algorithm that is not one of fedabml's own."""
    if not isinstance(model, str) or model not in NETWORK_NAMES:
        raise InputError(
            f"A federation has no network {quoted(model)}; files of code and Hugging Face folders are not accepted."
            f"{nearest(str(model)[:60], NETWORK_NAMES)}"
        )
    entry = REGISTRY.get(algorithm) if isinstance(algorithm, str) else None
    if entry is None or entry.code is not None:
        own = [name for name, each in REGISTRY.items() if each.code is None]
        raise InputError(
            f"A federation has no algorithm {quoted(algorithm)}; files of code are not accepted."
            f"{nearest(str(algorithm)[:60], own)}"
        )


def check_host(host: object, subject: str = "host") -> str:
    """Return a host's name or IP address, without a port, or raise InputError."""
    import ipaddress

    if (
        isinstance(host, str) and len(host) <= 253 and "%" not in host
    ):  # a certificate cannot name a zone (fe80::1%eth0)
        try:
            return str(ipaddress.ip_address(host))
        except ValueError:
            if _HOST.fullmatch(host) and not host.replace(".", "").isdigit():
                return host
    raise InputError(f"{subject} must be a name such as fed.example.org or an IP address; it is {quoted(host)}.")


def join_address(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: object) -> tuple[str, int]:
    """Return host and port of `host:port` or `[IPv6]:port`. Raises InputError for anything else."""
    host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535 or (":" in host) != bracketed:
        raise InputError(f"server must be an address such as fed.example.org:8443; it is {quoted(address)}.")
    return check_host(host[1:-1] if bracketed else host, "server"), int(port)


_noted: set[tuple[str, ...]] = set()  # files and their retired keys; a process reads a file many times


class _Checked:
    """A frozen dataclass whose fields are the keys of a TOML file.

    `RETIRED` are keys of earlier versions, each with what to do in their place. They have no effect, which a note says.
    """

    RETIRED: ClassVar[dict[str, str]] = {}

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, each.name, _checked(type(self).__name__, each, getattr(self, each.name)))
        self._check()

    def _check(self) -> None:
        """Check what concerns several keys."""

    @classmethod
    def of(cls, data: JsonDict, subject: str = "The settings") -> Self:
        """Make settings from a table. Raises InputError for a key that is unknown, missing or wrong."""
        known = {each.name: each for each in fields(cls)}  # type: ignore[arg-type]
        retired = {name: advice for name, advice in cls.RETIRED.items() if name in data}
        if retired and (subject, *retired) not in _noted:
            _noted.add((subject, *retired))
            for name, advice in retired.items():
                log.warning("%s: the key '%s' has no effect. %s", subject, name, advice)
        data = {name: value for name, value in data.items() if name not in retired}
        for name in data:
            if name not in known:
                raise InputError(f"{subject} has an unknown key {quoted(name)}.{nearest(str(name), known)}")
        for name, each in known.items():
            if each.default is MISSING and each.default_factory is MISSING and name not in data:
                raise InputError(f"{subject} has no key '{name}' ({each.metadata['doc']}).")
        try:
            return cls(**data)
        except InputError as error:
            raise InputError(f"{subject}: {error}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a TOML file of at most 256 KiB."""
        try:
            data = parse_toml(read_text(path, MAX_TOML), f"'{path}'")
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"'{path}' is not valid TOML: {error}.") from error
        return cls.of(data, f"'{path}'")

    def to_dict(self) -> JsonDict:
        """Return all keys with their values."""
        return {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]

    def to_toml(self) -> str:
        """Return a TOML text with every key, its meaning, its range or choices, and its value. Tables come last."""
        import tomli_w

        lines, tables = [*_comment((type(self).__doc__ or "").strip().splitlines()[0]), ""], []
        for each in fields(self):  # type: ignore[arg-type]
            value, words = getattr(self, each.name), _comment(_explained(each))
            if isinstance(value, dict):
                tables += [*words, tomli_w.dumps({each.name: value}).rstrip() or f"[{each.name}]", ""]
            else:
                lines += [*words, tomli_w.dumps({each.name: value}).rstrip(), ""]
        return "\n".join(lines + tables).rstrip() + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the commented TOML file."""
        write(path, self.to_toml())


@dataclass(frozen=True)
class Settings(_Checked):
    """Settings of a federation, written by `fedabml federation init`. Stop the federation before you edit them.

    A site uses none of these before they are frozen in the card of inputs.
    """

    federation: str = key(MISSING, "identity of this federation, 32 hexadecimal digits; leave it as it is")
    name: str = key(MISSING, "name of this federation, for people")
    host: str = key(MISSING, "name or address by which sites reach this machine; the certificate holds it: see renew")
    port: int = key(8443, "the one port that sites reach, of the proxy", 1, 65535)
    superlink_port: int = key(8180, "port of Flower's SuperLink, on the loopback interface only", 1, 65535)
    algorithm: str = key("fedabml", "algorithm by name, see `fedabml algorithms`", choices=tuple(REGISTRY))
    model: str = key("mlp", "network by name", choices=tuple(NETWORK_NAMES))
    rounds: int = key(50, "rounds of communication", 1, 1_000_000)
    participation: float = key(1.0, "share of the registered sites that take part in a round", 0, 1)
    epochs: int = key(5, "passes over a site's data in a round", 1, 100_000)
    batch_size: int = key(50, "samples in a minibatch", 1, 1_000_000)
    seed: int = key(0, "seed of every random number", 0)
    dtype: str = key("float32", "type of the numbers", choices=DTYPES)
    normalisation: str = key(
        "schema",
        "how inputs are normalised: by the fixed numbers of schema.toml, or by sums pooled over all sites, which every "
        "site must allow",
        choices=NORMALISATIONS,
    )
    round_timeout: float = key(
        600.0,
        "seconds that a round may take once min_replies sites are connected; for absent sites the server waits at most "
        "a quarter of it, and at most 90 seconds",
        1,
        7 * 86400,
    )
    min_replies: int = key(
        2,
        "valid replies that a round needs, or it is repeated; at least as many sites are drawn, whatever the "
        "participation. norm_factor and the rules of aggregation protect only from three replies on",
        1,
        1_000_000,
    )
    attempts: int = key(3, "times that a round is tried before the federation gives up", 1, 1000)
    over_select: int = key(0, "sites drawn beyond the number that counts; the first valid replies count", 0, 1_000_000)
    rest_rounds: int = key(
        2,
        "rounds in which a site that did not answer is not drawn, unless it returns; at least 60 seconds, and twice as "
        "long after every further miss (0: no rest)",
        0,
        1_000_000,
    )
    aggregation: str = key("mean", "how updates are combined; the others bear some false ones", choices=AGGREGATIONS)
    trim: float = key(0.2, "trimmed-mean: share left out at each end; krum: share of sites that may be false", 0, 0.49)
    norm_factor: float = key(
        10_000.0,
        "refuse a reply that alone would put the state too far from the median of the round's replies: further than "
        "this multiple of the median distance or change. It needs three valid replies (0: off)",
        0,
        1e9,
    )
    max_samples: int = key(10_000_000, "most training samples that a site may report", 1)
    max_message_mb: int = key(128, "most megabytes of one site's reply", 1, 2000)
    prior_every: int = key(10, "rounds between the priors that sites receive during training (0: at the end only)", 0)
    score_every: int = key(0, "rounds between scores of sites that allow them (0: none)", 0)
    hyper: JsonDict = key(dict, "hyperparameters of the algorithm, such as lr = 0.03")  # noqa: RUF009
    model_options: JsonDict = key(dict, "options of the network, such as hidden = [64]")  # noqa: RUF009

    def __post_init__(self) -> None:
        check_model_and_algorithm(self.model, self.algorithm)
        super().__post_init__()

    def _check(self) -> None:
        _check_id(self.federation)
        check_name(self.name, "name")
        object.__setattr__(self, "host", check_host(self.host))
        if self.port == self.superlink_port:
            raise InputError(f"port and superlink_port are both {self.port}. Choose two different ports.")
        if self.participation <= 0:
            raise InputError("participation must be above 0.")

    @property
    def patience(self) -> float:
        """The most seconds of a round that pass for absent sites, for a newcomer's first answer, or for a prior."""
        return min(MOST_PATIENCE, self.round_timeout / 4)

    @property
    def address(self) -> str:
        """The address that sites connect to, `host:port`."""
        return join_address(self.host, self.port)


@dataclass(frozen=True)
class SiteSettings(_Checked):
    """Settings of one site. They belong to the site: the server can neither read nor change them."""

    RETIRED: ClassVar[dict[str, str]] = {
        "drop_columns": "Remove it: a site reads the columns of the federation's schema alone."
    }

    federation: str = key(MISSING, "identity of the federation, 32 hexadecimal digits; leave it as it is")
    name: str = key(MISSING, "name of this site; leave it as it is")
    server: str = key(MISSING, "address of the federation's server, host:port")
    data: str = key(
        "",
        "this site's data: a table, an .npz file or a folder; a relative path begins at this file's folder. They never "
        "leave this machine",
    )
    target_column: str = key(
        "",
        "table: column to predict, whatever the federation's schema calls it; needed for allow_pooled_sums, or if the "
        "names differ",
    )
    id_column: str = key("", "table: column of identifiers, never a feature, carried into predictions")
    split_by: str = key("", "table: column of dates or numbers; the newest rows are test rows")
    test_share: float = key(0.0, "table: share of the rows kept for testing; they never train", 0, 0.9)
    allow_pooled_sums: bool = key(
        False, "send the number of rows, sums and sums of squares of every input (they show this site's means)"
    )
    allow_medians: bool = key(False, "with these sums, send the median of every input, rounded")
    allow_words: bool = key(False, "with these sums, send words of categories that are not rare")
    allow_scores: bool = key(False, "send accuracy or error and NLL of this site's own model on its test rows, rounded")
    node_port: int = key(0, "port of the SuperNode on the loopback interface (0: a free one)", 0, 65535)

    def _check(self) -> None:
        _check_id(self.federation)
        check_name(self.name)
        split_address(self.server)


def _check_id(federation: str) -> None:
    if not _ID.fullmatch(federation):
        raise InputError(f"federation must be 32 hexadecimal digits in lower case; it is {quoted(federation)}.")


def _checked(owner: str, each: Field[Any], value: Any) -> Any:
    """Return a value in the type of its field. An InputError gives the type, the choices or the range."""
    meta, subject = each.metadata, f"{owner}: {each.name} ({each.metadata['doc']})"
    kind = str(each.type)
    if kind == "JsonDict":
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise InputError(f"{subject} must be a table; it is {quoted(value)}.")
        return dict(value)
    finite = is_number(value) and math.isfinite(value)
    wanted, fits = {
        "str": ("a text", isinstance(value, str) and len(value) <= 4096 and value.isprintable()),
        "bool": ("true or false", isinstance(value, bool)),
        "int": ("a whole number", is_whole(value)),
        "float": ("a finite number", finite),
    }[kind]
    if not fits:
        raise InputError(f"{subject} must be {wanted}; it is {quoted(value)}.")
    if meta["choices"] and value not in meta["choices"]:
        raise InputError(f"{subject} is {quoted(value)}.{nearest(value, meta['choices'])}")
    if kind in ("str", "bool"):
        return value
    number, low, high = int(value) if kind == "int" else float(value), meta["low"], meta["high"]
    if not low <= number <= high:
        raise InputError(f"{subject} is {quoted(value)}; it must be {_range(low, high)}.")
    return number


def _range(low: float, high: float) -> str:
    if math.isinf(low):
        return ""
    return f"at least {low:.10g}" if math.isinf(high) else f"between {low:.10g} and {high:.10g}"


def _explained(each: Field[Any]) -> str:
    meta = each.metadata
    limits = f"one of {', '.join(meta['choices'])}" if meta["choices"] else _range(meta["low"], meta["high"])
    is_plain = each.type in ("JsonDict", "str", "bool") and not meta["choices"]
    text = f"{meta['doc']}{'' if is_plain or not limits else f' ({limits})'}"
    return f"{text[0].upper()}{text[1:]}."


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, 110, initial_indent="# ", subsequent_indent="#   ")
