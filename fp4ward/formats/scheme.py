"""What the quantization JSON claims about each module, and how claims and tensors are settled. Standard library only.

ModelOpt, compressed-tensors and Hugging Face's fp8 are read alike. The tensors are the truth: a claim decides only what
headers cannot say, whether activations are quantized and what the KV cache holds. The rest is cross-checked, and each
disagreement becomes one `Notice`.

How a name in `exclude_modules`, `ignore`, `quantized_layers` or `targets` matches a module:
- names are canonical, by the map that serves the tensors, and cover all below them in whole dotted parts: "layers.1" is
  never layer 10. A closing `*` or `.*` adds nothing to that, whatever fnmatch says;
- "*.x" is x at any depth; "*x" also a part that ends in x, but not the tail of a number; "a.*.b" has one part or more
  between; "a*.b" is a.b or a.anything.b; any other `*` stays inside its part;
- "re:..." is matched from the start (re.match), also with each prefix that the map would take off in front;
- a name that starts with a capital and has no dot is a class; "Linear" is every linear module;
- fused names cover the pieces and the other way round (FUSED), "experts.0.up_proj" covers a stacked "experts.up_proj".
Exclusion wins over an entry, the nearest entry over its parents, and any entry over the rule for all linear modules.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fp4ward.errors import UserError, stop
from fp4ward.formats.formats import NVFP4_GROUP, Format, Stored

HF_FILE, CONFIG_FILE = "hf_quant_config.json", "config.json"
# (weights, activations, whether activation scales are computed at run time): algorithms and presets that mean it.
MEANINGS = {
    ("nvfp4", "nvfp4", False): "NVFP4 NVFP4_AWQ NVFP4_SVD",
    ("nvfp4", "none", False): "W4A16_NVFP4 NVFP4A16",
    ("fp8", "fp8", False): "FP8",
    ("fp8", "fp8", True): "FP8_DYNAMIC FP8_PER_CHANNEL_PER_TOKEN FP8_BLOCK FP8_BLOCK_SCALES",
    ("fp8", "none", False): "FP8_PB_WO FP8_PB_REAL",
}
ALGORITHMS = {name: meaning for meaning, names in MEANINGS.items() for name in names.split()}
ROTATIONS = ("ROTAT", "HADAMARD", "QUAROT", "SPINQUANT")  # change what a layer computes without a trace in its tensors
FUSED = {"qkv_proj": "q_proj k_proj v_proj", "gate_up_proj": "gate_proj up_proj"}
FUSED |= {"in_proj_qkvz": "in_proj_qkv in_proj_z", "in_proj_ba": "in_proj_b in_proj_a"}
ALIASES = {whole: parts.split() for whole, parts in FUSED.items()}
ALIASES |= {part: [whole] for whole, parts in FUSED.items() for part in parts.split()}
PREFIXES = [a + b for a in ("", "model.", "language_model.") for b in ("model.", "language_model.", "backbone.")]
OUTSIDE = ("lm_head", "mtp")  # no exporter puts these below a prefix
LINEAR, NOT_LINEAR = re.compile(r"[^.]*Linear"), re.compile(r"embed|norm|conv\d")  # a class; parts of module names
GLOB = re.compile(r"[*?]|_$")
NUMBER = re.compile(r"(?<=\.)\d+(?=\W|$)")  # of a layer or an expert
MAX_NAME, MAX_COST = 256, 28  # cost: log2 of the steps that a failing match may take, a repetition counted as 6
MAX_SECONDS = 30.0  # to match all names of a checkpoint; published ones take milliseconds
DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"000000000")  # all experts of a kind share an answer


@dataclass(frozen=True)
class Notice:
    """Something to tell the user once. code: stable, for programs. where: a file or modules. text: a sentence."""

    code: str
    where: str
    text: str


@dataclass(frozen=True)
class Claim:
    """What the JSON says of one module. format: "nvfp4", "fp8", "none", "other:<name>"; activation: "nvfp4", "fp8",
    "none"; label: the JSON's own word; source: the file; dynamic: activation scales are computed at run time."""

    format: str
    activation: str
    label: str
    source: str
    dynamic: bool = False
    group_size: int | None = None

    @property
    def sentence(self) -> str:
        return f"{self.source} {self.label}" if self.format == "none" else f"{self.source} says {self.label}"


