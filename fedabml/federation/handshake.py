"""At the start of a federation, every site compares the schema with its data, and all freeze one card.

    describe   the schema goes to every site, which answers whether its data fit, or why they do not
    sums       only with normalisation = "pooled", and only if every site allows it: sums of the inputs come back
    freeze     the card goes to every site, which rebuilds it, checks it against its data, and stores it for good

The server calls `freeze` and `admit`; a site calls `answer`. `LEAKS` lists what a site reveals.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from .. import algorithms
from ..arguments import checked_integer
from ..errors import InputError
from ..files.sealed import read_json, write_json
from .card import Card, make_card
from .folders import SiteFolder
from .messages import Refusal, printable
from .pooled import check_sums, pooled_schema, site_sums, unpooled
from .schema_types import Schema
from .settings import Settings
from .site_check import reasons
from .site_data import check_schema, load, mismatches, read, without_values

if TYPE_CHECKING:
    from .messages import Order, Reply

log = logging.getLogger("fedabml")

LEAKS = (
    "describe: whether the site's data fit the schema, and whether the site allows sums. If the data do not fit: which "
    "of the schema's columns are missing, are of another kind or have none of the listed words; the kind of the data; "
    "the shape, length and type of arrays; that labels, classes or images are unknown, that values are missing or not "
    "finite, that there are fewer than two rows, or that the data or the site's settings cannot be used.",
    "describe: a hostile server could guess with many schemas, so a site compares at most 20 different schemas and "
    "cards with its data, and no other schema once it has stored a card. A word of a feature that fewer than 5 rows "
    "share is not confirmed; that the target has a class which the schema lacks is reported, however rare it is.",
    "sums (off unless the site sets allow_pooled_sums and, for a table, names its target_column): for every number, "
    "every date's year and every target of a regression the count, sum and sum of squares of the training rows, and so "
    "the site's means, deviations and gaps. An extreme value dominates its sums and can be guessed from them. Columns "
    "with fewer than 5 values are left out. For samples of bytes, such as images: how often each byte occurs in each "
    "channel, however few samples there are.",
    "sums: the operator's schema chooses the columns; the target_column that a table's site names is never among the "
    "inputs. A site gives one set of sums. It repeats them, but refuses another seed, another schema or changed data, "
    "and stores only a card with the seed, the columns and the target of its sums.",
    "sums with allow_medians: the median of every number and every date's year of a table, rounded to a twentieth of "
    "the column's own deviation or of the schema's scale, whichever is larger.",
    "sums with allow_words: words of categories that at least 5 training rows of the site share; rare words never.",
    "freeze: that the site stores the card, by its digest; or a reason as for describe, or that the data cannot be "
    "encoded by the card.",
    "scores (off unless the site sets allow_scores): accuracy or error and NLL of the site's own model on its test "
    "rows, rounded to four digits, and the number of these rows; nothing if there are fewer than ten.",
    "Counts of labels stay at the site, with one exception: if the schema declares labels that are numbers to be the "
    "target of a regression, the sums hold their mean, and the site stores only a card for that regression.",
    "Every round sends the number of training samples, the mean loss, the update and times, or why there is no update. "
    "The server may infer more from them: see the threat model.",
)
MOST_SCHEMAS = 20  # different schemas and cards that a site compares with its data
MOST_REASON = 1000  # characters of a site's reason that the server keeps
_ALLOW_SUMS = "allow_pooled_sums = true and, for a table, its own target_column"
_AGAIN = "If the site trusts the operator, it can remove state/schemas.json in its folder and answer anew."


class Exchange(Protocol):
    """Send an order to every site that takes part and return their replies by name, after at most `timeout` seconds."""

    def __call__(
        self, kind: str, facts: dict[str, Any], tensors: dict[str, Tensor], timeout: float
    ) -> Mapping[str, Reply]: ...


class Frozen(NamedTuple):
    """The result of the start: the card, the sites that stored it, and why others are left out."""

    card: Card
    accepted: list[str]
    refused: dict[str, str]


# -- the server -------------------------------------------------------------------------------------------------------
def freeze(
    settings: Settings, schema: Schema, exchange: Exchange, keep: Callable[[Card], object] | None = None
) -> Frozen:
    """Run the start protocol and return the card that at least `min_replies` sites have stored.

    `keep` is called with the card before any site gets it: a server that dies in between continues with `admit`. Raises
    InputError, with every site's reason, if too few sites match, or if sums are needed that a site does not allow.
    """
    answers = exchange("describe", {"schema": schema.to_json()}, {}, settings.round_timeout)
    accepted, refused = _sorted_out(answers, _reason_not_matching)
    _require_enough(accepted, refused, settings)
    if settings.normalisation == "pooled":
        unwilling = [name for name in accepted if answers[name].facts.get("allow_pooled_sums") is not True]
        if unwilling:
            raise InputError(
                f"normalisation is 'pooled', but these sites do not allow sums: {', '.join(unwilling)}. Each may set "
                f"{_ALLOW_SUMS} in its site.toml; or set normalisation = 'schema' in federation.toml."
            )
        facts = {"schema": schema.to_json(), "seed": settings.seed}
        answers = exchange("sums", facts, {}, settings.round_timeout)

        def summed(reply: Reply) -> str:
            return check_sums(schema, reply.facts.get("sums"), settings.max_samples)

        accepted, refused = _keep_accepted(accepted, refused, answers, summed)
        _require_enough(accepted, refused, settings)
        schema = pooled_schema(schema, [answers[name].facts["sums"] for name in sorted(accepted)])
    card = make_card(
        settings.federation, schema.inputs(settings.name),
        algorithm=algorithms.make(settings.algorithm, **settings.hyper), model=settings.model,
        model_options=settings.model_options, batch_size=settings.batch_size, epochs=settings.epochs,
        seed=settings.seed, dtype=settings.dtype, class_weights=schema.class_weights, schema=schema.to_json(),
    )  # fmt: skip
    if keep is not None:
        keep(card)
    accepted, refused = _offer(card, accepted, refused, exchange, settings)
    _require_enough(accepted, refused, settings)
    return Frozen(card, accepted, refused)


def admit(card: Card, settings: Settings, exchange: Exchange) -> Frozen:
    """Offer the frozen card to sites that join late or return. The card never changes; a refusal raises nothing."""
    answers = exchange("describe", {"schema": dict(card.schema)}, {}, settings.round_timeout)
    accepted, refused = _sorted_out(answers, _reason_not_matching)
    if accepted:
        accepted, refused = _offer(card, accepted, refused, exchange, settings)
    return Frozen(card, accepted, refused)


def _offer(
    card: Card, accepted: list[str], refused: dict[str, str], exchange: Exchange, settings: Settings
) -> tuple[list[str], dict[str, str]]:
    tensors, facts = card.tensors_and_facts()
    answers = exchange("freeze", facts, tensors, settings.round_timeout)

    def stored(reply: Reply) -> str:
        return "" if reply.facts.get("digest") == card.digest else "It did not confirm the card's digest."

    return _keep_accepted(accepted, refused, answers, stored)


def _sorted_out(answers: Mapping[str, Reply], reason_of: Callable[[Reply], str]) -> tuple[list[str], dict[str, str]]:
    """Return the sites whose reply is good, in order of their names, and the reasons against the others."""
    refused: dict[str, str] = {}
    for name, reply in sorted(answers.items()):
        if reason := printable(reply.error, MOST_REASON) or reason_of(reply):
            refused[name] = reason
    return sorted(answers.keys() - refused.keys()), refused


def _keep_accepted(
    accepted: list[str], refused: dict[str, str], answers: Mapping[str, Reply], reason_of: Callable[[Reply], str]
) -> tuple[list[str], dict[str, str]]:
    """Return which of the accepted sites stay accepted, and the reasons against all others, also silent ones."""
    good, bad = _sorted_out({name: answers[name] for name in accepted if name in answers}, reason_of)
    silent = {name: "It did not answer in time." for name in accepted if name not in answers}
    return good, refused | bad | silent


def _reason_not_matching(reply: Reply) -> str:
    if reply.facts.get("match") is True:
        return ""
    reasons = reply.facts.get("reasons")
    texts = [each for each in reasons if isinstance(each, str)] if isinstance(reasons, list) else []
    return printable(" ".join(texts), MOST_REASON) or "Its answer to the schema cannot be read."


def _require_enough(accepted: list[str], refused: dict[str, str], settings: Settings) -> None:
    if len(accepted) < settings.min_replies:
        reasons = " ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise InputError(
            f"{len(accepted)} site(s) match the schema, and min_replies is {settings.min_replies}. {reasons}".strip()
        )


# -- a site -----------------------------------------------------------------------------------------------------------
def answer(order: Order, site: SiteFolder) -> dict[str, Any]:
    """Return `facts` and `error` of a site's reply to describe, sums or freeze; neither holds a value of a row."""
    try:
        if order.federation != site.settings.federation:
            raise Refusal("This site belongs to another federation.")
        answers = {"describe": _describe, "sums": _send_sums, "freeze": _store}
        if order.kind not in answers:
            raise Refusal("This is no order of the start protocol.")
        return {"facts": answers[order.kind](order, site), "error": ""}
    except Refusal as error:
        log.warning("This site refuses the order '%s': %s", printable(order.kind), error)
        return {"facts": {}, "error": printable(str(error), MOST_REASON)}
    except InputError as error:
        log.warning("An order of the start protocol failed: %s", error)
        return {"facts": {}, "error": "This site cannot answer. The reason is in its own log."}


