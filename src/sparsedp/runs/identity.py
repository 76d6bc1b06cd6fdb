"""What a checkpoint belongs to, and why another one is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from sparsedp._files import Json
from sparsedp.errors import ModelError, SparseDPError
from sparsedp.runs.checkpoint import check_same_parameters, describe_layout
from sparsedp.runs.record import RunFacts

_APART = ("plan", "method", "layout", "seed", "public_seed", "details")


def setup_names(identity: Mapping[str, Json]) -> tuple[str, ...]:
    """The trainer's own choices (optimizer, engine, ...): in the record's settings and in the identity alike."""
    return tuple(name for name in identity if name not in _APART)


def identity_of(facts: RunFacts) -> dict[str, Json]:
    """Everything that decides what a run computes and that must stay the same for it to go on."""
    return {
        "plan": facts.plan.fingerprint,
        "method": facts.method.to_json(),
        "layout": describe_layout(facts.layout),
        "seed": facts.seed,
        "public_seed": facts.public_seed,
        **facts.setup,
        "details": dict(facts.details),
    }


def check_identity(saved: Mapping[str, Json], now: Mapping[str, Json]) -> None:
    """Refuse a checkpoint of another run, naming what differs.

    Raises:
        SparseDPError: the two are not the same run.
        ModelError: the model has other trainable parameters, or the same in another order.
    """
    same = json.loads(json.dumps(dict(now)))
    check_parameters(saved["layout"], same["layout"])
    differing = list(differences({name: saved.get(name) for name in same}, same))
    if [name for name, _, _ in differing] == ["plan"]:
        raise SparseDPError(
            "this is not the run that was saved: its plan was made for other data or other settings (another number "
            "of rows or units, epsilon, epochs or batch size). Resume with the data and settings it was started with"
        )
    if differing:
        words = "; ".join(f"{name} was {short(old)} and is {short(new)}" for name, old, new in differing[:6])
        raise SparseDPError(
            f"this is not the run that was saved: {words}. Resume with what it was started with"
        )


def check_parameters(saved: Json, now: Json) -> None:
    """Refuse a model whose trainable parameters are not those of the run: state is kept by their places.

    Raises:
        ModelError: some have another name or shape, or they come in another order.
    """
    if alike(saved, now):
        return
    check_same_parameters(saved, now)
    places = zip(saved, now, strict=True)
    moved = [f"{new[0]} where {old[0]} was" for old, new in places if old != new]
    raise ModelError(
        f"the model has the parameters of the run in another order ({'; '.join(moved[:3])}); define its layers in "
        "the order they had when the run started"
    )


def alike(one: Json, other: Json) -> bool:
    """Whether two JSON values have one text."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def differences(one: Json, other: Json, name: str = "") -> Iterator[tuple[str, Json, Json]]:
    """Where two JSON values differ, by dotted names, and what stands there."""
    if isinstance(one, dict) and isinstance(other, dict):
        pairs = [(key, one.get(key), other.get(key)) for key in dict.fromkeys([*one, *other])]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(str(i), old, new) for i, (old, new) in enumerate(zip(one, other, strict=True))]
    else:
        if not alike(one, other):
            yield name, one, other
        return
    for key, old, new in pairs:
        yield from differences(old, new, f"{name}.{key}" if name else key)


def short(value: Json) -> str:
    """A JSON value in a line."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
