r"""Units and words after a number: 100 cm are 1 m, 3 wins are not 3 losses.

    apart("5 km/h north")        ("5", "km/h north")
    factor("km north", "m")      1000: ours times this is the gold's; the word is left out on one side
    factor("kg", "m"), factor("wins", "losses")      None: they disagree

pint reads the units, and any text that it does not know is a word.
"""

import re
import threading
from fractions import Fraction
from functools import cache, lru_cache

# also without a space, as in 10cm
_SHORT = (
    "cm|mm|km|nm|ft|kg|mg|lbs?|oz|in|mi|yd|sq|hrs?|mins?|secs?|m[lL]|mph|k[mp]h|kWh|[kMG]?Hz|k[JNWV]|M[JW]|kPa|"
    "[aApP]\\.?[mM]|B\\.C|A\\.D|st|nd|rd|th"
)
_NO_UNIT = (  # they make another number
    "sin|cos|tan|cot|sec|csc|arc[a-z]+|log|ln|exp|sqrt|pi|theta|alpha|beta|mod|and|or|inf|infinity|hundreds?|dozens?|choose|"
    "thousandths?|hundredths?|tenths?|half|halves|thirds?|quarters?|fourths?|fifths?|sixths?|eighths?|squared|cubed|"
    "factorial|plus|minus|times|over|divided|(?:square |cube )?roots?|not|never|wrong|lakhs?|crores?|score|gross"
)
_POWER = r"(?:\s*\^\s*\{?-?[0-9]\}?)?"
_SPACED = "[mgshlLNJKWVAM]|Pa|[kMG]?eV|m[AVWJTNKs]|ns|dm|pm|dL|[kKMGT]B|dB|Bq|Gy|Sv"  # only after a space
_TAIL = re.compile(
    r"(?<=[0-9}%])(?:\s*\^\s*\\circ\s*(?:[CFKNSEW]\b)?|\s*(?:\\mu\s*|[kM]\s*)?(?:\\Omega\b|(?<=mu )[mglLsAVW]\b)|"
    rf"(?:\s*-?\s*(?:{_SHORT})\b|[ -](?!(?:{_NO_UNIT})\b)(?:{_SPACED}|of|up|AD|BCE?|CE|[a-zA-Z]{{3,}})\b){_POWER}"
    rf"(?:(?:[ /.]+|\s*\\cdot\s*)[a-zA-Z]+{_POWER})*\.?)\s*$"
    rf"|(?<=\\pi )(?:(?:{_SHORT})\b|[a-z]{{4,}})(?: [a-z]{{2,}})*{_POWER}\s*$"
    r"|(?<=[0-9a-zA-Z)}\]%])(?:\s*(?:/|\\cdot|\\mu)?\s*\\text\s*\{[^{}]*\}(?:\s*\^\s*\{?-?[0-9]\}?)?)+\s*$"
)
_OTHER_NUMBER = re.compile(rf"(?:{_NO_UNIT})\b")
_GENERAL = re.compile(r"\b(?:units?|of|the|exactly)\b")
_COMPASS = {"N": "north", "S": "south", "E": "east", "W": "west"}
# words that pint takes for units: attometers, petamol per liter, ...
_ONLY_WORDS = frozenset(["am", "pm", "ad", "bc", "bce", "ce", "up", "at", "a"])
_LOCK = threading.Lock()


def apart(text: str) -> tuple[str, str]:
    """Return a cleaned answer without the units and words after it, and these as plain text; pint reads "m s^-1"."""
    amount, tail = text, ""
    while (match := _TAIL.search(amount)) and not _OTHER_NUMBER.match(_plain(match[0])):
        amount, tail = amount[: match.start()], f"{match[0]} {tail}"
    return amount.strip(), _plain(tail)


@lru_cache(maxsize=4096)
def _plain(tail: str) -> str:
    tail = re.sub(
        r"\^\s*\\circ\s*(?:\\text\s*\{\s*)?([CF]\b)?",
        lambda match: f" deg{match[1]} " if match[1] else " degree ",
        tail,
    )
    tail = re.sub(r"(?i)\bdegrees? (celsius|fahrenheit)\b", lambda match: f"deg{match[1][0].upper()}", tail)
    tail = re.sub(r"\\mu\s*(?:\\text\s*\{\s*)?", " µ", tail)
    tail = tail.replace("\\Omega", "ohm").replace("\\cdot", "*").replace("^{", "^")
    tail = re.sub(r"(?:\\text|[\\{}()\s])+", " ", tail).replace(" ^", "^")
    tail = re.sub(r"\b([aApPB])\.\s?([mMCD])\b\.?|\bdegree ([NSEW])\b", _abbreviated, tail)
    if "^" not in tail:
        tail = tail.replace("-", " ")
    return re.sub(r"\s+", " ", _GENERAL.sub("", tail)).strip(" .,;")