@contextmanager
def _about_the_order() -> Iterator[None]:
    """Turn errors about an order's content into Refusals: the server knows that content already."""
    try:
        yield
    except InputError as error:
        raise Refusal(str(error)) from None


def _describe(order: Order, site: SiteFolder) -> dict[str, Any]:
    schema = _asked(order, site)
    found = mismatches(site, schema)
    for reason in found:
        log.warning("The data do not fit the federation's schema: %s", reason)
    return {"match": not found, "reasons": found, "allow_pooled_sums": _allows_sums(site, schema)}


def _allows_sums(site: SiteFolder, schema: Schema) -> bool:
    """Return whether the site allows sums. Of a table it must name its own target, so that labels are never inputs."""
    settings = site.settings
    return settings.allow_pooled_sums and (schema.kind != "table" or settings.target_column != "")


def _send_sums(order: Order, site: SiteFolder) -> dict[str, Any]:
    """Send the site's sums. It has only one set of sums for the server: differences of two could show single rows."""
    if site.card_file.exists():
        raise Refusal("This site has stored a card, so it sends no more sums.")
    schema = _asked(order, site)
    if not _allows_sums(site, schema):
        raise Refusal(f"This site does not allow sums: its site.toml needs {_ALLOW_SUMS}.")
    with _about_the_order():
        seed = checked_integer(order.facts.get("seed"), "The seed", 0)
    data = read(site.settings, schema)
    with without_values("summed"):
        if reasons(schema, data):
            raise Refusal("The data do not fit the schema.")
        sums = site_sums(schema, data, site.settings, seed)
    answered, given = _answered(site), {**_basis(schema, seed), "sums": _digest(sums)}
    if answered.setdefault("sums", given) != given:
        raise Refusal(f"This site has given sums for another schema, another seed or other data. {_AGAIN}")
    write_json(_answers_file(site), answered)
    return {"sums": sums}