@dataclass
class _Names:
    """Names and patterns with a claim each, asked with one module after the other."""

    prefixes: tuple[str, ...]
    exact: dict[str, Claim] = field(default_factory=dict)
    patterns: list[tuple[Callable[[str], object], Claim]] = field(default_factory=list)
    digits: bool = False  # the answer of a pattern may depend on which digits a name has
    spent: float = 0.0
    above: dict[str, str] = field(default_factory=dict)
    cache: dict[bytes, Claim | None] = field(default_factory=dict)

    def find(self, module: str) -> tuple[Claim | None, str]:
        """Claim, and the exact name that gave it: the module's own, an alias or the nearest parent; else a pattern."""
        if self.exact:
            for name in (*_spellings(module), self._nearest(module.rpartition(".")[0])):
                if name in self.exact:
                    return self.exact[name], name
        if not self.patterns:
            return None, ""
        key = module.encode("utf-8", "surrogatepass").translate(None if self.digits else DIGITS_TO_ZERO)
        if key not in self.cache:
            begin, name = time.perf_counter(), key.decode("utf-8", "surrogatepass")
            prefixes = ("", *self.prefixes) if name.partition(".")[0] not in OUTSIDE else ("",)
            names = [prefix + spelling for spelling in _spellings(name) for prefix in prefixes]
            self.cache[key] = next((claim for match, claim in self.patterns if any(map(match, names))), None)
            self.spent += time.perf_counter() - begin
            if self.spent > MAX_SECONDS:
                raise UserError("module patterns in the quantization JSON take too long to match; write names instead")
        return self.cache[key], ""

    def _nearest(self, name: str) -> str:
        if name and name not in self.above:
            self.above[name] = name if name in self.exact else self._nearest(name.rpartition(".")[0])
        return self.above.get(name, "")


def _spellings(module: str) -> list[str]:
    """The name, what is fused with it or fused in it, and for stacked experts the first expert's."""
    parent, _, last = module.rpartition(".")
    names = [module, *[f"{parent}.{alias}" for alias in ALIASES.get(last, ())]]
    return names + [f"{parent}.0{name[len(parent) :]}" for name in names] if parent.endswith(".experts") else names


@dataclass(frozen=True, eq=False)
class Scheme:
    """The quantization JSON, read. stated: it says something of formats; else nothing is held against the tensors.
    kv_cache: "fp8" or None. group_size: weights that share a block scale, where the JSON says so."""

    stated: bool
    kv_cache: str | None
    group_size: int | None
    notices: tuple[Notice, ...]
    default: Claim
    entries: _Names
    excludes: _Names

    def claim(self, module: str) -> Claim:
        """The claim for a canonical module name; format "none" also where nothing names it."""
        return self.find(module)[0]

    def find(self, module: str) -> tuple[Claim, str]:
        """Claim, and the name in `entries.exact` that it comes from ("" for none)."""
        if len(module) > MAX_NAME:
            raise UserError(f"module name {module[:40]!r}... is longer than {MAX_NAME} characters")
        claim, key = self.excludes.find(module)[0], ""
        if claim is None:
            claim, key = self.entries.find(module)
        if claim is None and self.default.format != "none" and NOT_LINEAR.search(module):
            claim = Claim("none", "none", "speaks of linear modules only", self.default.source)
        return claim or self.default, key


