"""Rewrites an answer in one spelling: plain LaTeX, whatever characters, commands or names a writer used for the same mathematics.

Each rewrite has the reason beside it or speaks for itself. None changes what is meant. Linear in the text.
"""
# ruff: noqa: RUF001, RUF002 - this file replaces characters that look like others

import re
import unicodedata

SPECIAL = re.compile(
    r"<[|｜][^<>\s]{1,40}[|｜]>|</?(?:s|answer)>|<(?:eos|pad|end_of_turn)>|\[/?INST\]"
)  # <|im_end|> and its like


class _Characters(dict):
    """Character -> LaTeX. Unicode's own description gives those that are not listed."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        self[code] = self.described(character)
        return self[code]

    def described(self, character: str) -> str:
        """Return ⅓ as a fraction, 𝑥 as x, α as \\alpha, and any other character as it is."""
        kind = unicodedata.decomposition(character).partition(" ")[0]
        plain = unicodedata.normalize("NFKC", character)
        if kind == "<fraction>" and (parts := re.fullmatch("([0-9]+)\u2044([0-9]+)", plain)):
            return f"\\frac{{{parts[1]}}}{{{parts[2]}}}"
        if len(plain) == 1 and (kind == "<font>" or character in "\u00b5\u2126"):
            return self[ord(plain)]
        letter = _GREEK_LETTER.fullmatch(unicodedata.name(character, ""))
        name = letter and letter[2].lower().replace("lamda", "lambda")
        if name in _GREEK.split("|"):
            return f"\\{name.capitalize() if letter[1] == 'CAPITAL' else name} "
        return character


_GREEK_LETTER = re.compile("GREEK (SMALL|CAPITAL) LETTER ([A-Z]+)")
_GREEK = "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|pi|rho|sigma|tau|upsilon|phi|chi|psi|omega"
_CHARACTERS = _Characters(
    {full: chr(full - 0xFEE0) for full in range(0xFF01, 0xFF5F)}  # full-width digits, brackets, signs
    | {
        ord(character): plain
        for characters, plain in [
            ("−‐‑‒–—﹣", "-"), ("\u00a0\u3000\t\r\n", " "), ("\u2005\u2006\u2009\u202f", "\\,"),
            ("\u200b\u2060\ufeff\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069`", ""),
            ("÷\u2044\u2215", "/"), ("°º˚", "^\\circ "), ("∞", "\\infty "), ("×✕⨯", "\\times "), ("·⋅∙•∗", "\\cdot "),
            ("±", "\\pm "), ("≤⩽≦", "\\le "), ("≥⩾≧", "\\ge "), ("≠", "\\ne "), ("∪", "\\cup "), ("∩", "\\cap "),
            ("∈", "\\in "), ("∅", "\\emptyset "), ("∖", "\\setminus "),
            ("∨", "\\lor "), ("∧", "\\land "), ("¬", "\\neg "), ("⊕", "\\oplus "), ("→⟶⇒⟹", "\\to "),
            ("↔⇔⟺", "\\leftrightarrow "), ("⇌", "\\rightleftharpoons "), ("∀", "\\forall "), ("∃", "\\exists "),
            ("≡", "\\equiv "), ("⊥", "\\perp "), ("∥", "\\parallel "), ("≅", "\\cong "), ("△", "\\triangle "),
            ("∠", "\\angle "), ("…⋯", "\\ldots "), ("∓", "\\mp "), ("“”", '"'), ("元圆", " yuan "), ("∣", "|"), ("∶", ":"),
            ("⟨〈", "("),
            ("⟩〉", ")"), ("⌊", "\\lfloor "), ("⌋", "\\rfloor "), ("⌈", "\\lceil "), ("⌉", "\\rceil "), ("′’", "'"),
            ("ϕ", "\\phi "), ("ϵ", "\\epsilon "), ("。", "."), ("、", ","),
        ]
        for character in characters
    }
    | {ord(letter): f"\\mathbb{{{unicodedata.normalize('NFKC', letter)}}}" for letter in "ℝℤℚℕℂ"}
)  # fmt: skip


def _repeating(whole: str, once: str, again: str) -> str:
    """0.1\\overline{6} is (16 - 1)/90."""
    first = whole + once
    return f"\\frac{{{int(first + again) - int(first or 0)}}}{{{10 ** len(once) * (10 ** len(again) - 1)}}}"


def _rows(match: re.Match) -> str:
    """aligned: a row that begins with = belongs to the row before; any other is one more answer."""
    return re.sub(r"\\\\\s*(=)?", lambda end: " =" if end[1] else ", ", match[1].replace("&", "")).strip(" ,")


def _matrix(match: re.Match) -> str:
    """[[1,2],[3,4]] as LaTeX."""
    rows = re.findall(r"\[([^\[\]]*)\]", match[1])
    return "\\begin{pmatrix}" + " \\\\ ".join(row.replace(",", "&") for row in rows) + "\\end{pmatrix}"


_PREFIX = "kilo|centi|milli|micro|nano|pico|mega|giga|tera|deci|hecto|femto"


def _quantity(match: re.Match) -> str:
    r"""\SI{4}{\centi\meter} is 4 centimeter."""
    unit = (
        re.sub(rf"\\({_PREFIX})\s*\\", r" \1", match[2])
        .replace("\\per", "/")
        .replace("\\squared", "^2")
        .replace("\\cubed", "^3")
    )
    return match[1] + "\\text{ " + re.sub(r"[~.]|\\(?=[a-zA-Z])", " ", unit).strip() + "}"


def _third_or_fourth(match: re.Match) -> str:
    """∛8 in LaTeX."""
    return f"\\sqrt[{'∛∜'.index(match[0][0]) + 3}]{{{match[1] or match[2]}}}"


def _money(match: re.Match) -> str:
    """The sign of a currency before a number becomes a word after it."""
    sign, currency, number, rest = match.groups()
    return f"{sign}{number.rstrip('. ')}\\text{{ {_CURRENCY[currency.replace(' ', '').rstrip('.')]} }}{rest}"


def _joined(match: re.Match) -> str:
    """Between relations, \\lor is a word."""
    return re.sub(r"\\l(or|and)(?![a-zA-Z])", r" \1 ", match[0])


def _grouped(match: re.Match) -> str:
    """12'345 without its separators."""
    return re.sub(r"\D", "", match[0])


