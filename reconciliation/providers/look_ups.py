"""The order of look-ups, and what an adapter may conclude from them. It knows no protocol: see http.py for that.

By key, by the stored id, by a narrow reference; whatever a list or an index shows is confirmed by a read of its id,
which overrides it. Absence is reported only where an authoritative source was read to its end, and where a control read
shows that we can still see things there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from reconciliation.providers.base import ActionSpec, Call, Finding, Json, ProviderError, Source, Verdict, differences

CONCLUSIVE = frozenset({Verdict.FOUND, Verdict.REMOVED, Verdict.SEVERAL, Verdict.MISMATCH, Verdict.IN_PROGRESS})


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one list or index showed: `complete` if read to its end, `authoritative` if it cannot lag."""

    objects: tuple[Json, ...] = ()
    complete: bool = True
    authoritative: bool = False
    in_progress: bool = False
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where an adapter can look for one call. `by_id` reports one object as FOUND, REMOVED, ABSENT or CANNOT_TELL.

    `control` raises, or returns False, unless an object that is known to exist can be seen.
    """

    by_id: Callable[[str], Finding]
    control: Callable[[], bool]
    by_key: Callable[[], Seen] | None = None
    by_reference: Callable[[], Seen] | None = None
    id_field: str = "id"
    reference_field: str = "reference"
    statuses: Mapping[str, Verdict] | None = None  # what the `status` of an object means, where it is not FOUND


def look_up_in_order(call: Call, spec: ActionSpec, places: Places) -> Finding:
    """What became of `call`. Raises the first ProviderError where a source did not answer and no other found it."""
    blanks: list[Finding] = []
    failure: ProviderError | None = None
    for look in _sources(call, places):
        try:
            finding = look()
        except ProviderError as error:
            failure = failure or error
            continue
        if finding.verdict is Verdict.FOUND:
            return _compared(call, spec, places, finding)
        if finding.verdict in CONCLUSIVE:
            return finding
        blanks.append(finding)
    if failure is not None:
        raise failure
    return _nothing(blanks, places)


def _sources(call: Call, places: Places) -> Iterator[Callable[[], Finding]]:
    if places.by_key is not None:
        by_key = places.by_key
        yield lambda: _judged(by_key(), Source.BY_KEY, places, reference=None)
    stored = call.provider_operation_id
    if stored:
        yield lambda: _stored(places.by_id(stored))
    if places.by_reference is not None:
        by_reference = places.by_reference
        yield lambda: _judged(by_reference(), Source.BY_REFERENCE, places, reference=call.key)


def _stored(finding: Finding) -> Finding:
    if finding.verdict is not Verdict.ABSENT:
        return finding
    # The provider told us this id once: a sighting is never unseen.
    return replace(finding, verdict=Verdict.CANNOT_TELL, note="the id that the provider gave is not there any more")


def _judged(seen: Seen, source: Source, places: Places, *, reference: str | None) -> Finding:
    """What one list or index says. `reference` is matched exactly; None where the provider itself matched the key."""
    ours = [one for one in seen.objects if reference is None or one.get(places.reference_field) == reference]
    others = tuple(one for one in seen.objects if one not in ours)
    facts = Finding(
        verdict=Verdict.CANNOT_TELL,
        source=source,
        authoritative=seen.authoritative,
        complete=seen.complete,
        candidates=tuple(ours) or others,
        note=seen.note,
    )
    if seen.in_progress:
        return replace(facts, verdict=Verdict.IN_PROGRESS, note="the provider is still at it")
    if len({str(one.get(places.id_field)) for one in ours}) > 1:
        return replace(facts, verdict=Verdict.SEVERAL, note=f"{len(ours)} objects carry our reference")
    if not seen.complete:
        return replace(facts, note=seen.note or "not read to its end")
    if not ours:
        return _empty(facts, others)
    return _confirmed(facts, ours[0], places)


def _empty(facts: Finding, others: tuple[Json, ...]) -> Finding:
    strangers = f"{len(others)} with another reference" if others else ""
    if not facts.authoritative:
        return replace(facts, note="; ".join(filter(None, ["not in the index, which may lag", strangers])))
    return replace(facts, verdict=Verdict.ABSENT, note=strangers)


def _confirmed(facts: Finding, shown: Json, places: Places) -> Finding:
    """Read what a list showed by its id: the read wins, and both answers are kept."""
    found_as = str(shown.get(places.id_field) or "")
    facts = replace(facts, provider_operation_id=found_as or None, observed=shown, candidates=(shown,))
    if not found_as:
        return replace(facts, note="shown without an id")
    try:
        read = places.by_id(found_as)
    except ProviderError as error:
        return replace(facts, note=f"shown {_by(facts)}, but its id could not be read: {error.sentence}")
    if read.verdict is Verdict.ABSENT:
        return replace(facts, note=f"shown {_by(facts)}, but not there when read by its id")
    return replace(
        read,
        provider_operation_id=found_as,
        observed=read.observed or shown,
        candidates=(shown,) if read.observed != shown else (),
        note=f"{_by(facts)}, then read by id" if read.verdict is Verdict.FOUND else f"shown {_by(facts)}; {read.note}",
    )


def _by(finding: Finding) -> str:
    return finding.source.value.replace("_", " ")


def _compared(call: Call, spec: ActionSpec, places: Places, finding: Finding) -> Finding:
    """A found object is ours only if it is what was asked, and still stands."""
    means = (places.statuses or {}).get(str(finding.observed.get("status")), Verdict.FOUND)
    if means is not Verdict.FOUND:
        return replace(finding, verdict=means, note=f"its status is {finding.observed['status']}")
    wrong = differences(spec, call.request, finding.observed)
    if wrong:
        return replace(finding, verdict=Verdict.MISMATCH, note=f"differs in {', '.join(sorted(wrong))}")
    return finding


def _nothing(blanks: list[Finding], places: Places) -> Finding:
    """No source showed it: first make sure that we would see it. One that could not tell outweighs all empty ones."""
    seeing = places.control()
    if not blanks:
        return Finding(verdict=Verdict.CANNOT_TELL, source=Source.BY_ID, note="there is nowhere to look yet")
    unsure = [finding for finding in blanks if finding.verdict is Verdict.CANNOT_TELL]
    if unsure:
        return unsure[-1]
    last = blanks[-1]
    if not seeing:
        return replace(last, verdict=Verdict.CANNOT_TELL, note="the control read could not be understood")
    return last