# ---- JSON ------------------------------------------------------------------------------------------------------------
def _get(obj: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    """obj[key] of the kind that is expected; None when absent or null."""
    value = obj.get(key)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        what = {str: "text", int: "a whole number", list: "a list"}.get(kind, "an object")
        raise UserError(f"{where}: {key!r} is a {type(value).__name__}, {what} is expected")
    return value


def _names(obj: Mapping[str, Any], where: str, *keys: str) -> list[str]:
    names = [n for key in keys for n in _get(obj, key, list, where) or ()]
    if not all(isinstance(name, str) and 0 < len(name) <= MAX_NAME for name in names):
        raise UserError(f"{where}: {keys[0]} holds what is no name of 1 to {MAX_NAME} characters")
    return names


# ---- one file's words, whatever the dialect: each key has one meaning, wherever it occurs ----------------------------
@dataclass(frozen=True)
class _Statement:
    """default: of linear modules that no entry names. groups: (name, claim, targets). stated: it names any format."""

    source: str
    default: Claim
    method: str = ""
    algorithm: str = ""
    producer: str = ""
    entries: dict[str, Claim] = field(default_factory=dict)
    excludes: Sequence[str] = ()
    kv: str = "none"
    groups: Sequence[tuple[str, Claim, list[str]]] = ()
    stated: bool = False


def _statement(raw: Mapping[str, Any], source: str, clean: Callable[[str], str]) -> _Statement:
    silent = default = Claim("none", "none", "does not list it", source)
    if not raw:
        return _Statement(source, default)
    q = _get(raw, "quantization", Mapping, source) or raw
    method, algorithm = ((_get(q, k, str, source) or "").upper() for k in ("quant_method", "quant_algo"))
    method = method or "MODELOPT"
    _refuse_rotation(q, source)
    groups, entries = _groups(q, source, clean), {}
    layers = _get(q, "quantized_layers", Mapping, source) or {}
    for name in _names({"quantized_layers": list(layers)}, source, "quantized_layers"):
        entries[clean(name)] = _algorithm(_get(layers, name, Mapping, source) or {}, f"{source}: {name!r}", source)
    if method == "FP8":
        how = _get(q, "activation_scheme", str, source) or "dynamic"
        default = Claim("fp8", "fp8", f"fp8 with {how} activations", source, how == "dynamic")
    elif algorithm not in ("", "NONE", "MIXED_PRECISION"):
        default = _algorithm(q, source, source)
    elif not algorithm and "MODELOPT" not in method and method != "COMPRESSED-TENSORS":
        default = Claim(f"other:{method.lower()}", "none", method.lower(), source)
    if default is silent and not entries:
        targets = [(t, claim) for _, claim, names in groups for t in names]
        default = next((c for t, c in targets if LINEAR.fullmatch(t)), silent)
        for target, claim in targets:  # of two for one name the first counts
            if not LINEAR.fullmatch(target):
                entries.setdefault(target, claim)
    excludes = _names(q, source, "exclude_modules", "ignore", "modules_to_not_convert", "ignored_layers")
    if method == "FP8":
        excludes += [f"*.{n}" for n in excludes if "layers." not in n]  # transformers takes the end of a name, too
    made_by = _get(q, "producer", Mapping, source) or _get(raw, "producer", Mapping, source) or {}
    producer, stated = _get(made_by, "version", str, source) or "", default is not silent or bool(entries)
    kv = (_get(q, "kv_cache_quant_algo", str, source) or "").lower()
    cache = _get(q, "kv_cache_scheme", Mapping, source)
    kv = kv or (_numbers(cache, "", f"{source}: kv_cache_scheme") if cache else "none")
    excludes = [clean(x) for x in excludes]
    return _Statement(source, default, method, algorithm, producer, entries, excludes, kv, groups, stated)


def _groups(q: Mapping[str, Any], source: str, clean: Callable[[str], str]) -> list[tuple[str, Claim, list[str]]]:
    out, groups = [], _get(q, "config_groups", Mapping, source) or {}
    for name in groups:
        where = f"{source}: group {name[:60]!r}"
        if isinstance(groups[name], list):  # a preset by its name, with its targets
            claim, body = _algorithm({"quant_algo": name}, where, source), {"targets": groups[name]}
        else:
            body = _get(groups, name, Mapping, where) or {}
            claim = _arguments(body, q, where, source)
        out.append((name[:60], claim, [clean(t) for t in _names(body, where, "targets") or ["Linear"]]))
    return out


def _arguments(group: Mapping[str, Any], q: Mapping[str, Any], where: str, source: str) -> Claim:
    weights, inputs = (_get(group, k, Mapping, where) for k in ("weights", "input_activations"))
    if weights is None:
        return Claim("none", "none", "leaves its weights unquantized", source)
    _refuse_rotation({**(inputs or {}), **weights}, where)
    fmt = _numbers(weights, _get(group, "format", str, where) or _get(q, "format", str, source) or "", where)
    activation = "none" if inputs is None else _numbers(inputs, "", where)
    label = f"{fmt} weights, {activation.replace('none', 'unquantized')} inputs".replace("other:", "")
    if "other:" in fmt + activation:
        fmt, activation = f"other:{label}", "none"
    dynamic = inputs is not None and inputs.get("dynamic") is True
    return Claim(fmt, activation, label, source, dynamic, weights.get("group_size"))


def _numbers(args: Mapping[str, Any], form: str, where: str) -> str:
    """Format of one tensor. NVFP4 has groups of 16 and a scale above theirs; FP8 as we know it has no groups."""
    bits, size = _get(args, "num_bits", int, where), _get(args, "group_size", int, where)
    kind, strategy = _get(args, "type", str, where) or "int", _get(args, "strategy", str, where) or ""
    if kind == "float" and not form.startswith("mx"):
        if bits == 8 and "group" not in strategy:
            return "fp8"
        if bits == 4 and (form.startswith("nvfp4") or strategy == "tensor_group" or size in (None, NVFP4_GROUP)):
            return "nvfp4"
    return f"other:{'mxfp' if kind == 'float' and size == 32 else kind}{bits}"


def _algorithm(obj: Mapping[str, Any], where: str, source: str) -> Claim:
    name, size = _get(obj, "quant_algo", str, where) or "none", _get(obj, "group_size", int, where)
    if name.upper() == "NONE":
        return Claim("none", "none", "names no format for it", source)
    _refuse_rotation({name: True}, where)
    fmt, activation, dynamic = ALGORITHMS.get(name.upper(), (f"other:{name}", "none", False))
    return Claim(fmt, activation, name, source, dynamic, size)


def _refuse_rotation(args: Mapping[str, Any], where: str) -> None:
    keys = [key for key, value in args.items() if value and any(word in key.upper() for word in ROTATIONS)]
    keys += ["transform_config"] * (args.get("transform_config") not in (None, {}, {"config_groups": {}}))
    if keys:
        raise UserError(f"{where}: {keys[0][:80]!r} rotates weights or activations; use a checkpoint without rotation")


# ---- both files to a Scheme ------------------------------------------------------------------------------------------
def read_scheme(
    config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None, canonical: Callable[[str], str]
) -> Scheme:
    """The scheme of a checkpoint, also of one without quantization JSON. canonical: the architecture's map of names.
    UserError for malformed JSON and for what changes the result unseen; whatever else is wrong becomes a notice."""
    prefixes = tuple(p for p in PREFIXES if canonical(p + "layers.0") == "layers.0")
    marked: set[str] = set()

    def clean(name: str) -> str:
        if "\0" in name:
            marked.add(name)
            name = name.partition("\0")[0].rstrip(".") + ("*" if name.endswith("*") else "")
        stem = name.rstrip("*").rstrip(".")
        if stem + "." in prefixes or not stem:
            return f"{stem}*"
        return name if name.startswith("re:") or GLOB.search(stem) else canonical(stem)

    if not isinstance(config, Mapping) or not isinstance(hf_quant_config or {}, Mapping):
        raise UserError(f"{CONFIG_FILE} and {HF_FILE} must hold an object each")
    text = _get(config, "text_config", Mapping, CONFIG_FILE) or {}
    sections = [_get(c, "quantization_config", Mapping, CONFIG_FILE) or {} for c in (config, text)]
    own = _statement(sections[0] or sections[1], CONFIG_FILE, clean)
    hf = _statement(hf_quant_config or {}, HF_FILE, clean)
    main = own if own.stated and not hf.stated else hf
    notices = _compare(hf, own) if hf_quant_config and "MODELOPT" in own.method else []
    main = _reconcile(main, own, notices)
    kv = own.kv if hf.kv == "none" else hf.kv
    claims = (main.default, *main.entries.values())
    sizes = sorted({c.group_size for c in claims if c.format == "nvfp4" and c.group_size})
    silent = not main.stated and (hf_quant_config or any(sections))
    for code, applies, sentence in (
        ("kv-cache-other", kv not in ("none", "fp8"), f"a KV cache of {kv} is not supported; it is left unquantized"),
        ("formats-unstated", silent, "no format is stated; formats are taken from the tensors alone"),
        ("group-size", set(sizes) - {NVFP4_GROUP}, f"group_size is {sizes}; NVFP4 as stored has {NVFP4_GROUP}"),
        ("name-sentinel", marked, f"{len(marked)} names end in an exporter's stray '\\0...pt_name_sentinel'; cut off"),
    ):
        if applies:
            notices.append(Notice(code, main.source, sentence))
    entries, excludes = _Names(prefixes), _Names(prefixes)
    _fill(entries, main.entries.items(), main.source)
    _fill(excludes, ((x, Claim("none", "none", f"excludes {x!r}", main.source)) for x in main.excludes), main.source)
    twice = ("listed-and-excluded", f"{main.source} lists and excludes it; the exclusion counts")
    notices += _grouped((twice, key) for key in entries.exact if excludes.find(key)[0])
    kv_cache, size = "fp8" if kv == "fp8" else None, min(sizes, default=None)
    return Scheme(main.stated, kv_cache, size, tuple(notices), main.default, entries, excludes)


def _compare(hf: _Statement, own: _Statement) -> list[Notice]:
    """The same facts, stated in two files."""
    a, b = ({f"{n} ({c.format}, inputs {c.activation})" for n, c in s.entries.items()} for s in (hf, own))
    x, y = set(hf.excludes), set(own.excludes)
    end = f"in {hf.source}, which counts where it says anything"
    return [
        Notice(code, own.source, f"{what} {mine or 'none'} here and {theirs or 'none'} {end}")
        for code, what, theirs, mine in (
            ("producer-differs", "the producer's version is", hf.producer, own.producer),
            ("algo-differs", "quant_algo is", hf.algorithm, own.algorithm),
            ("kv-cache-differs", "the KV cache is", hf.kv, own.kv),
            ("excludes-differ", "names excluded in one file only:", sorted(x - y)[:3], sorted(y - x)[:3]),
            ("layers-differ", "layers that the other file does not list so:", sorted(a - b)[:3], sorted(b - a)[:3]),
        )
        if theirs != mine
    ]


def _reconcile(main: _Statement, own: _Statement, notices: list[Notice]) -> _Statement:
    """quant_algo and quantized_layers beside config_groups. Activations are quantized only where both say so."""
    entries, default = dict(main.entries), main.default
    for group, claim, targets in own.groups:
        odd: dict[tuple[str, str], list[str]] = {}
        for target in targets:
            said = default if LINEAR.fullmatch(target) else entries.get(target, default)
            if said.format != claim.format:
                odd.setdefault(("groups-differ", said.sentence), []).append(target)
            elif (said.activation == "none") != (claim.activation == "none"):
                odd.setdefault(("activations-differ", said.sentence), []).append(target)
                said = replace(said, activation="none", dynamic=False)
                default = said if LINEAR.fullmatch(target) else default
                entries |= {} if LINEAR.fullmatch(target) else {target: said}
        for (code, sentence), found in odd.items():
            what = found[0] + f" and {len(found) - 1} more" * (len(found) > 1)
            text = f"says {claim.label} of {what}, but {sentence}; inputs are quantized only where both say so"
            notices.append(Notice(code, f"{own.source}: {group}", text))
    return replace(main, entries=entries, default=default)


# ---- patterns --------------------------------------------------------------------------------------------------------
def _fill(names: _Names, items: Iterable[tuple[str, Claim]], source: str) -> None:
    for name, claim in items:
        if name.startswith("re:") or GLOB.search(name):
            regex = name[3:] if name.startswith("re:") else _glob(name)
            names.patterns.append((_compile(regex, name, source).match, claim))
            # Digits are set to zero one by one: only a digit or a group that is asked for again tells names apart.
            names.digits |= bool(re.search(r"\d|\(\?P=", re.sub(r"0-9|\{[\d,]*\}", "", regex)))
        else:
            names.exact.setdefault(name, claim)


def _glob(text: str) -> str:
    """A glob as a regular expression, by the rules at the top of this file."""
    s = re.escape(re.sub(r"(?<=[^_*.])\.?\*+$", "", text)).replace(r"\?", "[^.]")
    s = re.sub(r"(\\\*)+", "\0", s)
    for old, new in (
        (r"^\0\\\.", r"(?:.+\.)?"),
        (r"^\0", r"(?:.*\D)?"),
        (r"(?<=\\\.)\0(?=\\\.)", ".+"),
        (r"(?<!_)\0(?=\\\.)", r"(?:\..*)?"),
        (r"\0", "[^.]*"),
    ):
        s = re.sub(old, new.replace("\\", r"\\"), s)
    return s + r"(?:\.|\Z)"


def _compile(regex: str, text: str, source: str) -> re.Pattern[str]:
    """Refuses what could match for ever: repeated groups, and too many repetitions and alternatives in a row."""
    s = re.sub(r"(?:\\d|\[0-9\]|\[\^\\?\.\])[+*]\\\.|(?<!\))[*+]\$?$", "x", regex)  # these end in one way only
    s = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "x", s, flags=re.S)  # other atoms
    cost = 6 * len(re.findall(r"[*+{]", s)) + s.count("?") + s.count("(") * (2 + s.count("|")).bit_length()
    if cost > MAX_COST or re.search(r"\)[*+{]|\(\?[a-z-]*x", s):
        raise UserError(f"{source}: pattern {text[:80]!r} has too many repetitions to be safe; write the module names")
    try:
        return re.compile(regex)
    except (re.error, OverflowError, RecursionError, ValueError) as e:
        raise UserError(f"{source}: pattern {text[:80]!r} is no regular expression ({str(e)[:80]})") from None