def _components(match: re.Match) -> str:
    """3i - 2j, with unit vectors, as (3,-2)."""
    terms = re.findall(r"([-+]?)\s*([^-+]*?)\s*(?:\\cdot\s*)?\\mathbf\{([ijk])\}", match[0])
    found = {axis: sign.strip("+") + (size or "1") for sign, size, axis in terms}
    left = re.sub(r"[-+]?[^-+]*?\\mathbf\{[ijk]\}", "", match[0]).strip()
    axes = "ijk" if "k" in found else "ij"
    return match[0] if left or len(found) < len(terms) else f"({','.join(found.get(axis, '0') for axis in axes)})"


def _in_base(match: re.Match) -> str:
    """243 (base 7) as 243_{7}."""
    base = match[2] or match[3]
    number = base if base.isdigit() else _NUMBERS.get(base)
    return match[0] if number is None else f"{match[1].strip()}_{{{number}}}"


def _number_word(match: re.Match) -> str:
    """Forty-two in digits."""
    number, units = _NUMBERS[match[1].lower()], _NUMBERS.get((match[2] or "").lower(), 0)
    return match[0] if units and (number < 20 or number % 10) else str(number + units)


_TO_NINETEEN = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_NUMBERS = {word: number for number, word in enumerate(_TO_NINETEEN.split(" "))}
_NUMBERS |= {word: 10 * tens for tens, word in enumerate(_TENS.split(" "), 2)}
_CURRENCY = {
    "$": "dollar", "€": "euro", "EUR": "euro", "£": "pound", "GBP": "pound", "¥": "yen", "JPY": "yen", "₹": "rupee",
    "INR": "rupee", "RMB": "yuan", "CNY": "yuan", "Rs": "rupee", "¢": "cent",
}  # fmt: skip
_SIGN = r"[$€£¥₹¢]|\b(?:EUR|GBP|JPY|INR|RMB|CNY)\b|\bRs\b\.?"
_INSIDE = r"\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)"  # up to three brackets deep
_ZEROS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SMALL = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺₀₁₂₃₄₅₆₇₈₉", "0123456789-+0123456789")
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"[⁰¹²³⁴-⁹⁻⁺]+", lambda match: f"^{{{match[0].translate(_SMALL)}}}"),
        (r"[₀-₉]+", lambda match: f"_{{{match[0].translate(_SMALL)}}}"),
        (r"\\tag\*?\s*\{[^{}]*\}", ""),
        (
            r"\\(?:colorbox|fcolorbox\s*\{[^{}]*\})\s*\{[^{}]*\}\s*\{((?:[^{}]|\{[^{}]*\})*)\}",
            lambda match: match[1].replace("$", ""),
        ),
        (r"\\ce\s*\{((?:[^{}]|\{[^{}]*\})*)\}", r"\1"),
        (r"\{:\}|\\colon(?![a-zA-Z])", ":"),
        (r"\\(?:c|l)?dots[cbmio]?(?![a-zA-Z])|\.{3,}", r"\\ldots "),
        (r"\\begin\s*\{(?:align|gather|split|equation)(?:ed)?\*?\}(.*?)\\end\s*\{\w+\*?\}", _rows),
        (r"^\s*\\begin\s*\{array\}\s*\{[a-z| ]*\}([^&]*?)(?:\\\\)?\s*\\end\s*\{array\}\s*$", _rows),
        (r"^\[\s*(\[[^\[\]]*\](?:\s*,\s*\[[^\[\]]*\])*)\s*\]$", _matrix),
        (r"\\(?:SI|qty)\s*\{([^{}]*)\}\s*\{((?:[^{}]|\{[^{}]*\})*)\}", _quantity),
        (r"\\(?:num|ang)\s*\{([^{}]*)\}", lambda match: match[1] + "^\\circ" * (match[0][1] == "a")),
        (rf"(?:√|(?:\\|(?<![\\a-zA-Z]))sqrt)\s*(\[[^\]]*\])?\s*{_INSIDE}", r"\\sqrt\1{\2}"),
        (r"(?:√|(?<![\\a-zA-Z])sqrt)\s*([0-9]+(?:\.[0-9]+)?|[a-z])", r"\\sqrt{\1}"),
        (r"√", r"\\sqrt"),
        (r"[∛∜]\s*(?:\(([^()]*)\)|([0-9]+(?:\.[0-9]+)?|[a-z]))", _third_or_fourth),
        (r"\](\s*[^,;\[\](){}]+[,;][^,;\[\](){}]+)\[", r"(\1)"),  # ]1, 2[
        (rf"(?<![\\a-zA-Z])cbrt\s*{_INSIDE}", r"\\sqrt[3]{\1}"),
        (rf"(?:(?<![\\a-zA-Z])abs|\\operatorname\s*\{{abs\}})\s*{_INSIDE}", r"|\1|"),
        (rf"(?<![\\a-zA-Z])(floor|ceil)(?:ing)?\s*{_INSIDE}", r"\\l\1 \2\\r\1 "),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\.?|\\displaystyle|(?<!\\)\\!\s*", ""),
        (
            r"[(\[]\s*\\begin\s*\{(array|(?:small)?matrix)\}(?:\s*\{[lcr| ]*\})?(.*?)\\end\s*\{\1\}\s*[)\]]",
            r"\\begin{pmatrix}\2\\end{pmatrix}",
        ),
        (r"\\(begin|end)\s*\{[bB]?matrix\}", r"\\\1{pmatrix}"),
        (r"\\begin\s*\{cases\}|\\end\s*\{cases\}", lambda match: match[0].replace(" ", "")),
        (r"\\math(?:bf|bb)\s*\{([RZQNC])\}$", r"\\mathbb{\1}"),
        (r"\\mathcal\s*\{?\s*O\s*\}?", "O"),
        (r"\\overline\s*\{\s*([A-Z]{2})\s*\}", r" \1 "),
        (
            r"\\(?:mathbf|boldsymbol|bm|hat|vec|mathbf\s*\{\s*\\hat)\s*\{\s*(?:\\math(?:bf|rm)\s*\{)?\\?([ijk])(?:math)?\s*\}+",
            r"\\mathbf{\1}",
        ),
        (r"^[^=]*\\mathbf\{[ijk]\}[^=]*$", _components),
        (
            r"(?:\\(?:text|operatorname|mathrm)\s*\{\s*cis\s*\}|\\?(?<![a-zA-Z])cis(?![a-z]))(?:\\[,;! ])*\s*"
            r"(\([^()]*\)|\\frac\s*\{[^{}]*\}\s*\{[^{}]*\}|[0-9.]+\s*\^\s*(?:\\circ|\{\\circ\})|[0-9]*\\?[a-z]+)",
            r"(\\cos \1+i\\sin \1)",
        ),
        (
            r"^([^_]*[0-9A-F])\s*(?:\(\s*base[ -]([0-9]+)\s*\)|_\s*\{?\s*\\text\s*\{\s*(?:base\s*)?([0-9]+|[a-z]+)\s*\}\s*\}?)$",
            _in_base,
        ),
        (r"^\\text\s*\{([0-9A-F]+)\}\s*_", r"\1_"),
        (r"^([0-9.]+)\s*(?:\\text\s*\{\s*to\s*\}|to)\s*([0-9.]+)$", r"\1:\2"),
        (
            rf"(?i)^(?:\\text\s*\{{\s*)?({'|'.join(_NUMBERS)})(?:[- ](one|two|three|four|five|six|seven|eight|nine))?\s*\}}?$",
            _number_word,
        ),
        (r"^(?:negative|minus)\s+(?=[0-9\\])", "-"),
        (
            r"^([a-z])\s*\\neq?\s*([^,<>=\\]+(?:,[^,<>=\\]+)+)$",
            lambda match: ", ".join(f"{match[1]}\\ne {x}" for x in match[2].split(",")),
        ),
        (r"(\\(?:Theta|Omega|Gamma|Phi|Psi)) (?=\()", r"\1"),
        (r"(?:\bUS\s*)?\\\$|\bUS\s*\$|\bUSD\b", "$"),
        (r"\\(?:pounds|textsterling)(?![a-zA-Z])", "£"),
        (r"\\(?:euro|texteuro)(?![a-zA-Z])", "€"),
        (r"\\(?:tiny|small|[lL]arge|LARGE|[hH]uge|bf|it|rm|bm|boldsymbol|underline|checkmark)(?![a-zA-Z])", ""),
        (r"\\(?:text)?color\s*\{[^{}]*\}", ""),
        (r"(?i)\b(?:the )?(?:final )?answer(?: is)?[:\s]+", ""),
        (r"\\text\s*\{\s*\}", ""),
        (r"^\\text\s*\{\s*((?:-?[$€£]?[0-9]|[a-zA-Z]\s*=)[^{}]*)\}$", r"\1"),
        (r"(?<![\w)}])\*\*([^*]*)\*\*|^\*\*|\*\*\.?$", r"\1"),  # bold, not a power
        (r"\\[lr]brace(?![a-zA-Z])", lambda match: "\\{" if match[0][1] == "l" else "\\}"),
        (
            r"^\\\{\s*[a-z]\s*(?:\\in\s*(?:\\mathbb\s*\{?R\}?|\\R)\s*)?(?:\\mid(?![a-zA-Z])|[:|])(.*)\\\}$",
            r"\1",
        ),  # {x | x < 2}
        (r"\\\{\s*\\\}|^(?:\\text\s*\{\s*)?(?:the )?empty set\s*\}?$", r"\\emptyset"),
        (r"\\R(?![a-zA-Z])", r"\\mathbb{R}"),
        (r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}"),
        (r"\\backslash", r"\\setminus"),
        (r"\\(?:operatorname|mathrm)\s*\{((?:arc)?(?:sin|cos|tan)|ln|log|exp)\}", r"\\\1 "),
        (r"(?<![\\a-zA-Z])log([0-9]+)\s*(?=\()", r"\\log_{\1}"),
        (r"(?<![\\a-zA-Z])((?:arc)?(?:sin|cos|tan)h?|sec|csc|cot|ln|log|exp)(?![a-zA-Z])", r"\\\1"),
        (r"(?:\\|(?<![\\a-zA-Z]))a(sin|cos|tan)(?![a-zA-Z])", r"\\arc\1"),
        (r"\\log_\s*([0-9a-z])", r"\\log_{\1}"),
        (r"\\lg(?![a-zA-Z])", r"\\log_{10}"),
        (rf"(?<![\\a-zA-Z{{])({_GREEK})(?![a-zA-Z}}])", r"\\\1 "),
        (r"(?<![\\a-zA-Z])(?:oo|inf(?:inity|ty)?)(?![a-zA-Z])", r"\\infty "),
        (
            r"\\(?:implies|(?:long|Long)?[rR]ightarrow|xrightarrow\s*\{[^{}]*\})(?![a-zA-Z])|--?>|(?<= )=>(?= )",
            r"\\to ",
        ),
        (r"\\(?:iff|(?:Long|long)?[lL]eftrightarrow)(?![a-zA-Z])", r"\\leftrightarrow "),
        (r"\\lnot(?![a-zA-Z])", r"\\neg "),
        (r"\\vee(?![a-zA-Z])", r"\\lor "),
        (r"\\wedge(?![a-zA-Z])", r"\\land "),
        (r"^.*(?:[<>=]|\\(?:[lgn]eq?|in)(?![a-zA-Z])).*$", _joined),
        (r"([)\]}])\s*(?:\\text\s*\{\s*)?U(?:\s*\})?\s*(?=[(\[]|\\\{)", r"\1\\cup "),
        (
            r"^\]([^\[\](){}]*[,;][^\[\](){}]*)([\[\])])$",
            lambda match: f"({match[1]}{')' if match[2] == '[' else match[2]}",
        ),
        (r"^([(\[][^,;\[\](){}]*)[,;]([^,;\[\](){}]*)\[$", r"\1,\2)"),
        (r"^([(\[][^,;\[\](){}]*);([^,;\[\](){}]*[)\]])$", r"\1,\2"),
        (r"(?<=[0-9])\s*[xX]\s*(?=10\s*(?:\^|\*\*))", r"\\times "),
        (r"\\(?:ast|bullet|star)(?![a-zA-Z])", r"\\cdot "),
        (r"\{([^{}]*)\\over(?![a-zA-Z])([^{}]*)\}", r"\\frac{\1}{\2}"),
        (r"(?<![\w.,])[1-9][0-9]{0,2}(?:(?:\.[0-9]{3}){2,}|(?:'[0-9]{3})+)(?![0-9.])", _grouped),
        (r"^(?:\\text\s*\{\s*)?all real numbers\s*\}?$", r"\\mathbb{R}"),
        (r"\{,\}", ","),
        (r"\\mathrm\s*\{\s*([eid])\s*\}", r"\1"),
        (r"\\(?:text(?:bf|it|rm|sf|tt|sc|normal)|emph|mbox|hbox|math(?:rm|bf|it|sf|tt))(?![a-zA-Z])", r"\\text"),
        (r"\\(?:[dtcsx]|nice)frac", r"\\frac"),
        (r"\\langle", "("),
        (r"\\rangle", ")"),
        (r"\\varnothing", r"\\emptyset"),
        (r"\\log_\{?e\}?(?![a-zA-Z])", r"\\ln"),
        (r"\*\*", "^"),
        (r"(?<![\w.,^])[1-9][0-9]{0,2}(?:(?:\\[,;: ]|[ ~])[0-9]{3})+(?![0-9])", _grouped),
        (r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![a-zA-Z])", " "),
        (r"\\frac\s*([0-9a-z])", r"\\frac{\1}"),
        (r"(\\frac\s*\{[^{}]*\})\s*([0-9a-z])", r"\1{\2}"),
        (r"\\sqrt\s*(\[[^\]]*\])?\s*([0-9a-z])", r"\\sqrt\1{\2}"),
        (r"\^\s*([0-9]*\.[0-9]+)", r"^{\1}"),
        (r"\\([lgn]e)q?(?:slant)?(?![a-zA-Z])", r"\\\1 "),
        (r"\s*(?:\\%|\\text\s*\{\s*(?:percent|%|\\%)\s*\}|(?<![a-zA-Z])per ?cent\b)", "%"),
        (r"\\deg(?:ree)?(?![a-zA-Z])|\^\s*\{\s*\\circ\s*\}", r"^\\circ"),
        (r"(\\(?:sin|cos|tan|cot|sec|csc)\s*[({]?\s*)([0-9.]+)\s*\^\\circ", r"\1\\frac{\2\\pi}{180}"),
        (r"([0-9]*)\.([0-9]*)\\(?:overline|bar|dot)\s*\{([0-9]{1,50})\}", lambda match: _repeating(*match.groups())),
        (r"(?<![0-9.])([0-9]*)\.([0-9]*)\(([0-9]{1,50})\)(?![0-9^!])", lambda match: _repeating(*match.groups())),
        (
            r"(?<=[0-9])\s*(?:\\text\s*\{\s*)?(thousand|million|billion|trillion)\b(?:\s*\})?",
            lambda match: f"\\cdot 10^{{{_ZEROS[match[1]]}}}",
        ),
        (r"\s+", " "),
        (rf"^([-+]?) ?(?:\\text ?\{{ ?)?({_SIGN}) ?\}}? ?(?=[-+.0-9\\(])(.*?)((?: ?\\text.*| [a-zA-Z].*)?)$", _money),
        (rf"(?<=[0-9}}]) ?\\text ?\{{ ?({_SIGN}) ?\}}", r" \1"),
        (rf"(?<=[0-9}}]) ?({_SIGN})(?![0-9])", lambda match: f"\\text{{ {_CURRENCY[match[1].rstrip('.')]} }}"),
        (rf"{_SIGN}", ""),
        (r"\\text ?\{ ?\\frac ?\{([^{}]*)\} ?\{([^{}]*)\} ?\}", r"\\text{\1/\2}"),
        (r"\\text ?\{(?:[^{}]|\{[^{}]*\})*\}", lambda match: "\\text{" + re.sub("[{}]", "", match[0][5:]) + "}"),
        (r"\\frac ?\{ ?\\text ?\{([^{}]*)\} ?\} ?\{ ?\\text ?\{([^{}]*)\} ?\}", r"\\text{\1/\2}"),
    ]
]
PLAIN = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:/[0-9]+)?")  # most answers
_WRAPPED = re.compile(r"\\\((.*)\\\)|\\\[(.*)\\\]|\*\*(.*)\*\*|\$\$?([^$]*[^$\\])\$\$?\.?")


def clean(text: str) -> str:
    """Return the same mathematics in plain LaTeX: no decoration, no thin spaces, and no braces left out."""
    if PLAIN.fullmatch(text):
        return text
    text = SPECIAL.sub("", text).translate(_CHARACTERS).strip()
    if match := _WRAPPED.fullmatch(text):
        text = next(inside for inside in match.groups() if inside is not None)
    if text.count("$") > text.count("\\$") + 1:
        text = re.sub(r"(?<!\\)\$", "", text)  # they enclose mathematics; a single one is money
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text.strip(" =*_").rstrip(".,;: \\*_")