def _store(order: Order, site: SiteFolder) -> dict[str, Any]:
    with _about_the_order():
        card = Card.of(order.tensors, order.facts)
        schema = Schema.of(dict(card.schema), "The card's schema")
    if card.federation != site.settings.federation:
        raise Refusal("The card is refused: it is that of another federation.")
    if site.card_file.exists():
        stored = _stored(site)
        if stored.digest != card.digest:
            raise Refusal("This site has stored another card of this federation, and keeps it.")
        return {"digest": stored.digest}
    check_schema(card, schema)
    basis = _basis(schema, card.seed)
    if not basis.items() <= _answered(site).get("sums", basis).items():
        raise Refusal(f"This site has given sums for a card with another seed or other inputs. {_AGAIN}")
    _count(site, card.digest)
    load(site, card)
    card.save(site.card_file)
    log.info("The card %s of federation %s is stored.", card.digest, card.federation)
    return {"digest": _stored(site).digest}


def _stored(site: SiteFolder) -> Card:
    try:
        return Card.load(site.card_file)
    except InputError as error:
        log.warning("%s", error)
        raise Refusal("The card on this site's disk is damaged. Restore state/card.safetensors.") from None


def _asked(order: Order, site: SiteFolder) -> Schema:
    """Return the order's schema. Raises Refusal if the site has stored another, or has compared too many."""
    with _about_the_order():
        schema = Schema.of(order.facts.get("schema"), "The schema of the order")
    if site.card_file.exists():
        if Schema.of(dict(_stored(site).schema)) != schema:
            raise Refusal("This site has stored a card, so it compares no other schema with its data.")
        return schema
    _count(site, _digest(schema.to_json()))
    return schema


def _count(site: SiteFolder, digest: str) -> None:
    """Record that a schema or a card is compared with the data. Raises Refusal if the site has compared too many."""
    answered = _answered(site)
    if digest in answered["schemas"]:
        return
    if len(answered["schemas"]) >= MOST_SCHEMAS:
        raise Refusal(
            f"This site has compared {MOST_SCHEMAS} different schemas and cards with its data, and compares no more. "
            f"{_AGAIN}"
        )
    answered["schemas"].append(digest)
    write_json(_answers_file(site), answered)


def _answers_file(site: SiteFolder) -> Path:
    return site.state / "schemas.json"


def _answered(site: SiteFolder) -> dict[str, Any]:
    """Return the digests of all `schemas` and cards that the site has compared and, once given, the basis of `sums`."""
    file = _answers_file(site)
    return dict(read_json(file)) if file.exists() else {"schemas": []}


def _basis(schema: Schema, seed: int) -> dict[str, Any]:
    """Return what a card must have in common with the sums that it is made from."""
    return {"inputs": _digest(unpooled(schema)), "seed": seed}


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