# ---- claims and tensors ----------------------------------------------------------------------------------------------
def settle(
    scheme: Scheme, stored: Mapping[str, Stored], on_fault: Callable[[str, UserError], None] = stop
) -> tuple[dict[str, Format], list[Notice]]:
    """Final format of every module, its activation decided, and what the JSON has wrong.

    stored: canonical module -> `recognise`'s answer, for the whole checkpoint (vision and MTP too). The storage format
    is always the tensors'. UserError when experts of one projection are stored in different formats.
    """
    formats: dict[str, Format] = {}
    found: list[tuple[tuple[str, str], str]] = []
    hits: set[str] = set()
    stacks: dict[tuple[str, str], list[str]] = {}
    for module, s in stored.items():
        claim, key = scheme.find(module)
        hits.add(key)
        activation = _activation(claim, s, scheme.stated, lambda *r, module=module: found.append((r, module)))
        formats[module] = s.format.with_activation(activation)
        expert, _, last = module.rpartition(".")
        experts, _, number = expert.rpartition(".")
        if number.isdigit() and experts.endswith("experts"):
            stacks.setdefault((experts, last), []).append(module)
    for (experts, last), members in stacks.items():
        names = {formats[m].name: m for m in members}
        if len(names) > 1:
            (a, m), (b, n), *_ = names.items()
            text = f"experts of one layer must share a format, but {m} is stored as {a} and {n} as {b}"
            on_fault(f"{experts}.*.{last}", UserError(text, "experts-differ"))
        if len({formats[m] for m in members}) > 1:  # one kernel reads the stack
            formats.update({m: formats[m].with_activation("none") for m in members})
            text = "only some experts have quantized activations; all of them run weight-only"
            found.append((("experts-activation", text), f"{experts}.*.{last}"))
    missing = {k for k in scheme.entries.exact if k not in hits and k not in stored}
    missing -= {name[: m.start()] for name in (stored if missing else ()) for m in re.finditer(r"\.", name)}  # parents
    text = f"{scheme.default.source} lists it, but the checkpoint has no such tensor"
    return formats, _grouped([*found, *((("entry-unmatched", text), key) for key in sorted(missing))])