def _abbreviated(match: re.Match) -> str:
    return f"degree {_COMPASS[match[3]]}" if match[3] else f"{match[1]}{match[2]}"


_COMPOUND = re.compile(
    r"([0-9][0-9.,]*) ?([a-zA-Z]+)(?:,? and |, | )([0-9][0-9.,]*) ?([a-zA-Z]+)(?:(?:,? and |, | )([0-9][0-9.,]*) ?([a-zA-Z]+))?"
)


def compound(text: str) -> tuple[Fraction, str] | None:
    """Return 6 ft 2 in as 74 and "in"; None for anything else. Each unit is smaller than the one before."""
    match = _COMPOUND.fullmatch(re.sub(r"\s+", " ", re.sub(r"\\text ?\{([^{}]*)\}", r" \1 ", text)).strip())
    if not match:
        return None
    numbers = [number.replace(",", "") for number in match.groups()[::2] if number]
    names = [name for name in match.groups()[1::2] if name]
    if any(_unit([name]) is None for name in names) or len(set(names)) < len(names):
        return None
    factors = [factor(name, names[-1]) for name in names]
    if None in factors or factors != sorted(factors, reverse=True):
        return None
    return sum((Fraction(number) * times for number, times in zip(numbers, factors, strict=True)), Fraction(0)), names[
        -1
    ]


def factor(ours: str, gold: str) -> Fraction | None:
    """Return the factor that converts our number to the gold's unit: 1 if one of them has no unit, None if they disagree."""
    if ours in ("M", "K") and not gold:  # millions or molar, thousands or kelvin
        return None
    if not ours or not gold or ours == gold:
        return Fraction(1)
    (our_unit, our_words), (unit, words) = _read(ours), _read(gold)
    if our_words and words and our_words != words:
        return None
    if our_unit is None or unit is None:  # a word does not stand for a unit
        return Fraction(1) if our_words == words else None
    with _LOCK:
        if our_unit.dimensionality != unit.dimensionality:
            return None
        (times, base), (divided, gold_base) = _pint().get_base_units(our_unit), _pint().get_base_units(unit)
    same_scale = our_unit == unit or not _offset(our_unit, unit)
    return Fraction(times) / Fraction(divided) if base == gold_base and same_scale else None


def temperature(value: Fraction, ours: str, gold: str) -> Fraction | None:
    """Return a temperature in the gold's scale; None if these are no two scales of temperature."""
    our_unit, unit = _read(ours)[0], _read(gold)[0]
    if our_unit is None or unit is None or our_unit.dimensionality != unit.dimensionality:
        return None
    if not _offset(our_unit, unit):
        return None
    with _LOCK:
        try:
            return Fraction(_pint().Quantity(value, our_unit).to(unit).magnitude)
        except (ValueError, TypeError):  # a product with a scale in it
            return None


def _offset(*units) -> bool:
    """Return whether one of the units has a zero of its own."""
    return any(not _pint().Quantity(1, unit)._is_multiplicative for unit in units)


@lru_cache(maxsize=4096)
def _read(tail: str) -> tuple[object, str]:
    """Return the unit with which a text begins, None if with none, and the words after it."""
    words = tail.split()
    for end in range(len(words), 0, -1):
        if (words == ["A"] or words[0].casefold() not in _ONLY_WORDS) and (unit := _unit(words[:end])) is not None:
            return unit, _singular(words[end:])
    return None, _singular(words)


def _singular(words: list[str]) -> str:
    return " ".join(re.sub(r"(?<=[a-z]{3})s$|[.,;:]$", "", word.casefold()) for word in words)


def _unit(words: list[str]):
    """Return pint's unit, None if it knows none of that name."""
    text = " ".join(words)
    for spelled in dict.fromkeys([text, text.replace(" ", "_"), text.lower(), text.removesuffix("s")]):
        try:
            with _LOCK:
                unit = _pint().parse_units(spelled)
                return unit if unit.dimensionality is not None else None  # raises for dB/m
        except Exception:  # pint raises many errors on what is no unit
            continue
    return None


@cache
def _pint():
    """Return pint's units, with exact numbers. The import takes a second, which only two different units are worth."""
    from pint import UnitRegistry

    units = UnitRegistry(non_int_type=Fraction)
    for line in [
        "dollar = [money]", "cent = dollar / 100", "euro = [euros]", "yen = [yens]", "rupee = [rupees]",
        "yuan = [yuans]", "kmph = kilometer / hour", "gm = gram", "@alias pound = GBP", "@alias yuan = RMB = CNY",
    ]:  # fmt: skip
        units.define(line)
    return units