def _activation(claim: Claim, s: Stored, stated: bool, remark: Callable[[str, str], None]) -> str:
    """What the layer's input is quantized to. remark(code, sentence) for each difference from the claim."""
    kind = s.format.name.partition("_")[0] if s.format.quantized else "none"
    scale, wanted = "input_scale" in s.extras, claim.activation
    if not stated or claim.format == kind == "none":
        return kind if scale else "none"
    if claim.format != kind:
        code = "stored-dense" if kind == "none" else "stored-quantized" if claim.format == "none" else "format-differs"
        if kind != "none" or len(s.shape) == 2 or (len(s.shape) == 3 and ".experts." in s.module):
            remark(code, f"stored as {s.format.name} though {claim.sentence}; it runs as stored")
        wanted = "fp8" if kind == "fp8" and scale else "none"
    if wanted == kind != "none":
        if scale or (claim.dynamic and kind == "fp8"):
            return kind
        remark("input-scale-missing", f"{claim.sentence}, but no input_scale is stored; it runs weight-only")
    elif wanted != "none":
        remark("activation-dropped", f"{claim.sentence}, but {wanted} inputs to {kind} are not supported: weight-only")
    elif scale:
        remark("input-scale-ignored", f"an input_scale is stored though {claim.sentence}; it runs weight-only")
    return "none"


def _grouped(found: Iterable[tuple[tuple[str, str], str]]) -> list[Notice]:
    """One notice for all layers and experts of a kind: numbers in names become *, and a count follows."""
    groups: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
    for (code, text), module in found:
        groups.setdefault((code, NUMBER.sub("*", module), NUMBER.sub("*", text)), []).append((module, text))
    return [
        Notice(code, f"{pattern} ({len(each)})", text) if len(each) > 1 else Notice(code, *each[0])
        for (code, pattern, text), each in groups.items()
    ]


def kv_notices(scheme: Scheme, layers: Collection[int], scales: Mapping[int, Collection[str]]) -> list[Notice]:
    """What the cache of attention layers is scaled by. scales: layer -> those of k_scale, v_scale that are stored; one
    that is absent is 1. Nothing is said of an FP8 cache with both, nor of an unquantized one with none."""
    unit = ("kv-scale-unit", "FP8 KV cache without stored k_scale and v_scale; both are 1")
    one = ("kv-scale-one", "FP8 KV cache with only one of k_scale and v_scale stored; the other is 1")
    unasked = ("kv-scale-unasked", "a scale is stored for the KV cache, though no FP8 cache is asked for")
    texts = {0: unit, 1: one} if scheme.kv_cache == "fp8" else {1: unasked, 2: unasked}
    counts = {i: len({"k_scale", "v_scale"} & set(scales.get(i, ()))) for i in sorted(layers)}
    return _grouped((texts[n], f"layers.{i}.self_attn") for i, n in counts.items() if n in texts)
